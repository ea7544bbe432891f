"""The scheduler of one device: takes what happened, says what must be done.

Decides who is admitted and into which lane, who must make room, and whose iteration runs next. It knows no clock,
processes, or torch: the lane service, the twin and the tests drive the same machine. Which trials come to a device
is not decided here.

    waiting --Admit--> resident (idle --Ready--> ready --Run--> running --IterationEnded--> idle)
       ^                   |
       +------Paused-------+--Pause--> leaving          JobLeft from anywhere: not known any more
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from salus_share.errors import SalusError, StaleToken
from salus_share.lanes import Amount, LaneTable, Place, amount
from salus_share.messages import (
    Admit,
    Event,
    Instruction,
    IterationEnded,
    JobAdded,
    JobLeft,
    Move,
    Need,
    NeedFound,
    Pause,
    Paused,
    Progress,
    Ready,
    Refuse,
    Run,
)
from salus_share.policies import Policy, Standing, back, next_turn, served

Status = Literal["waiting", "idle", "ready", "running"]


@dataclass
class Job:
    """One job's books."""

    name: str
    #: The whole device, as long as nobody knows it.
    need: Need
    standing: Standing
    status: Status = "waiting"
    #: Of its last admission; 0 before the first.
    token: int = 0
    #: It was told to leave and has not yet. Only of residents.
    leaving: bool = False
    #: How many jobs were admitted past it since it began to wait.
    passed: int = 0


@dataclass(frozen=True)
class Resident:
    """A job as a shell found it again: what is needed to go on as if nothing had happened."""

    name: str
    place: Place
    token: int
    standing: Standing
    leaving: bool = False


@dataclass
class _Turns:
    """Of one lane: who is ready, who runs (None: nobody), and the service of whoever began last."""

    ready: dict[str, Standing] = field(default_factory=dict)
    running: str | None = None
    clock: float = 0.0


