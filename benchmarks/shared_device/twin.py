"""The twin: whole traces on one device in seconds of real time, decided by the code that real trials use.

`Device` is a device without processes: `Admission` decides who is admitted, as in the dissertation, and `Turns`, which
the gate of real trials calls too, whose iteration runs and for whom a lane is kept. `simulate` drives one on a virtual
clock.

One thing is a model and not measured: lanes that run at the same time share the device's compute. While the
``compute`` of the running iterations adds up to more than 1, every one of them is stretched by that sum.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.shared_device import messages as m
from benchmarks.shared_device.admission import Admission
from salus_share.errors import SalusError
from salus_share.lanes import Amount, Need
from salus_share.policies import Policy, Standing
from salus_share.turns import AWAY, IDLE, INSIDE, LINGERING, READY, Counts, Turns, charge

#: Bytes per second at which a paused job's persistent memory leaves the device, and comes back. Judgement: a checkpoint
#: on a local disk.
MOVE_RATE = 1e9


@dataclass(slots=True)
class TwinSeat:
    """A resident job as the twin records it; the fields are as in `seat_table.Seat`.

    ``state``: AWAY if it was told to leave and has not left yet. ``leaving``: told so within an iteration.
    """

    lane: int
    token: int
    standing: Standing
    last_s: float = 0.0
    state: int = IDLE
    leaving: bool = False
    linger_until: float = 0.0


class TwinSeats:
    """The residents of a device, in dicts: the `turns.Seats` of the twin, as real trials have the seat table."""

    def __init__(self) -> None:
        self.by_job: dict[str, TwinSeat] = {}
        self._by_lane: dict[int, dict[str, TwinSeat]] = {}
        self.turns = 0

    def put(self, job: str, seat: TwinSeat) -> None:
        """Record a job that was admitted."""
        self.by_job[job] = self._by_lane.setdefault(seat.lane, {})[job] = seat

    def remove(self, job: str) -> TwinSeat:
        """Forget a job that left. Returns its seat."""
        seat = self.by_job.pop(job)
        lane = self._by_lane[seat.lane]
        del lane[job]
        if not lane:
            del self._by_lane[seat.lane]
        return seat

    def move(self, job: str, lane: int) -> None:
        """Put a job into another lane."""
        seat = self.remove(job)
        seat.lane = lane
        self.put(job, seat)

    def seat(self, job: str) -> TwinSeat:
        """One resident. Raises SalusError if the job is none."""
        if job not in self.by_job:
            raise SalusError(f"{job!r} is not on this device")
        return self.by_job[job]

    def in_lane(self, lane: int) -> dict[str, TwinSeat]:
        return {job: seat for job, seat in self._by_lane.get(lane, {}).items() if seat.state != AWAY}

    def others(self, job: str, lane: int) -> tuple[bool, float | None]:
        members = self.in_lane(lane)
        members.pop(job, None)
        began = (s.standing.service - (0.0 if s.state == INSIDE else s.last_s) for s in members.values())
        return any(seat.state != IDLE for seat in members.values()), max(began, default=None)

    def busy(self, job: str, lane: int) -> bool:
        return any(seat.state != IDLE for other, seat in self.in_lane(lane).items() if other != job)

    def counts(self, job: str) -> Counts:
        seat = self.by_job[job]
        standing = seat.standing
        remaining = math.nan if standing.remaining is None else standing.remaining
        return standing.last_turn, standing.service, remaining, seat.last_s

    def set_counts(self, job: str, counts: Counts) -> None:
        self._write(job, *counts)

    def _write(self, job: str, last_turn: int, service: float, remaining: float, last_s: float) -> None:
        seat = self.by_job[job]
        known = None if math.isnan(remaining) else remaining
        seat.standing = Standing(seat.standing.arrival, service, last_turn, known, seat.standing.rung)
        seat.last_s = last_s

    def record_iteration(self, job: str, service: float, remaining: float, seconds: float) -> None:
        self.turns += 1
        self._write(job, self.turns, service, remaining, seconds)

    def set_state(self, job: str, state: int) -> None:
        self.by_job[job].state = state

    def set_lingering(self, job: str, until: float) -> None:
        seat = self.by_job[job]
        seat.state, seat.linger_until = LINGERING, until


class Device:
    """A device without processes and clock: its admission, its turns, and what ties them together.

    What gates do over shared memory, this does over a dict. Every ``now`` is in seconds.
    """

    def __init__(self, capacity: Amount, policy: Policy) -> None:
        self.admission = Admission(capacity, policy)
        self.seats = TwinSeats()
        self.turns = Turns(policy, self.seats)

    def handle(self, event: m.Event, now: float) -> tuple[list[m.Instruction], list[str]]:
        """Let admission decide, and record it. Returns the instructions, and the jobs to wake, as in `Turns`.

        Raises SalusError for an event that cannot be true, and for a need that is told within an iteration.
        """
        seats = self.seats
        if isinstance(event, m.NeedFound) and event.job in seats.by_job and seats.seat(event.job).state == INSIDE:
            raise SalusError(f"{event.job!r} is within an iteration; tell what it needs at the boundary")
        woken: list[str | None] = []
        if isinstance(event, m.JobLeft) and event.job in seats.by_job:
            woken.append(self.turns.grant(seats.remove(event.job).lane, now))
        instructions = self.admission.handle(event)
        for instruction in instructions:
            match instruction:
                case m.Admit(job, lane, token):
                    # A real trial takes its seat when it is admitted, and is numbered then.
                    seats.put(job, TwinSeat(lane, token, replace(self.admission.jobs[job].standing, arrival=token)))
                    self._join(job, lane)
                case m.Move(job, lane):
                    seats.move(job, lane)
                    self._join(job, lane)
                case m.Pause(job):
                    woken += self._tell_to_leave(job, now)
        if isinstance(event, m.Progress) and event.job in seats.by_job:
            seat = seats.seat(event.job)
            seat.standing = replace(seat.standing, remaining=event.remaining, rung=event.rung)
        return instructions, [job for job in woken if job is not None]

    def _tell_to_leave(self, job: str, now: float) -> list[str | None]:
        """A job may pass no more: from now on, or from the end of its iteration. Returns whom to wake."""
        seat = self.seats.seat(job)
        if seat.state == INSIDE:
            seat.leaving = True
            return []
        waits = seat.state == READY
        return [job if waits else None, self.turns.leave(job, now)]

    def arrive(self, job: str, token: int, now: float) -> str | None:
        """A job is at its gate. Returns who was given the lane.

        Raises SalusError if the job was told to leave, is not on the device, or is at its gate already.
        """
        seat = self.seats.seat(job)
        if token != seat.token or seat.leaving or seat.state == AWAY:
            raise SalusError(
                f"token {token} of {job!r} is old: it was told to leave, and must ask to be admitted again"
            )
        if seat.state in (READY, INSIDE):
            raise SalusError(f"{job!r} is at its gate already; one iteration at a time")
        granted = self.turns.arrive(job, seat.lane, now)
        return granted

    def end_iteration(self, job: str, seconds: float, now: float) -> str | None:
        """The iteration of a job is over after ``seconds``. Returns whom to wake, as in `Turns`.

        Raises SalusError if the job is not within one, or if ``seconds`` is not a finite number >= 0.
        """
        seat = self.seats.seat(job)
        if seat.state != INSIDE:
            raise SalusError(f"{job!r} ended an iteration, but is not within one")
        if not (math.isfinite(seconds) and seconds >= 0):
            raise SalusError(f"an iteration of {job!r} took {seconds!r}, expected seconds >= 0")
        if not seat.leaving:
            return self.turns.end_iteration(job, seat.lane, seconds, now)
        _, service, remaining, _ = self.seats.counts(job)
        self.seats.record_iteration(job, *charge(service, remaining, seconds), seconds)
        return self.turns.leave(job, now)

    def served(self) -> m.Served:
        """What residents were served by now: admission is told it before it decides."""
        return m.Served({job: seat.standing for job, seat in self.seats.by_job.items()})

    def _join(self, job: str, lane: int) -> None:
        seat = self.seats.seat(job)
        last_turn, service = self.turns.level(job, lane)
        seat.standing, seat.last_s = replace(seat.standing, last_turn=last_turn, service=service), 0.0


@dataclass(frozen=True)
class TwinJob:
    """A job of a trace.

    It arrives at ``arrival`` s and runs ``iterations``, each of ``seconds`` when it is alone on the device. Between
    two iterations it is away from the gate for ``gap`` s: it fetches its next batch.
    """

    name: str
    arrival: float
    need: Need
    iterations: int
    seconds: float
    gap: float = 0.0

    @property
    def alone(self) -> float:
        """Seconds of iterations that it runs in all, if it is alone on the device."""
        return self.iterations * self.seconds


@dataclass
class Record:
    """What became of a job; times are seconds on the virtual clock."""

    arrival: float
    started: float = math.nan
    ended: float = math.nan
    pauses: int = 0
    #: (end of an iteration, seconds it took), in order; empty unless `simulate` was asked to keep them.
    iterations: list[tuple[float, float]] = field(default_factory=list)

    @property
    def queueing(self) -> float:
        """Seconds from its arrival to its first iteration."""
        return self.started - self.arrival

    @property
    def completion(self) -> float:
        """JCT: seconds from its arrival to its end."""
        return self.ended - self.arrival


@dataclass
class _Running:
    """A job's iteration under way. ``left``: the seconds of it that remain if the job ran alone from now on."""

    left: float
    compute: float
    began: float


