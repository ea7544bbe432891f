"""Who is admitted to a device of the dissertation's, into which lane, and who must leave to make room.

Pure: events in, instructions out. FluidTune's engine admits trials by other rules: it moves none to let another one in.
The caller decides which jobs come to a device. "2.1" is the condition in `salus_share.lanes` under which jobs fit.

    waiting --Admit--> resident --Pause--> leaving          JobLeft, from any status: the job is forgotten
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from numbers import Real

from benchmarks.shared_device import messages as m
from salus_share.errors import SalusError
from salus_share.lanes import Amount, LaneTable, Need, amount
from salus_share.policies import Policy, Standing

#: By policy, the rank by which jobs wait (the lowest goes first), and by which a newcomer may take a resident's memory.
#: Under the others jobs wait in order of arrival, and none makes room.
RANKS: dict[str, Callable[[Standing], float]] = {"SRTF": lambda job: job.left, "HPT": lambda job: -job.rung}
#: How many jobs may be admitted past one that does not fit yet. After that, all jobs behind it wait too, so that small
#: jobs fill the gaps, and a large one does not wait for ever.
PATIENCE = 8


@dataclass
class Job:
    """What is recorded of one job."""

    name: str
    #: The whole device while the job's need is not known.
    need: Need
    #: For a resident: as the last `Served` or `Progress` said.
    standing: Standing
    #: The token of its last admission; 0 before the first.
    token: int = 0
    #: A resident that was told to leave and has not left yet.
    leaving: bool = False
    #: How many jobs were admitted past it since it began to wait.
    passed: int = 0


class Admission:
    """Admits jobs to a device of ``capacity`` bytes by ``policy``."""

    def __init__(self, capacity: Amount, policy: Policy) -> None:
        self.policy = policy
        self._rank = RANKS.get(policy.name)
        self.table = LaneTable(capacity, policy.max_lanes)
        self._jobs: dict[str, Job] = {}
        self._waiting: dict[str, Job] = {}
        self._arrivals = 0
        self._tokens = 0
        self._handlers: dict[type[m.Event], Callable[..., list[m.Instruction]]] = {
            m.JobAdded: self._job_added,
            m.NeedFound: self._need_found,
            m.Progress: self._progress,
            m.Served: self._served,
            m.JobLeft: self._job_left,
        }

    def handle(self, event: m.Event) -> list[m.Instruction]:
        """Process one event. Returns what must be done, in this order.

        Raises SalusError for an event that cannot be true; nothing is changed then.
        """
        handler = self._handlers.get(type(event))
        if handler is None:
            raise SalusError(f"{event!r} is not an event of benchmarks.shared_device.messages")
        return handler(event)

    # Views

    @property
    def jobs(self) -> dict[str, Job]:
        """Every job that is resident or waits, in order of arrival. To be read only."""
        return dict(self._jobs)

    @property
    def waiting(self) -> tuple[str, ...]:
        """The jobs that wait for admission, the next one first."""
        return tuple(job.name for job in self._in_order())

    # Events

    def _job_added(self, event: m.JobAdded) -> list[m.Instruction]:
        if event.job in self._jobs:
            status = "waiting" if event.job in self._waiting else "resident"
            raise SalusError(f"{event.job!r} is here already ({status}); it must leave first")
        check_remaining(event.job, event.remaining)
        need = event.need if event.need is not None else Need(0, self.table.capacity)
        reason = self._why_never(event.job, need)
        if reason is not None:
            return [m.Refuse(event.job, reason)]
        self._arrivals += 1
        standing = Standing(self._arrivals, remaining=event.remaining, rung=event.rung)
        job = Job(event.job, need, standing)
        self._jobs[event.job] = self._waiting[event.job] = job
        return self._admit_waiting()

    def _need_found(self, event: m.NeedFound) -> list[m.Instruction]:
        job = self._known(event.job)
        reason = self._why_never(event.job, event.need)
        if job.name in self._waiting:
            if reason is not None:
                self._forget(job)
                return [m.Refuse(job.name, reason), *self._admit_waiting()]
            job.need = event.need
            return self._admit_waiting()
        job.need = event.need
        if reason is not None:
            # It has to leave, and will be refused when it asks again.
            return self._pause(job)
        before = self.table.places[job.name].lane
        lane = self.table.change(job.name, event.need.persistent, event.need.ephemeral)
        if lane is None:
            return self._pause(job)
        moved: list[m.Instruction] = [] if lane == before else [m.Move(job.name, lane)]
        return moved + self._admit_waiting()

    def _progress(self, event: m.Progress) -> list[m.Instruction]:
        job = self._known(event.job)
        check_remaining(event.job, event.remaining)
        job.standing = replace(job.standing, remaining=event.remaining, rung=event.rung)
        return self._admit_waiting()

    def _served(self, event: m.Served) -> list[m.Instruction]:
        for name in event.standings:
            if name not in self.table.places:
                raise SalusError(f"{name!r} was served, but is not on this device")
        for name, standing in event.standings.items():
            self._jobs[name].standing = standing
        return self._admit_waiting()

    def _job_left(self, event: m.JobLeft) -> list[m.Instruction]:
        job = self._known(event.job)
        if job.name not in self._waiting:
            self.table.release(job.name)
        self._forget(job)
        return self._admit_waiting()

    # Decisions

    def _admit_waiting(self) -> list[m.Instruction]:
        """Admit the jobs that memory and policy let in; pause residents for a job that may take their place."""
        out: list[m.Instruction] = []
        overtaken: list[Job] = []
        for job in self._in_order() if self._waiting else ():
            if self.policy.max_jobs is not None and len(self.table.places) >= self.policy.max_jobs:
                lane = None
            else:
                lane = self.table.admit(job.name, job.need.persistent, job.need.ephemeral)
            if lane is not None:
                del self._waiting[job.name]
                self._tokens += 1
                job.token, job.passed = self._tokens, 0
                out.append(m.Admit(job.name, lane, job.token))
                for other in overtaken:
                    other.passed += 1
                if any(other.passed >= PATIENCE for other in overtaken):
                    break
                continue
            pauses = self._make_room(job)
            if pauses is not None:
                # The memory that the residents free is for this job: no job behind it may get it first.
                out += pauses
                break
            if job.passed >= PATIENCE:
                break
            overtaken.append(job)
        return out

    def _make_room(self, job: Job) -> list[m.Instruction] | None:
        """Pause residents until the job would fit. None: the policy does not let it, or the job would still not fit."""
        rank = self._rank
        residents = [self._jobs[name] for name in self.table.places]
        may_go = [other for other in residents if rank and rank(job.standing) < rank(other.standing)]
        if not may_go:
            return None
        trial = deepcopy(self.table)
        going = [other for other in residents if other.leaving]
        for other in going:
            trial.release(other.name)
        chosen: list[Job] = []
        # The residents that would run last leave first.
        candidates = sorted((o for o in may_go if not o.leaving), key=lambda o: self.policy.turn(o.standing))
        while trial.find(job.need.persistent, job.need.ephemeral) is None:
            if not candidates:
                return None
            chosen.append(candidates.pop())
            trial.release(chosen[-1].name)
        return [instruction for other in chosen for instruction in self._pause(other)]

    def _pause(self, job: Job) -> list[m.Instruction]:
        if job.leaving:
            return []
        job.leaving = True
        return [m.Pause(job.name)]

    def _in_order(self) -> list[Job]:
        rank = self._rank or (lambda job: 0.0)
        return sorted(self._waiting.values(), key=lambda job: (rank(job.standing), job.standing.arrival))

    def _why_never(self, name: str, need: Need) -> str | None:
        """Why the job can never be admitted, None if it can. Raises SalusError if the need has an invalid amount."""
        total = amount(need.persistent, f"persistent memory of {name!r}")
        total += amount(need.ephemeral, f"ephemeral memory of {name!r}")
        if total <= self.table.capacity:
            return None
        return (
            f"{name!r} needs {need.persistent} + {need.ephemeral} bytes, the device has {self.table.capacity}; "
            "give it a smaller batch or model, or a larger device"
        )

    def _forget(self, job: Job) -> None:
        del self._jobs[job.name]
        self._waiting.pop(job.name, None)

    def _known(self, name: str) -> Job:
        job = self._jobs.get(name)
        if job is None:
            raise SalusError(f"{name!r} is not known here; add it first")
        return job


def check_remaining(name: str, remaining: float | None) -> None:
    """Raises SalusError unless it is a finite number of seconds >= 0, or None."""
    if remaining is None or (isinstance(remaining, Real) and 0 <= remaining <= sys.float_info.max):
        return
    raise SalusError(
        f"remaining of {name!r} is {reprlib.repr(remaining)}, expected seconds >= 0, or None if that is not known"
    )
