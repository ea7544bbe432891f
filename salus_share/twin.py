"""The virtual-clock shell: whole traces on one device in seconds, decided by the scheduler that real trials use.

What is modelled and not measured: lanes that run at the same time share the device's compute. While the running
iterations' ``compute`` adds up to more than 1, all of them are stretched by that sum; below 1 nobody is.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from salus_share.errors import SalusError
from salus_share.messages import (
    Admit,
    Event,
    Instruction,
    IterationEnded,
    JobAdded,
    JobLeft,
    Need,
    Pause,
    Paused,
    Ready,
    Refuse,
    Run,
)
from salus_share.policies import Policy
from salus_share.scheduler import Scheduler

#: Bytes per second at which a paused job's persistent memory leaves the device, and comes back.
MOVE_RATE = 1e9


@dataclass(frozen=True)
class TwinJob:
    """A job of a trace: it arrives at ``arrival`` s and runs ``iterations`` of ``seconds`` each when alone."""

    name: str
    arrival: float
    need: Need
    iterations: int
    seconds: float

    @property
    def alone(self) -> float:
        """Seconds from its first iteration to its last, alone on the device."""
        return self.iterations * self.seconds


@dataclass
class Record:
    """What became of a job, seconds on the virtual clock."""

    arrival: float
    started: float = math.nan
    ended: float = math.nan
    pauses: int = 0
    #: (end of an iteration, seconds it took), in order; only if the run was asked to keep them.
    iterations: list[tuple[float, float]] = field(default_factory=list)

    @property
    def queueing(self) -> float:
        """From its arrival to its first iteration."""
        return self.started - self.arrival

    @property
    def completion(self) -> float:
        """JCT: from its arrival to its end."""
        return self.ended - self.arrival


@dataclass
class _Running:
    """One job's iteration under way: seconds left of it, as if alone."""

    left: float
    compute: float
    began: float


class _Device:
    """One run of the twin."""

    def __init__(self, jobs: Sequence[TwinJob], capacity: float, policy: Policy, keep: bool) -> None:
        self._jobs = {job.name: job for job in jobs}
        if len(self._jobs) != len(jobs):
            raise SalusError("two jobs of the trace have the same name")
        self._scheduler = Scheduler(capacity, policy)
        self._keep = keep
        self.records = {job.name: Record(job.arrival) for job in jobs}
        self._left = {job.name: job.iterations for job in jobs}
        self._tokens: dict[str, int] = {}
        self._running: dict[str, _Running] = {}
        self._leaving: set[str] = set()
        self._resumed: set[str] = set()
        self._now = 0.0
        self._order = itertools.count()
        #: (time, order, event): arrivals and loads that end.
        self._later: list[tuple[float, int, Event]] = []
        for job in jobs:
            self._at(job.arrival, JobAdded(job.name, job.need, remaining=job.alone))

    def run(self) -> None:
        while self._later or self._running:
            stretch = max(1.0, math.fsum(running.compute for running in self._running.values()))
            first = min(self._running, key=lambda name: self._running[name].left, default=None)
            ends = math.inf if first is None else self._now + self._running[first].left * stretch
            if self._later and self._later[0][0] <= ends:
                moment, _, event = heapq.heappop(self._later)
                self._pass(moment, stretch)
                self._tell(event)
            else:
                assert first is not None
                self._pass(ends, stretch)
                self._iteration_over(first)

    def _pass(self, moment: float, stretch: float) -> None:
        for running in self._running.values():
            running.left = max(0.0, running.left - (moment - self._now) / stretch)
        self._now = moment

    def _iteration_over(self, name: str) -> None:
        running = self._running.pop(name)
        seconds = self._now - running.began
        self._left[name] -= 1
        if self._keep:
            self.records[name].iterations.append((self._now, seconds))
        if self._left[name] == 0:
            self.records[name].ended = self._now
            self._tell(IterationEnded(name, seconds), JobLeft(name))
        else:
            self._tell(IterationEnded(name, seconds, again=True))
            if name in self._leaving:
                self._leave(name)

    def _tell(self, *events: Event) -> None:
        for event in events:
            for instruction in self._scheduler.handle(event):
                self._do(instruction)

    def _do(self, instruction: Instruction) -> None:
        match instruction:
            case Admit(job, _, token):
                self._tokens[job] = token
                load = float(self._jobs[job].need.persistent) / MOVE_RATE if job in self._resumed else 0.0
                self._at(self._now + load, Ready(job, token))
            case Run(job, _):
                record = self.records[job]
                if math.isnan(record.started):
                    record.started = self._now
                spec = self._jobs[job]
                compute = 1.0 if spec.need.compute is None else spec.need.compute
                self._running[job] = _Running(spec.seconds, compute, self._now)
            case Pause(job):
                self._leaving.add(job)
                if job not in self._running:
                    self._leave(job)
            case Refuse(_, reason):
                raise SalusError(reason)

    def _leave(self, name: str) -> None:
        self._leaving.discard(name)
        self._resumed.add(name)
        self.records[name].pauses += 1
        # Loads that were under way are void: their token is old.
        self._later = [item for item in self._later if not (isinstance(item[2], Ready) and item[2].job == name)]
        heapq.heapify(self._later)
        self._at(self._now + float(self._jobs[name].need.persistent) / MOVE_RATE, Paused(name))

    def _at(self, moment: float, event: Event) -> None:
        heapq.heappush(self._later, (moment, next(self._order), event))


def simulate(
    jobs: Sequence[TwinJob], capacity: float, policy: Policy, *, keep_iterations: bool = False
) -> dict[str, Record]:
    """Run a trace on one device of ``capacity`` bytes under a policy. Returns what became of every job.

    Raises SalusError if a job can never fit.
    """
    device = _Device(jobs, capacity, policy, keep_iterations)
    device.run()
    return device.records
