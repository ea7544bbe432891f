"""The memory of one device, divided into what every job keeps, and lanes for what lives within an iteration.

Decides whether a job fits and in which lane (dissertation, section 2.3.3, algorithm 2.1). At every moment

    sum_i P_i + sum_lanes max_{j in lane} E_j <= C        (2.1)

A job is promised `MARGIN` more than it was measured to need; `outgrown` and `oversized` say when that is not right any
more. Nothing here decides whose iteration runs (`turns` does).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational, Real
from types import MappingProxyType

from salus_share.errors import SalusError

#: An amount of memory, bytes, >= 0. Whole in practice; sums of anything else are exact too.
Bytes = int | Fraction
#: What is accepted as an amount of memory.
Amount = int | float | Fraction
#: The part by which a promise exceeds what was measured: memory is fragmented, and iterations differ a little.
MARGIN = 0.1
#: A promise is made smaller when it is more than this many times the need, so that it does not go up and down.
TOO_MUCH = 1.5


def amount(value: Amount, what: str) -> Bytes:
    """``value`` as an exact number. Raises SalusError unless it is finite and >= 0."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < math.inf:
        raise SalusError(f"{what} is {value!r}, expected bytes, a finite number >= 0")
    exact = Fraction(value) if isinstance(value, Rational) else Fraction(float(value))
    return int(exact) if exact.denominator == 1 else exact


@dataclass(frozen=True)
class Need:
    """What a job needs of a device.

    ``persistent``: P, bytes of its model and of what the framework keeps. ``ephemeral``: E, the peak in bytes of what
    lives within one iteration. ``compute``: the part of the device that its iterations keep busy when it runs alone,
    0 to 1; None if it was not measured.
    """

    persistent: Amount
    ephemeral: Amount
    compute: float | None = None

    def at_least(self, other: Need | Place) -> Need:
        """The larger of both needs, amount by amount, with the ``compute`` of this one."""
        persistent, ephemeral = max(self.persistent, other.persistent), max(self.ephemeral, other.ephemeral)
        return Need(persistent, ephemeral, self.compute)


def outgrown(promised: Need | Place, need: Need) -> bool:
    """Whether a job with this need, which is `MARGIN` more than was measured, is to be promised more.

    That is when half of the margin is used up, which is before an allocation fails.
    """
    tight = (1 + MARGIN / 2) / (1 + MARGIN)
    return need.persistent * tight > promised.persistent or need.ephemeral * tight > promised.ephemeral


def oversized(promised: Need | Place, need: Need) -> bool:
    """Whether the promise is more than `TOO_MUCH` times the need."""
    return promised.persistent + promised.ephemeral > TOO_MUCH * (need.persistent + need.ephemeral)


