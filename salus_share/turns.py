"""Who runs the next iteration in a lane, and what an iteration is charged.

The gate of real trials and the twin both call `Turns`. They differ in where trials are recorded (`Seats`: shared
memory, or a dict) and in the clock that they read: every call is handed ``now``, in seconds. This module reads no
clock, wakes no process and admits no trial.

A trial of a lane is in one of four states, or AWAY:

    IDLE       between two iterations; it is not at the gate
    READY      at the gate; it waits for its turn
    INSIDE     it runs an iteration; at most one trial of a lane does
    LINGERING  between two iterations; the lane is kept for it until ``linger_until``

    IDLE or LINGERING --arrive--> READY --grant--> INSIDE --end_iteration--> IDLE or LINGERING
    any of them --leave--> AWAY: it is in no lane
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from salus_share.policies import Policy, Standing

#: The states of a trial. They are part of the layout of the seat table, in which a seat that nobody has is AWAY.
AWAY, IDLE, READY, INSIDE, LINGERING = range(5)

#: A lane is kept for a trial between two of its iterations for this part of its last iteration, and for at most this
#: many seconds. Fetching a batch that was prepared in time takes less, and the others lose at most a tenth.
LINGER_PART, LINGER_S = 0.1, 0.005
#: Seconds of service that a trial may be behind its lane when it comes back to the gate. Without a bound, a trial that
#: was away for an hour would hold the lane for an hour.
CREDIT_S = 1.0
Key = TypeVar("Key")


#: What iterations change of a trial: (the device's turn in which it ran last; its service, which is the seconds that it
#: ran, counted from its lane's clock when it came; seconds left, NaN if unknown; seconds of its last iteration).
#: A plain tuple, because every pass makes some.
Counts = tuple[int, float, float, float]


class Member(Protocol):
    """A trial of a lane, as `Turns` reads it.

    ``state``: one of the states above. ``last_s``: seconds of its last iteration; 0 before the first in this lane.
    ``linger_until``: the moment, on the clock of ``now``, until which the lane is kept for it while it is LINGERING.
    ``standing``: what a policy sees of it.
    """

    @property
    def lane(self) -> int: ...
    @property
    def state(self) -> int: ...
    @property
    def last_s(self) -> float: ...
    @property
    def linger_until(self) -> float: ...
    @property
    def standing(self) -> Standing: ...


class Seats(Protocol[Key]):
    """Where the trials of one device are recorded. Every call is made under the caller's lock, if it needs one."""

    def seat(self, key: Key, /) -> Member:
        """One trial."""

    def in_lane(self, lane: int, /) -> Mapping[Key, Member]:
        """The trials of a lane. One that is AWAY is in none."""

    def others(self, key: Key, lane: int, /) -> tuple[bool, float | None]:
        """Of the trials of a lane, but for ``key``: whether one is not IDLE, and its clock.

        The clock is the largest service that one of them had when its last iteration began; None if there are none.
        Every pass asks it, so it makes no list, as `in_lane` does.
        """

    def busy(self, key: Key, lane: int, /) -> bool:
        """The first of the two values of `others`, which is quicker alone: every pass asks it, too."""

    def counts(self, key: Key, /) -> Counts:
        """What iterations changed of a trial so far."""

    def set_counts(self, key: Key, counts: Counts, /) -> None:
        """Record it."""

    def record_iteration(self, key: Key, service: float, remaining: float, seconds: float, /) -> None:
        """Count one more iteration of the device, and record it as the last turn of this trial with its `Counts`."""

    def set_state(self, key: Key, state: int, /) -> None:
        """Change a trial's state, and nothing else."""

    def set_lingering(self, key: Key, until: float, /) -> None:
        """Make a trial LINGERING until a moment."""

    @property
    def turns(self) -> int:
        """How many iterations have ended on the device."""


