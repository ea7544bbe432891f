"""The memory of one device, divided into what every job keeps, and lanes for what lives within an iteration.

Decides whether a job fits and in which lane (dissertation, section 2.3.3, algorithm 2.1). At every moment

    sum_i P_i + sum_lanes max_{j in lane} E_j <= C        (2.1)

It does not decide which job is asked first (`admission` does), nor whose iteration runs (`turns` does).
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


def amount(value: Amount, what: str) -> Bytes:
    """``value`` as an exact number. Raises SalusError unless it is finite and >= 0."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < math.inf:
        raise SalusError(f"{what} is {value!r}, expected bytes, a finite number >= 0")
    exact = Fraction(value) if isinstance(value, Rational) else Fraction(float(value))
    return int(exact) if exact.denominator == 1 else exact


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

    @property
    def free(self) -> Bytes:
        """What 2.1 leaves, bytes."""
        return self.capacity - self.reserved

    # Changes

    def admit(self, job: str, persistent: Amount, ephemeral: Amount) -> int | None:
        """Find a lane for a job (algorithm 2.1). Returns the lane's id, or None: it has to wait.

        Step 2 checks the new P as well, which the algorithm as printed does not.
        Raises SalusError if the job is admitted already, or a number is not finite and >= 0.
        """
        if job in self._places:
            raise SalusError(f"{job!r} is in lane {self._places[job].lane} already; release it first, or `change` it")
        p, e = amount(persistent, f"persistent memory of {job!r}"), amount(ephemeral, f"ephemeral memory of {job!r}")
        lane = self._find(p, e)
        if lane is not None:
            self._put(job, Place(lane, p, e))
        return lane

    def change(self, job: str, persistent: Amount, ephemeral: Amount) -> int | None:
        """Change the memory of an admitted job between two iterations.

        Returns its lane: the one it has if that can be made large enough, else the one that algorithm 2.1 finds
        (nothing is copied: E is empty at a boundary). None: it does not fit, and nothing was changed.
        """
        old = self._place(job)
        p, e = amount(persistent, f"persistent memory of {job!r}"), amount(ephemeral, f"ephemeral memory of {job!r}")
        self._take(job)
        lane = old.lane if self.has_room(Place(old.lane, p, e)) else self._find(p, e)
        self._put(job, old if lane is None else Place(lane, p, e))
        return lane

    def release(self, job: str) -> None:
        """Take a job off the device. Its lane shrinks to the largest E left, or is reclaimed (section 2.3.3.1)."""
        self._place(job)
        self._take(job)

    def put(self, job: str, place: Place) -> None:
        """Put a job where it was, in a new table. Raises SalusError if 2.1 would not hold."""
        if job in self._places:
            raise SalusError(f"{job!r} is in lane {self._places[job].lane} already")
        if not self.has_room(place):
            raise SalusError(f"{job!r} does not fit into lane {place.lane}: {place}, {self.free} bytes are free")
        self._put(job, place)

    def has_room(self, place: Place) -> bool:
        """Whether 2.1 would hold with one more job there."""
        size = self._sizes.get(place.lane, 0)
        return self.reserved + place.persistent + max(place.ephemeral, size) - size <= self.capacity

    def copy(self) -> LaneTable:
        """Another table in the same state, to try something out."""
        other = LaneTable(self.capacity, self.max_lanes)
        for job, place in self._places.items():
            other._put(job, place)
        other._next_lane = self._next_lane
        return other

    # Algorithm 2.1

    def _find(self, p: Bytes, e: Bytes) -> int | None:
        free = self.free - p
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