@dataclass(frozen=True)
class _AtGate:
    """A job has fetched its batch, or has loaded its model, and comes to the gate. Void if its token is old."""

    job: str
    token: int


@dataclass(frozen=True)
class _LingerOver:
    """The lane is not kept any more, unless the job that lingered has come back."""

    lane: int


class _Simulation:
    """One run of the twin: a `Device`, the virtual clock, and what happens later."""

    def __init__(self, jobs: Sequence[TwinJob], capacity: float, policy: Policy, keep: bool) -> None:
        self._jobs = {job.name: job for job in jobs}
        if len(self._jobs) != len(jobs):
            raise SalusError("two jobs of the trace have the same name")
        self._device = Device(capacity, policy)
        self._seats = self._device.seats.by_job
        self._keep = keep
        self.records = {job.name: Record(job.arrival) for job in jobs}
        self._left = {job.name: job.iterations for job in jobs}
        self._running: dict[str, _Running] = {}
        self._now = 0.0
        self._order = itertools.count()
        #: A heap of (time, order, what happens then).
        self._later: list[tuple[float, int, m.Event | _AtGate | _LingerOver]] = []
        for job in jobs:
            self._at(job.arrival, m.JobAdded(job.name, job.need, remaining=job.alone))

    def run(self) -> None:
        while self._later or self._running:
            stretch = max(1.0, math.fsum(running.compute for running in self._running.values()))
            first = min(self._running, key=lambda name: self._running[name].left, default=None)
            ends = math.inf if first is None else self._now + self._running[first].left * stretch
            if self._later and self._later[0][0] <= ends:
                moment, _, what = heapq.heappop(self._later)
                self._pass_time(moment, stretch)
                self._happens(what)
            else:
                assert first is not None
                self._pass_time(ends, stretch)
                self._iteration_over(first)

    def _pass_time(self, moment: float, stretch: float) -> None:
        for running in self._running.values():
            running.left = max(0.0, running.left - (moment - self._now) / stretch)
        self._now = moment

    def _happens(self, what: m.Event | _AtGate | _LingerOver) -> None:
        match what:
            case _AtGate(job, token):
                seat = self._seats.get(job)
                if seat is None or seat.token != token:
                    return
                if seat.state == AWAY:
                    # It learns at its gate that it must leave, as a real trial does.
                    self._leave(job)
                else:
                    self._arrive(job, token)
            case _LingerOver(lane):
                granted = self._device.turns.grant(lane, self._now)
                if granted is not None:
                    self._look_at_gate(granted)
            case _:
                self._tell(what)

    def _iteration_over(self, name: str) -> None:
        running = self._running.pop(name)
        seconds = self._now - running.began
        self._left[name] -= 1
        if self._keep:
            self.records[name].iterations.append((self._now, seconds))
        woken = self._device.end_iteration(name, seconds, self._now)
        seat, gap = self._seats[name], self._jobs[name].gap
        if self._left[name] > 0 and seat.state != AWAY and gap == 0:
            # It is back in the same moment, before a job that was woken looks.
            self._arrive(name, seat.token)
        if woken is not None:
            self._look_at_gate(woken)
        if self._left[name] == 0:
            self.records[name].ended = self._now
            self._tell(m.JobLeft(name))
        elif seat.state == AWAY or gap > 0:
            self._at(self._now + gap, _AtGate(name, seat.token))

    def _arrive(self, name: str, token: int) -> None:
        granted = self._device.arrive(name, token, self._now)
        self._look_at_gate(name if granted is None else granted)

    def _tell(self, event: m.Event) -> None:
        for each in (self._device.served(), event):
            instructions, woken = self._device.handle(each, self._now)
            for instruction in instructions:
                self._carry_out(instruction)
            for job in woken:
                self._look_at_gate(job)

    def _carry_out(self, instruction: m.Instruction) -> None:
        match instruction:
            case m.Admit(job, _, token):
                resumed = self.records[job].pauses > 0
                load = float(self._jobs[job].need.persistent) / MOVE_RATE if resumed else 0.0
                self._at(self._now + load, _AtGate(job, token))
            case m.Refuse(_, reason):
                raise SalusError(reason)

    def _look_at_gate(self, name: str) -> None:
        """A job that is at its gate looks: it may be INSIDE by now, told to leave, or wait for one that lingers."""
        seat = self._seats[name]
        if seat.state == INSIDE and name not in self._running:
            record, spec = self.records[name], self._jobs[name]
            if math.isnan(record.started):
                record.started = self._now
            compute = 1.0 if spec.need.compute is None else spec.need.compute
            self._running[name] = _Running(spec.seconds, compute, self._now)
        elif seat.state == READY:
            kept = self._device.turns.kept_until(seat.lane, self._now)
            if kept is not None:
                self._at(kept, _LingerOver(seat.lane))
        elif seat.state == AWAY:
            self._leave(name)

    def _leave(self, name: str) -> None:
        """A job that was told to leave moves its memory off the device, and comes again as a new one."""
        self.records[name].pauses += 1
        need, left = self._jobs[name].need, self._seats[name].standing.remaining
        gone = self._now + float(need.persistent) / MOVE_RATE
        self._at(gone, m.JobLeft(name))
        self._at(gone, m.JobAdded(name, need, remaining=left))

    def _at(self, moment: float, what: m.Event | _AtGate | _LingerOver) -> None:
        heapq.heappush(self._later, (moment, next(self._order), what))


def simulate(
    jobs: Sequence[TwinJob], capacity: float, policy: Policy, *, keep_iterations: bool = False
) -> dict[str, Record]:
    """Run a trace on one device of ``capacity`` bytes under a policy. Returns what became of every job.

    Raises SalusError if a job can never fit.
    """
    simulation = _Simulation(jobs, capacity, policy, keep_iterations)
    simulation.run()
    return simulation.records
