"""Whole tuning jobs, run to their end by the engine on a fake clock."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count

import pytest

from fluidtune.engine import Engine
from fluidtune.engine import messages as m
from tests.engine.helpers import holders
from tests.engine.invariants import check_engine


@dataclass
class World:
    """Trials with a true speed. A resize takes ``pause`` seconds, in which the trial trains on."""

    engine: Engine
    #: Iterations to do and seconds of each on one worker, by trial.
    todo: dict[str, tuple[int, float]]
    beta: float = 1.05
    pause: float = 0.1
    devices: dict[str, tuple[int, ...]] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    now: float = 0.0
    resizes: int = 0
    order: count = field(default_factory=count)
    heap: list = field(default_factory=list)

    def run(self, *events) -> float:
        """Makespan in seconds."""
        self.carry_out(self.engine.handle(*events, now=0.0))
        total = len(holders(self.engine))
        while self.heap:
            at, _, kind, trial, devices = heapq.heappop(self.heap)
            self.now = at
            if self.done.get(trial, 0) >= self.todo[trial][0]:
                continue
            if kind == "resized":
                self.devices[trial] = devices
                self.resizes += 1
                self.carry_out(self.engine.handle(m.Resized(trial, devices, self.pause), now=at))
                continue
            width = len(self.devices[trial])
            self.done[trial] = self.done.get(trial, 0) + 1
            events = [m.Result(trial, self.seconds(trial), width)]
            if self.done[trial] < self.todo[trial][0]:
                self.push(self.seconds(trial), "result", trial)
            else:
                events.append(m.TrialEnded(trial, "stopped"))
            self.carry_out(self.engine.handle(*events, now=at))
        check_engine(self.engine)
        assert all(self.done[trial] == self.todo[trial][0] for trial in self.todo)
        assert len(self.engine.idle_devices) == total
        return self.now

    def seconds(self, trial: str) -> float:
        width = len(self.devices[trial])
        return self.todo[trial][1] / width * self.beta ** (width - 1)

    def push(self, after: float, kind: str, trial: str, devices: tuple[int, ...] = ()) -> None:
        heapq.heappush(self.heap, (self.now + after, next(self.order), kind, trial, devices))

    def carry_out(self, instructions) -> None:
        for instruction in instructions:
            if isinstance(instruction, m.Start):
                self.devices[instruction.trial] = instruction.devices[:1]
                self.push(self.seconds(instruction.trial), "result", instruction.trial)
            if isinstance(instruction, m.Resize) or (isinstance(instruction, m.Start) and len(instruction.devices) > 1):
                self.push(self.pause, "resized", instruction.trial, instruction.devices)
            assert isinstance(instruction, (m.Start, m.Resize, m.Release))


def test_a_trial_that_does_not_scale_is_no_longer_resized_after_a_few_attempts():
    todo = {f"t{k}": (60, 1.0) for k in range(6)}
    world = World(Engine(), todo, beta=2.5)
    makespan = world.run(
        *[m.DeviceGained(d) for d in range(16)],
        m.GroupAnnounced("g"),
        *[m.TrialAdded(name, "g", "elastic", 60, growable=True) for name in todo],
    )
    print(f"{world.resizes} resizes, makespan {makespan:.1f} s, 60 s without")
    assert world.resizes <= 3 * len(todo)
    assert makespan < 75


@pytest.mark.timeout(120)
def test_four_thousand_trials_on_four_hundred_devices():
    """4,000 trials on 400 devices."""
    todo = {f"t{k}": (3, 1.0 + 0.1 * (k % 7)) for k in range(4_000)}
    world = World(Engine(), todo)
    gained = [m.DeviceGained(d, f"n{d // 8}") for d in range(400)]
    first = world.engine.handle(
        *gained, m.GroupAnnounced("g"), *[m.TrialAdded(n, "g", "elastic", 3, growable=True) for n in todo], now=0.0
    )
    assert len(first) == 400
    world.carry_out(first)
    world.run()


def test_elastic_trials_that_arrive_one_by_one_share_the_devices():
    """The first trial is alone and gets all devices. The others must not wait until it has ended."""
    engine = Engine()
    out = engine.handle(*[m.DeviceGained(d) for d in range(8)], m.GroupAnnounced("g"), now=0.0)
    for k in range(8):
        out += engine.handle(m.TrialAdded(f"t{k}", "g", "elastic", 1000, growable=True), now=0.0)
    for instruction in out:
        if isinstance(instruction, m.Resize) or (isinstance(instruction, m.Start) and len(instruction.devices) > 1):
            out += engine.handle(m.Resized(instruction.trial, instruction.devices, 0.1), now=1.0)
    assert len(engine.held_devices()) == 8
