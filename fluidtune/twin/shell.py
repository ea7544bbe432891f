"""The shell on a virtual clock: carries out what the engine says, as the shell on Ray does, but in virtual time.

An iteration takes what the profile says for the trial's devices and for the number of trials that train on its first
device; these may change meanwhile. A growth waits for its new workers. When they are there, it stops the trial for as
long as the profile says, amid an iteration. To shrink takes no time.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from fluidtune.engine import Engine
from fluidtune.engine import messages as m
from fluidtune.profiles import DEVICES_PER_NODE
from fluidtune.twin.recorded_job import RecordedJob, RecordedTrial


@dataclass(eq=False)
class _Step:
    """An iteration under way."""

    begun: float
    #: The time at which ``left`` of it, 1 to 0, was to be done.
    since: float
    #: What a whole iteration takes with the neighbours of this moment.
    seconds: float
    left: float = 1.0
    end: float = 0.0
    #: The trial was resized meanwhile.
    mixed: bool = False


@dataclass(eq=False)
class _Run:
    """A trial that holds devices."""

    trial: str
    devices: tuple[int, ...]
    #: Devices of the resize under way; None if there is none.
    wanted: tuple[int, ...] | None = None
    #: Devices of ``wanted``, beside its own, on which its new workers are there.
    joined: set[int] = field(default_factory=set)
    #: Devices that it was started on, if it is to have others than its first. They come when its first worker is there.
    later: tuple[int, ...] | None = None
    #: The engine wants it to leave.
    suspend: bool = False
    #: It still holds its devices.
    live: bool = True
    #: It has begun its first iteration, so that it slows its neighbours down.
    trains: bool = False
    step: _Step | None = None


@dataclass(eq=False)
class _Progress:
    """What a trial has done."""

    trial: RecordedTrial
    #: Index of its stage, and iterations left there.
    stage: int = 0
    left: int = 0
    run: _Run | None = None
    #: Its kind, and whether it can grow, as the engine knows it.
    kind: m.Kind = "plain"
    growable: bool = False


@dataclass
class Twin:
    """One run of ``job`` on ``devices`` devices; `run` does it.

    After the run, ``now`` is its seconds, ``busy`` the device-seconds that trials held, and ``resizes`` and
    ``iterations`` are the numbers of these.
    """

    job: RecordedJob
    devices: int
    now: float = 0.0
    resizes: int = 0
    busy: float = 0.0
    iterations: int = 0

    def __post_init__(self) -> None:
        job = self.job
        self.engine = Engine(
            max_packing=job.max_packing,
            concurrent_packing=job.concurrent_packing,
            max_workers=job.max_workers,
        )
        #: Devices of one node: as common machines have, or as the run's had for its widest trial.
        self._per_node = max(DEVICES_PER_NODE, job.widest)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._events: list[m.Event] = []
        self._trials = {recorded.trial: _Progress(recorded) for recorded in job.trials}
        self._new = deque(self._trials)
        #: By group: trials that have a stage in it and have not finished it.
        self._open: Counter[str] = Counter(stage.group for recorded in job.trials for stage in recorded.stages)
        #: By group, trials that wait for it to end.
        self._barred: dict[str, list[str]] = {}
        self._announced: set[str] = set()
        self._kind: m.Kind = "plain"
        self._growable = False
        #: Number of processes that serve no trial and may serve another one, by device.
        self._idle: Counter[int] = Counter()
        at_once, self._start_s = job.costs.starts(0)
        #: When each of the processes that may start at a time is there; none: all may.
        self._starting = [0.0] * at_once
        #: Trials that train, by their first device.
        self._training: dict[int, list[_Run]] = {}
        self._tails = _tails(job)
        #: Trials added that have not started yet.
        self._unstarted = 0

    def run(self) -> float:
        """Runs the job. Returns seconds from its begin to the end of its last trial."""
        self.now = self.job.costs.begin
        for device in range(self.devices):
            self._events.append(m.DeviceGained(device, f"node{device // self._per_node}"))
        self._offer_trials()
        self._advance()
        while self._heap:
            at, _, what = heapq.heappop(self._heap)
            self._pass_time(at)
            what()
            # The engine decides once about all that happens at one instant.
            while self._heap and self._heap[0][0] <= self.now:
                heapq.heappop(self._heap)[2]()
            self._advance()
        left = [name for name, progress in self._trials.items() if progress.stage < len(progress.trial.stages)]
        assert not left, f"trials never ended: {left[:5]}"
        return self.now

    @property
    def held_part(self) -> float:
        """Device-seconds that trials held divided by all of them."""
        return self.busy / (self.now * self.devices) if self.now else 0.0

    # Time

    def _pass_time(self, at: float) -> None:
        used = self.devices - len(self.engine.idle_devices)
        self.busy += (at - self.now) * used
        self.now = at

    def _call_after(self, after: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + after, next(self._order), what))

    def _advance(self) -> None:
        while self._events:
            events, self._events = self._events, []
            for instruction in self.engine.handle(*events, now=self.now):
                self._carry_out(instruction)
            self._offer_trials()

    # Trials

    def _offer_trials(self) -> None:
        """Adds new trials until as many have not started as the search algorithm offers at once."""
        while self._new and (self.job.pending is None or self._unstarted < self.job.pending):
            self._unstarted += 1
            self._add_trial(self._new.popleft())

    def _add_trial(self, name: str) -> None:
        progress = self._trials[name]
        stage = progress.trial.stages[progress.stage]
        progress.left, progress.kind, progress.growable = stage.iterations, self._kind, self._growable
        if stage.group not in self._announced:
            self._announced.add(stage.group)
            synchronous = self.job.synchronous.get(stage.group, True)
            concurrency = self.job.concurrency.get(stage.group)
            self._events.append(
                m.GroupAnnounced(stage.group, synchronous, concurrency, self._tails.get(stage.group, 0.0))
            )
        added = m.TrialAdded(name, stage.group, self._kind, stage.told, stage.share, growable=self._growable)
        self._events.append(added)
        if not stage.iterations:
            self._end_stage(name)

    def _end_stage(self, name: str) -> None:
        progress = self._trials[name]
        stages = progress.trial.stages
        group = stages[progress.stage].group
        progress.stage += 1
        last = progress.stage == len(stages)
        self._free_devices(progress)
        self._events.append(m.TrialEnded(name, "stopped" if last else "paused"))
        self._open[group] -= 1
        if not last:
            if self.job.synchronous.get(group, True) and self._open[group]:
                self._barred.setdefault(group, []).append(name)
            else:
                self._add_trial(name)
        if not self._open[group]:
            for waiting in self._barred.pop(group, []):
                self._add_trial(waiting)

    def _free_devices(self, progress: _Progress) -> None:
        if progress.run is not None:
            run, progress.run = progress.run, None
            run.live = False
            self._keep(*run.devices, *run.joined)
            if run.trains:
                self._training[run.devices[0]].remove(run)
                self._retime(run.devices[0])

    # Instructions

    def _carry_out(self, instruction: m.Instruction) -> None:
        if isinstance(instruction, m.Start):
            if not isinstance(instruction, m.Resume):
                self._unstarted -= 1
            progress = self._trials[instruction.trial]
            first = instruction.devices[0]
            gang = progress.trial.stages[progress.stage].share > 1
            run = progress.run = _Run(instruction.trial, instruction.devices if gang else (first,))
            if self.job.waits and isinstance(instruction, m.Resume):
                self._call_after(self.job.costs.turn, lambda: self._begin(run))
            else:
                self._get_worker(first, lambda: self._begin(run))
            if len(instruction.devices) > len(run.devices):
                run.later = instruction.devices
        elif isinstance(instruction, m.Resize):
            found = self._trials[instruction.trial].run
            assert found is not None
            self._resize(found, instruction.devices)
        elif isinstance(instruction, m.Suspend):
            found = self._trials[instruction.trial].run
            if found is not None:
                found.suspend = True

    def _get_worker(self, device: int, then: Callable[[], None]) -> None:
        """Call ``then`` when a worker of the device serves: a new one, or one that has served another trial."""
        if self._idle[device]:
            self._idle[device] -= 1
            self._call_after(self.job.costs.turn, then)
            return
        # New ones start in turn, a few at a time, as in `cluster.pool`.
        there = self._start_s + (max(self.now, self._starting[0]) if self._starting else self.now)
        if self._starting:
            heapq.heapreplace(self._starting, there)
        began: Callable[[], None] = partial(self._call_after, self.job.costs.first, then)
        heapq.heappush(self._heap, (there, next(self._order), began))

    def _keep(self, *devices: int) -> None:
        """A worker of each device serves no trial any more."""
        if self.job.reuses:
            self._idle.update(devices)

    def _begin(self, run: _Run) -> None:
        """The trial's first worker is there."""
        if run.live and run.later is not None:
            self._resize(run, run.later)
        self._iterate(run)

    def _resize(self, run: _Run, devices: tuple[int, ...]) -> None:
        run.wanted = devices

        def joined(device: int) -> None:
            if run.live and run.wanted == devices:
                run.joined.add(device)
                self._attach(run)
            else:
                self._keep(device)

        for device in devices:
            if device not in run.devices:
                self._get_worker(device, partial(joined, device))
        self._attach(run)

    def _attach(self, run: _Run) -> None:
        """The resize is done if all new workers are there. An iteration under way goes on at the new width."""
        if run.wanted is None or not run.joined >= set(run.wanted) - set(run.devices):
            return
        # Processes of followers that are dropped are ended, as `cluster.pool` ends them.
        run.devices, run.wanted, run.joined = run.wanted, None, set()
        self.resizes += 1
        self._events.append(m.Resized(run.trial, run.devices))
        if run.step is not None:
            run.step.mixed = True
            self._go_on(run, run.step)

    # Iterations

    def _iterate(self, run: _Run) -> None:
        """A boundary: the next iteration begins."""
        if not run.live:
            return
        if not run.trains:
            run.trains = True
            self._training.setdefault(run.devices[0], []).append(run)
            self._retime(run.devices[0])
        run.step = _Step(self.now, self.now, self._seconds(run))
        self._schedule(run)

    def _seconds(self, run: _Run) -> float:
        """What a whole iteration takes with the neighbours of this moment."""
        nodes = tuple(sorted(Counter(device // self._per_node for device in run.devices).values()))
        trials = len(self._training[run.devices[0]])
        return self.job.profile.iteration(nodes, trials) * self._trials[run.trial].trial.cost

    def _schedule(self, run: _Run) -> None:
        step = run.step
        assert step is not None
        end = step.end = step.since + step.left * step.seconds

        def ended() -> None:
            # If it was given another end meanwhile, that one counts.
            if run.live and run.step is step and step.end == end:
                self._done(run, step)

        self._call_after(end - self.now, ended)

    def _retime(self, device: int) -> None:
        """A trial came to the device or left it: iterations under way there go on at another pace."""
        for run in self._training[device]:
            if run.step is not None and self._seconds(run) != run.step.seconds:
                self._go_on(run, run.step)

    def _go_on(self, run: _Run, step: _Step) -> None:
        """The iteration under way goes on at the pace of this moment."""
        step.left = max(0.0, step.left - (self.now - step.since) / step.seconds)
        step.since, step.seconds = self.now, self._seconds(run)
        self._schedule(run)

    def _done(self, run: _Run, step: _Step) -> None:
        name, run.step = run.trial, None
        seconds = self.now - step.begun
        width: float | None = float(len(run.devices))
        if len(run.devices) == 1:
            width = 1 / len(self._training[run.devices[0]])
        progress = self._trials[name]
        if progress.kind != self.job.kind:
            self._kind = self.job.kind
            for found in (name, *(one for one in self.engine.waiting if self._trials[one].kind != self._kind)):
                self._trials[found].kind = self._kind
                self._events.append(m.KindFound(found, self._kind))
        if self.job.growable and not progress.growable:
            self._growable = True
            for found in (name, *(one for one in self.engine.waiting if not self._trials[one].growable)):
                self._trials[found].growable = True
                self._events.append(m.CanGrow(found))
        self.iterations += 1
        self._events.append(m.Result(name, seconds, None if step.mixed else width, self.job.profile.memory))
        progress.left -= 1
        if not progress.left:
            self._end_stage(name)
        elif run.suspend:
            self._free_devices(progress)
            stage = progress.trial.stages[progress.stage]
            told = None if stage.told is None else max(0.0, stage.told - stage.iterations + progress.left)
            moved = m.TrialAdded(name, stage.group, self._kind, told, stage.share, growable=self._growable)
            self._events += [m.TrialEnded(name, "paused"), moved]
        else:
            self._call_after(self.job.costs.turn, lambda: self._iterate(run))


def _tails(job: RecordedJob) -> dict[str, float]:
    """By group, the most iterations that one of its trials does in later groups."""
    tails: dict[str, float] = {}
    for recorded in job.trials:
        after = 0.0
        for stage in reversed(recorded.stages):
            tails[stage.group] = max(tails.get(stage.group, 0.0), after)
            after += stage.iterations
    return tails


@dataclass(frozen=True)
class Forecast:
    """One run of the twin.

    ``makespan``: seconds. ``device_hours``: what the devices cost, idle or not. ``held``: the part of the
    device-seconds that trials held, 0 to 1. ``packing``: c, as given or found.
    """

    devices: int
    makespan: float
    device_hours: float
    held: float
    resizes: int
    packing: int


def forecast(job: RecordedJob, devices: int) -> Forecast:
    """One run of ``job`` on ``devices`` devices."""
    twin = Twin(job, devices)
    makespan = twin.run()
    hours = makespan * devices / 3600
    return Forecast(devices, makespan, hours, twin.held_part, twin.resizes, twin.engine.c)
