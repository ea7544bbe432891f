"""A job of many trials on the engine alone, carried out at once by a shell that does nothing; for `benchmarks.driver`.

The clock is virtual, and the numbers come from a seeded generator: a case has the same events in every run.
"""

from __future__ import annotations

import heapq
import random
import time
from dataclasses import dataclass, field
from itertools import count

from fluidtune.engine import Engine
from fluidtune.engine import messages as m

#: Devices of a node. As GPU nodes have.
PER_NODE = 8
#: Seconds of an iteration on one device, iterations of a trial: the smallest and the largest. Trials of a
#: search differ by about this much, and end often enough that places become free all the time.
SECONDS, ITERATIONS = (0.5, 4.0), (3, 12)
#: The part of a device's memory that a trial needs.
MEMORY = 0.3


@dataclass(frozen=True)
class Case:
    """A job: its trials, its devices and its engine's settings, see `Engine`."""

    name: str
    trials: int
    devices: int
    kind: m.Kind
    synchronous: bool
    packing: int | None = 1
    lanes: str | None = None
    #: What trials ask for, in turn.
    shares: tuple[float, ...] = (1.0,)
    #: Groups, to which the trials belong in turn, and what each is announced with.
    groups: int = 1
    concurrency: int | None = None
    #: The engine is told how many iterations a trial has.
    told: bool = True
    #: Of a hundred reports so many come with a loss: of a worker, or of a device, in place of which another one comes.
    losses: int = 0
    #: Trials differ in hyperparameters that say how long their iterations take.
    varied: bool = True
    #: Trials that come one by one, with every second report.
    late: int = 0


@dataclass
class _Trial:
    """What the shell knows of a trial."""

    seconds: float
    left: int
    share: float
    group: str
    #: Devices of its workers, and those of a resize that is not answered; number of its present start.
    devices: tuple[int, ...] = ()
    wanted: tuple[int, ...] | None = None
    start: int = 0
    suspend: bool = False


@dataclass
class Job:
    """One run of ``case``: `arrive` first, then `run`. Both return the CPU seconds of each call of the engine."""

    case: Case
    calls: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        case = self.case
        self._random = random.Random(case.name)
        self.engine = Engine(max_packing=case.packing, lanes=case.lanes, concurrent_packing=1)
        self._trials: dict[str, _Trial] = {}
        #: (time, number, trial, number of its start): ends of iterations.
        self._heap: list[tuple[float, int, str, int]] = []
        self._count = count(1)
        self._now = 0.0

    def arrive(self, at_once: int) -> list[float]:
        """The devices come, and then the trials, ``at_once`` in each call."""
        case = self.case
        gained = [m.DeviceGained(device, f"node{device // PER_NODE}") for device in range(case.devices)]
        announced = [
            m.GroupAnnounced(f"group{number}", case.synchronous, case.concurrency) for number in range(case.groups)
        ]
        self._send(*gained, *announced)
        self.calls.clear()
        events: list[m.Event] = []
        for _ in range(case.trials):
            events.append(self._new_trial())
            if len(events) == at_once:
                self._send(*events)
                events.clear()
        if events:
            self._send(*events)
        calls, self.calls = self.calls, []
        return calls

    def _new_trial(self) -> m.TrialAdded:
        case, draw, number = self.case, self._random, len(self._trials)
        width = draw.choice((16, 32, 64, 128))
        trial = _Trial(
            draw.uniform(*SECONDS) * width / 64,
            draw.randint(*ITERATIONS),
            case.shares[number % len(case.shares)],
            f"group{number % case.groups}",
        )
        name = f"trial{number}"
        self._trials[name] = trial
        traits = (("width", str(width)), ("lr", repr(draw.random()))) if case.varied else ()
        return self._added(name, trial, traits)

    def _added(self, name: str, trial: _Trial, traits: m.Traits = ()) -> m.TrialAdded:
        left = trial.left if self.case.told else None
        kind = self.case.kind
        return m.TrialAdded(name, trial.group, kind, left, trial.share, traits, growable=kind == "elastic")

    def run(self, events: int, seconds: float) -> list[float]:
        """Trials report and end, for so many events or so many CPU seconds."""
        until = time.process_time() + seconds
        while self._heap and len(self.calls) < events and time.process_time() < until:
            self._now, _, name, start = heapq.heappop(self._heap)
            if self._trials[name].start == start:
                if self._random.randrange(100) < self.case.losses:
                    self._lose(name)
                else:
                    self._report(name)
                if len(self._trials) < self.case.trials + self.case.late and len(self.calls) % 2:
                    self._send(self._new_trial())
        return self.calls

    def _send(self, *events: m.Event) -> None:
        began = time.process_time()
        out = self.engine.handle(*events, now=self._now)
        self.calls.append(time.process_time() - began)
        for instruction in out:
            self._carry_out(instruction)

    def _carry_out(self, instruction: m.Instruction) -> None:
        if isinstance(instruction, m.Start):
            trial = self._trials[instruction.trial]
            gang = trial.share > 1
            trial.devices = instruction.devices if gang else instruction.devices[:1]
            trial.wanted = instruction.devices if not gang and len(instruction.devices) > 1 else None
            trial.start = next(self._count)
            self._begin_iteration(instruction.trial)
        elif isinstance(instruction, m.Resize):
            self._trials[instruction.trial].wanted = instruction.devices
        elif isinstance(instruction, m.Suspend):
            self._trials[instruction.trial].suspend = True

    def _begin_iteration(self, name: str) -> None:
        trial = self._trials[name]
        sharing = len(self.engine.tenants(trial.devices[0]))
        seconds = self._seconds(trial) * (1 + 0.5 * (sharing - 1))
        heapq.heappush(self._heap, (self._now + seconds, next(self._count), name, trial.start))

    def _lose(self, name: str) -> None:
        """The trial loses its worker, or its device, in place of which a new one comes."""
        trial = self._trials[name]
        device = trial.devices[0]
        if self._random.random() < 0.5:
            self._stop(name)
            self._send(m.WorkerLost(name))
            return
        for other in self.engine.tenants(device):
            self._stop(other)
        self._send(m.DeviceLost(device), m.DeviceGained(device, f"node{device // PER_NODE}"))

    def _stop(self, name: str) -> None:
        trial = self._trials[name]
        trial.start, trial.wanted, trial.suspend = 0, None, False

    def _seconds(self, trial: _Trial) -> float:
        """Seconds of an iteration alone on its devices, with a noise of a tenth and a beta of 1.02."""
        width = len(trial.devices)
        return trial.seconds * 1.02 ** (width - 1) / width * self._random.uniform(0.9, 1.1)

    def _report(self, name: str) -> None:
        trial = self._trials[name]
        reported = m.Result(name, self._seconds(trial), len(trial.devices), MEMORY, MEMORY / 2)
        trial.left -= 1
        if not trial.left:
            self._stop(name)
            self._send(reported, m.TrialEnded(name, "stopped"))
            return
        if trial.suspend:
            self._stop(name)
            self._send(reported, m.TrialEnded(name, "paused"), self._added(name, trial))
            return
        events: list[m.Event] = [reported]
        if trial.wanted is not None:
            trial.devices, trial.wanted = trial.wanted, None
            events.append(m.Resized(name, trial.devices))
        start = trial.start
        self._send(*events)
        if trial.start == start:
            self._begin_iteration(name)