class Scheduler:
    """Divides a device of ``capacity`` bytes among jobs by ``policy``."""

    def __init__(self, capacity: Amount, policy: Policy) -> None:
        self.policy = policy
        self.table = LaneTable(capacity, policy.max_lanes)
        self._jobs: dict[str, Job] = {}
        self._waiting: dict[str, Job] = {}
        self._turns: dict[int, _Turns] = {}
        self._arrivals = 0
        self._tokens = 0
        self._turn = 0
        self._takers: dict[type[Event], Callable[..., list[Instruction]]] = {
            JobAdded: self._added,
            NeedFound: self._need_found,
            Progress: self._progress,
            Ready: self._ready,
            IterationEnded: self._ended,
            Paused: self._paused,
            JobLeft: self._left,
        }

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event. Returns what must be done, in this order.

        Raises SalusError for an event that cannot be true, and StaleToken for a token that is old; it then changed
        nothing.
        """
        taker = self._takers.get(type(event))
        if taker is None:
            raise SalusError(f"{event!r} is not an event of salus_share.messages")
        return taker(event)

    def restore(self, residents: Iterable[Resident], tokens: int) -> list[Instruction]:
        """Begin with jobs that are on the device already, in their lanes; ``tokens``: the last one given out.

        Where 2.1 would not hold the largest are told to leave, with what there is as theirs until they have.
        """
        self._tokens = tokens
        out: list[Instruction] = []
        for resident in sorted(residents, key=lambda resident: resident.place.persistent + resident.place.ephemeral):
            place = resident.place
            need = Need(place.persistent, place.ephemeral)
            job = Job(resident.name, need, resident.standing, "idle", resident.token, resident.leaving)
            self._jobs[job.name] = job
            turns = self._turns.setdefault(place.lane, _Turns())
            turns.clock = max(turns.clock, resident.standing.service)
            self._arrivals = max(self._arrivals, resident.standing.arrival)
            self._turn = max(self._turn, resident.standing.last_turn)
            if not self.table.has_room(place):
                persistent = min(place.persistent, self.table.free)
                place = replace(place, persistent=persistent, ephemeral=self.table.free - persistent)
                out += self._pause(job)
            self.table.put(job.name, place)
        return out

    # Views

    @property
    def jobs(self) -> dict[str, Job]:
        """Every job that is here or waits, in the order they came. Look, do not change."""
        return dict(self._jobs)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Who waits for admission, next first."""
        return tuple(job.name for job in self._in_order())

    # Events

    def _added(self, event: JobAdded) -> list[Instruction]:
        if event.job in self._jobs:
            raise SalusError(f"{event.job!r} is here already ({self._jobs[event.job].status}); it must leave first")
        _check_remaining(event.job, event.remaining)
        need = event.need if event.need is not None else Need(0, self.table.capacity)
        reason = self._never(event.job, need)
        if reason is not None:
            return [Refuse(event.job, reason)]
        self._arrivals += 1
        standing = Standing(self._arrivals, remaining=event.remaining, rung=event.rung)
        job = Job(event.job, need, standing)
        self._jobs[event.job] = self._waiting[event.job] = job
        return self._admit()

    def _need_found(self, event: NeedFound) -> list[Instruction]:
        job = self._known(event.job)
        reason = self._never(event.job, event.need)
        if job.status == "waiting":
            if reason is not None:
                self._forget(job)
                return [Refuse(job.name, reason), *self._admit()]
            job.need = event.need
            return self._admit()
        if job.status == "running":
            raise SalusError(f"{job.name!r} is within an iteration; tell what it needs at the boundary")
        if reason is not None:
            # It has to go, and will be refused when it asks again.
            job.need = event.need
            return self._pause(job)
        job.need = event.need
        before = self.table.places[job.name].lane
        lane = self.table.change(job.name, event.need.persistent, event.need.ephemeral)
        if lane is None:
            return self._pause(job)
        if lane == before:
            return self._admit()
        out: list[Instruction] = [Move(job.name, lane), *self._off_lane(job, before)]
        self._join(job)
        if job.status == "ready":
            out += self._stand(job)
        return out + self._admit()

    def _progress(self, event: Progress) -> list[Instruction]:
        job = self._known(event.job)
        _check_remaining(event.job, event.remaining)
        self._set(job, replace(job.standing, remaining=event.remaining, rung=event.rung))
        return self._admit()

    def _ready(self, event: Ready) -> list[Instruction]:
        job = self._known(event.job)
        if job.status == "waiting" or job.leaving or event.token != job.token:
            raise StaleToken(f"{job.name!r} came with token {event.token}, but was told to leave the device since")
        if job.status != "idle":
            raise SalusError(f"{job.name!r} is {job.status} already")
        clock = self._turns[self.table.places[job.name].lane].clock
        job.standing = replace(job.standing, service=back(job.standing.service, clock))
        return self._stand(job)

    def _ended(self, event: IterationEnded) -> list[Instruction]:
        job = self._known(event.job)
        if job.status != "running":
            raise SalusError(f"{job.name!r} ended an iteration, but is {job.status}")
        if not (math.isfinite(event.seconds) and event.seconds >= 0):
            raise SalusError(f"an iteration of {job.name!r} took {event.seconds!r}, expected seconds >= 0")
        self._turn += 1
        job.status = "idle"
        job.standing = served(job.standing, event.seconds, self._turn)
        lane = self.table.places[job.name].lane
        self._turns[lane].running = None
        if event.again and not job.leaving:
            return self._stand(job)
        return self._next(lane)

    def _paused(self, event: Paused) -> list[Instruction]:
        job = self._known(event.job)
        if job.status == "waiting":
            raise SalusError(f"{job.name!r} waits already")
        freed = self._off_device(job)
        reason = self._never(job.name, job.need)
        if reason is not None:
            self._forget(job)
            return [Refuse(job.name, reason), *freed, *self._admit()]
        job.passed = 0
        self._waiting[job.name] = job
        return freed + self._admit()

    def _left(self, event: JobLeft) -> list[Instruction]:
        job = self._known(event.job)
        freed = [] if job.status == "waiting" else self._off_device(job)
        self._forget(job)
        return freed + self._admit()

    # Admission

    def _admit(self) -> list[Instruction]:
        """Admit whom memory and policy let in; ask residents to leave for one that may take their place."""
        out: list[Instruction] = []
        overtaken: list[Job] = []
        for job in self._in_order() if self._waiting else ():
            if self.policy.max_jobs is not None and len(self.table.places) >= self.policy.max_jobs:
                lane = None
            else:
                lane = self.table.admit(job.name, job.need.persistent, job.need.ephemeral)
            if lane is not None:
                del self._waiting[job.name]
                self._tokens += 1
                job.status, job.token, job.passed = "idle", self._tokens, 0
                self._join(job)
                out.append(Admit(job.name, lane, job.token))
                for other in overtaken:
                    other.passed += 1
                if any(other.passed >= self.policy.patience for other in overtaken):
                    break
                continue
            pauses = self._make_room(job)
            if pauses is not None:
                # What they free is this job's: nobody behind it may take it meanwhile.
                out += pauses
                break
            if job.passed >= self.policy.patience:
                break
            overtaken.append(job)
        return out

    def _make_room(self, job: Job) -> list[Instruction] | None:
        """Pause residents until the job would fit. None: the policy would not, or it would not help."""
        residents = [self._jobs[name] for name in self.table.places]
        may_go = [other for other in residents if self.policy.evicts(job.standing, other.standing)]
        if not may_go:
            return None
        trial = self.table.copy()
        going = [other for other in residents if other.leaving]
        for other in going:
            trial.release(other.name)
        chosen: list[Job] = []
        # Those who would run last go first.
        candidates = sorted((o for o in may_go if not o.leaving), key=lambda o: self.policy.turn(o.standing))
        while trial.copy().admit(job.name, job.need.persistent, job.need.ephemeral) is None:
            if not candidates:
                return None
            chosen.append(candidates.pop())
            trial.release(chosen[-1].name)
        return [instruction for other in chosen for instruction in self._pause(other)]

    def _pause(self, job: Job) -> list[Instruction]:
        if job.leaving:
            return []
        job.leaving = True
        if job.status == "ready":
            self._turns[self.table.places[job.name].lane].ready.pop(job.name)
            job.status = "idle"
        return [Pause(job.name)]

    def _in_order(self) -> list[Job]:
        return sorted(self._waiting.values(), key=lambda job: (self.policy.entry(job.standing), job.standing.arrival))

    def _never(self, name: str, need: Need) -> str | None:
        """Why the job can never be admitted, None if it can. Raises SalusError if the numbers are none."""
        total = amount(need.persistent, f"persistent memory of {name!r}")
        total += amount(need.ephemeral, f"ephemeral memory of {name!r}")
        if total <= self.table.capacity:
            return None
        return (
            f"{name!r} needs {need.persistent} + {need.ephemeral} bytes, the device has {self.table.capacity}; "
            "give it a smaller batch or model, or a larger device"
        )

    # Turns

    def _join(self, job: Job) -> None:
        """The job is new in its lane: level with the others of it."""
        turns = self._turns.setdefault(self.table.places[job.name].lane, _Turns())
        job.standing = replace(job.standing, service=turns.clock, last_turn=self._turn)

    def _stand(self, job: Job) -> list[Instruction]:
        lane = self.table.places[job.name].lane
        self._turns[lane].ready[job.name] = job.standing
        job.status = "ready"
        return self._next(lane)

    def _next(self, lane: int) -> list[Instruction]:
        turns = self._turns[lane]
        chosen = None if turns.running is not None else next_turn(self.policy, turns.ready)
        if chosen is None:
            return []
        turns.clock = max(turns.clock, turns.ready.pop(chosen).service)
        turns.running = chosen
        self._jobs[chosen].status = "running"
        return [Run(chosen, lane)]

    def _off_lane(self, job: Job, lane: int) -> list[Instruction]:
        """Take the job out of a lane's turns; it is out of the table already."""
        turns = self._turns[lane]
        turns.ready.pop(job.name, None)
        if turns.running == job.name:
            turns.running = None
        if lane in self.table.lanes:
            return self._next(lane)
        del self._turns[lane]
        return []

    def _off_device(self, job: Job) -> list[Instruction]:
        lane = self.table.places[job.name].lane
        self.table.release(job.name)
        job.status, job.leaving = "waiting", False
        return self._off_lane(job, lane)

    def _set(self, job: Job, standing: Standing) -> None:
        job.standing = standing
        if job.status == "ready":
            self._turns[self.table.places[job.name].lane].ready[job.name] = standing

    # Books

    def _forget(self, job: Job) -> None:
        del self._jobs[job.name]
        self._waiting.pop(job.name, None)

    def _known(self, name: str) -> Job:
        job = self._jobs.get(name)
        if job is None:
            raise SalusError(f"{name!r} is not known here; add it first")
        return job


def _check_remaining(name: str, remaining: float | None) -> None:
    if remaining is not None and not (math.isfinite(remaining) and remaining >= 0):
        raise SalusError(f"remaining of {name!r} is {remaining!r}, expected seconds >= 0, or None if nobody knows")