class Turns(Generic[Key]):
    """The turn machine of one device.

    Methods that may give the lane to another trial return whom the caller must wake: either that trial is INSIDE
    now, or the lane is kept for one that lingers and the woken trial must call `grant` at `kept_until`.
    """

    def __init__(self, policy: Policy, seats: Seats[Key]) -> None:
        self._policy = policy
        self._seats = seats

    def arrive(self, key: Key, lane: int, now: float) -> Key | None:
        """A trial is at the gate of its lane. Returns who was given the lane; None: somebody has it, or it is kept."""
        seats = self._seats
        busy, clock = seats.others(key, lane)
        if clock is None:
            seats.set_state(key, INSIDE)
            return key
        last_turn, service, remaining, last_s = seats.counts(key)
        with_credit = credited(service, clock)
        if with_credit != service:
            seats.set_counts(key, (last_turn, with_credit, remaining, last_s))
        if busy:
            seats.set_state(key, READY)
            return self.grant(lane, now)
        seats.set_state(key, INSIDE)
        return key

    def end_iteration(self, key: Key, lane: int, seconds: float, now: float) -> Key | None:
        """The iteration of a trial that was INSIDE is over after ``seconds``. Returns whom to wake."""
        seats = self._seats
        _, service, remaining, _ = seats.counts(key)
        service, remaining = charge(service, remaining, seconds)
        seats.record_iteration(key, service, remaining, seconds)
        seats.set_state(key, IDLE)
        if not seats.busy(key, lane):
            return None
        waiting = self._linger(key, lane, now)
        return self.grant(lane, now) if waiting is None else waiting

    def _linger(self, key: Key, lane: int, now: float) -> Key | None:
        """Keep the lane for ``key`` if it would be next. Returns who waits and must look again, None if not kept."""
        if not self._policy.lingers:
            return None
        members = self._seats.in_lane(lane)
        mine = members[key]
        ready = {other: member.standing for other, member in members.items() if member.state == READY}
        if not ready or next_turn(self._policy, {**ready, key: mine.standing}) != key:
            return None
        self._seats.set_lingering(key, now + min(LINGER_S, LINGER_PART * mine.last_s))
        return next(iter(ready))

    def grant(self, lane: int, now: float) -> Key | None:
        """Let in the best of those that are READY, if the lane is free and kept for no trial. Returns it."""
        members = self._seats.in_lane(lane)
        if any(member.state == INSIDE or _lingers(member, now) for member in members.values()):
            return None
        best = next_turn(self._policy, {key: one.standing for key, one in members.items() if one.state == READY})
        if best is not None:
            self._seats.set_state(best, INSIDE)
        return best

    def kept_until(self, lane: int, now: float) -> float | None:
        """The moment until which the lane is kept for a trial that lingers; None if it is kept for none."""
        members = self._seats.in_lane(lane).values()
        return min((member.linger_until for member in members if _lingers(member, now)), default=None)

    def stop_waiting(self, key: Key) -> None:
        """A trial goes away from the gate, before it got the lane."""
        if self._seats.seat(key).state == READY:
            self._seats.set_state(key, IDLE)

    def leave(self, key: Key, now: float) -> Key | None:
        """A trial is AWAY from now on, whatever it did. Returns who was given its lane."""
        lane = self._seats.seat(key).lane
        self._seats.set_state(key, AWAY)
        return self.grant(lane, now)

    def level(self, key: Key, lane: int) -> tuple[int, float]:
        """``last_turn`` and ``service`` of a trial that is new in a lane: it is level with the lane's others."""
        _, clock = self._seats.others(key, lane)
        return self._seats.turns, clock or 0.0


def next_turn(policy: Policy, ready: Mapping[Key, Standing]) -> Key | None:
    """Whose iteration runs next in a lane, of the trials that are ready; None if none is. Ties: who arrived first."""
    if not ready:
        return None
    return min(ready, key=lambda key: (policy.turn(ready[key]), ready[key].arrival))


def charge(service: float, remaining: float, seconds: float) -> tuple[float, float]:
    """``service`` and ``remaining`` of a trial after an iteration of ``seconds``."""
    # What is unknown (NaN) stays unknown; `max` would make 0 of it.
    return service + seconds, remaining if remaining != remaining else max(0.0, remaining - seconds)


def served(standing: Standing, seconds: float, turn: int) -> Standing:
    """The standing after an iteration of ``seconds``, the device's ``turn``-th."""
    before = math.nan if standing.remaining is None else standing.remaining
    service, remaining = charge(standing.service, before, seconds)
    return replace(standing, service=service, last_turn=turn, remaining=None if remaining != remaining else remaining)


def credited(service: float, clock: float) -> float:
    """The service of a trial that comes to the gate of a lane with this clock.

    For the time that it was away it is owed up to `CREDIT_S`, so that no trial waits until it caught up.
    """
    return max(service, clock - CREDIT_S)


def _lingers(member: Member, now: float) -> bool:
    return member.state == LINGERING and member.linger_until > now