@dataclass(frozen=True)
class Lane:
    """``size``: bytes, the largest E of its ``jobs`` (in the order in which they came)."""

    size: Bytes
    jobs: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Where an admitted job is: its lane and what it was promised, bytes."""

    lane: int
    persistent: Bytes
    ephemeral: Bytes


class LaneTable:
    """The lanes of a device of ``capacity`` bytes.

    ``max_lanes``: 1 for a policy that runs one iteration at a time, None for all that fit.
    Lanes are numbered from 0. A number is never used again.
    """

    def __init__(self, capacity: Amount, max_lanes: int | None = None) -> None:
        self.capacity = amount(capacity, "capacity")
        if max_lanes is not None and max_lanes < 1:
            raise SalusError(f"max_lanes is {max_lanes!r}, expected 1 or more, or None for all that fit")
        self.max_lanes = max_lanes
        self._places: dict[str, Place] = {}
        #: By lane: the E of each of its jobs. A lane without jobs has no entry.
        self._lanes: dict[int, dict[str, Bytes]] = {}
        #: By lane: the largest of these.
        self._sizes: dict[int, Bytes] = {}
        self._next_lane = 0
        #: The two sums of 2.1.
        self._persistent: Bytes = 0
        self._ephemeral: Bytes = 0

    # Views

    @property
    def lanes(self) -> dict[int, Lane]:
        """Every lane, oldest first."""
        return {lane: Lane(self._sizes[lane], tuple(jobs)) for lane, jobs in self._lanes.items()}

    @property
    def places(self) -> Mapping[str, Place]:
        return MappingProxyType(self._places)

    @property
    def reserved(self) -> Bytes:
        """The left side of 2.1, bytes."""
        return self._persistent + self._ephemeral

    # Changes

    def admit(self, job: str, persistent: Amount, ephemeral: Amount) -> int | None:
        """Find a lane for a job (algorithm 2.1). Returns the lane's id, or None: it has to wait.

        Step 2 checks the new P as well, which the algorithm as printed does not.
        Raises SalusError if the job is admitted already, or a number is not finite and >= 0.
        """
        if job in self._places:
            raise SalusError(f"{job!r} is in lane {self._places[job].lane} already; release it first, or `change` it")
        p, e = _amounts(job, persistent, ephemeral)
        lane = self._find(p, e)
        if lane is not None:
            self._put(job, Place(lane, p, e))
        return lane

    def find(self, persistent: Amount, ephemeral: Amount) -> int | None:
        """The lane that `admit` would give to a new job; None: it would have to wait."""
        return self._find(*_amounts("a job", persistent, ephemeral))

    def change(self, job: str, persistent: Amount, ephemeral: Amount) -> int | None:
        """Change the memory of an admitted job between two iterations.

        Returns its lane: the one it has if that can be made large enough, else the one that algorithm 2.1 finds
        (nothing is copied: E is empty at a boundary). None: it does not fit, and nothing was changed.
        """
        old = self._place(job)
        p, e = _amounts(job, persistent, ephemeral)
        self._take(job)
        size = self._sizes.get(old.lane, 0)
        lane = old.lane if self.reserved + p + max(e, size) - size <= self.capacity else self._find(p, e)
        self._put(job, old if lane is None else Place(lane, p, e))
        return lane

    def release(self, job: str) -> None:
        """Take a job off the device. Its lane shrinks to the largest E left, or is reclaimed (section 2.3.3.1)."""
        self._place(job)
        self._take(job)

    # Algorithm 2.1

    def _find(self, p: Bytes, e: Bytes) -> int | None:
        free = self.capacity - self.reserved - p
        if free < 0:
            return None
        if e <= free and (self.max_lanes is None or len(self._lanes) < self.max_lanes):
            return self._next_lane
        best = min((lane for lane, size in self._sizes.items() if size >= e), key=self._sizes.__getitem__, default=None)
        if best is not None:
            return best
        for lane, size in sorted(self._sizes.items(), key=lambda item: item[1]):
            if e - size <= free:
                return lane
        return None

    def _put(self, job: str, place: Place) -> None:
        lane = self._lanes.setdefault(place.lane, {})
        self._next_lane = max(self._next_lane, place.lane + 1)
        lane[job] = place.ephemeral
        self._places[job] = place
        self._persistent += place.persistent
        self._set_size(place.lane, max(self._sizes.get(place.lane, 0), place.ephemeral))

    def _take(self, job: str) -> None:
        place = self._places.pop(job)
        lane = self._lanes[place.lane]
        del lane[job]
        self._persistent -= place.persistent
        if lane:
            self._set_size(place.lane, max(lane.values()))
        else:
            self._set_size(place.lane, 0)
            del self._lanes[place.lane], self._sizes[place.lane]

    def _set_size(self, lane: int, size: Bytes) -> None:
        self._ephemeral += size - self._sizes.get(lane, 0)
        self._sizes[lane] = size

    def _place(self, job: str) -> Place:
        place = self._places.get(job)
        if place is None:
            raise SalusError(f"{job!r} is not on this device; admitted are {sorted(self._places)}")
        return place


def _amounts(job: str, persistent: Amount, ephemeral: Amount) -> tuple[Bytes, Bytes]:
    return amount(persistent, f"persistent memory of {job!r}"), amount(ephemeral, f"ephemeral memory of {job!r}")
