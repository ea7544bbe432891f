"""A plan of a TrialGroup, and the static one: StaticFluid's widths, and list scheduling, largest first.

Given each trial's width, `place` decides which devices the trial gets and when it starts. What does not fit is queued.
Whenever devices become free, the largest trial that fits starts, so that a wide trial that waits does not keep devices
idle that a narrow one could use.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush
from typing import Literal

from fluidtune.planning.fluid import static_fluid
from fluidtune.planning.loads import TrialLoad, Width, as_width, check_limits, check_unique, runtime


@dataclass(frozen=True, slots=True)
class Segment:
    """One trial at one width on the same devices, from ``start`` to ``end`` (seconds from the plan's start).

    ``width`` < 1: that share of the single device in ``devices``; otherwise every device listed, whole.
    """

    trial_id: str
    devices: tuple[int, ...]
    width: Width
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """The segments of all trials, by start. Segments of one trial never overlap; a trial of height 0 has none."""

    segments: tuple[Segment, ...]

    @property
    def makespan(self) -> float:
        """Seconds until the last segment ends; 0 without segments."""
        return max((segment.end for segment in self.segments), default=0.0)


def plan(loads: Iterable[TrialLoad], n: int, *, c: int, d: int, policy: Literal["static"] = "static") -> Schedule:
    """A schedule of ``loads`` on ``n`` devices with packing limit ``c`` and scaling limit ``d`` (alg. 3.1).

    Each trial has one segment, at its StaticFluid width; a trial of height 0 has none. Times are seconds from the
    plan's start. The same input gives the same plan. Raises ValueError for a limit below 1, a trial given twice, or
    another policy.
    """
    if policy != "static":
        raise ValueError(f"policy is {policy!r}, expected 'static'")
    n, c, d = check_limits(n, c, d)
    listed = check_unique(loads)
    return place(listed, static_fluid(listed, n, c=c, d=d), n)


def place(loads: Iterable[TrialLoad], widths: Mapping[str, Width], n: int) -> Schedule:
    """A schedule that runs every trial once, at its width, on ``n`` devices: larger heights first, ties as given.

    A share goes to the fullest device that still has room for it (the shares of one device never exceed 1),
    a width w >= 1 takes w whole devices. ``widths[trial_id]`` must exist and be at most n, else ValueError.
    Takes O(trials * n) for a handful of distinct widths.
    """
    n, _, _ = check_limits(n)
    queues: dict[Fraction | int, deque[tuple[int, TrialLoad]]] = {}
    for rank, load in enumerate(sorted(check_unique(loads), key=lambda load: -load.height)):
        if load.trial_id not in widths:
            raise ValueError(f"trial {load.trial_id!r} has no width; give one to every trial")
        width = as_width(widths[load.trial_id])
        if load.height > 0:
            queues.setdefault(width, deque()).append((rank, load))
    if queues and max(queues) > n:
        raise ValueError(f"a trial has width {max(queues)}, but there are {n} devices; narrow it")
    whole = math.lcm(*(Fraction(width).denominator for width in queues))
    rooms = _Rooms(n, whole)
    running: list[tuple[float, int, tuple[int, ...], int]] = []
    segments: list[Segment] = []
    now = 0.0
    while queues or running:
        # A width that does not fit now is not tried again until devices become free.
        stuck: set[Fraction | int] = set()
        while waiting := queues.keys() - stuck:
            width = min(waiting, key=lambda width: queues[width][0][0])
            units = min(whole, int(width * whole))
            taken = rooms.take_units(max(1, int(width)), units)
            if taken is None:
                stuck.add(width)
                continue
            rank, load = queues[width].popleft()
            if not queues[width]:
                del queues[width]
            end = now + runtime(load, width)
            segments.append(Segment(load.trial_id, taken, width, now, end))
            heappush(running, (end, rank, taken, units))
        now = running[0][0]
        while running and running[0][0] == now:
            _, _, taken, units = heappop(running)
            rooms.give_back(taken, units)
    return Schedule(tuple(segments))


class _Rooms:
    """How much of each device is free, in units of which a whole device has ``whole``."""

    def __init__(self, n: int, whole: int) -> None:
        self._free = [whole] * n
        #: (free units, device) of each device, ascending.
        self._ordered = [(whole, device) for device in range(n)]

    def take_units(self, count: int, units: int) -> tuple[int, ...] | None:
        """Takes ``units`` of each of ``count`` devices, the fullest that have them; None if fewer devices have them."""
        first = bisect_left(self._ordered, (units, 0))
        taken = tuple(device for _, device in self._ordered[first : first + count])
        if len(taken) < count:
            return None
        self.give_back(taken, -units)
        return taken

    def give_back(self, devices: tuple[int, ...], units: int) -> None:
        """Gives ``units`` back to each device that `take_units` took them from."""
        for device in devices:
            del self._ordered[bisect_left(self._ordered, (self._free[device], device))]
            self._free[device] += units
            insort(self._ordered, (self._free[device], device))
