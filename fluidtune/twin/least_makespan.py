"""The bound that a run is judged by: the least makespan that any schedule of the same work could have had.

The `RecordedJob` says which iterations each trial did in which TrialGroup, how long an iteration takes, and what
start-up costs. Tune's decisions are taken as they were in the run. Which trial has which devices when is open: the
bound holds for every engine, every order and every width, also for one that knew all of that before.

Why no schedule is below it. Look at one moment of any schedule. A trial that is alone on a device does 1/s(1)
iterations per second, one of p trials on a device does 1/s(p), and one on w devices does 1/s(w). Charge it 1 device,
1/p of a device, or w devices. Then no more devices are charged than are ready, since a device has one wide trial
or p trials of 1/p. So *cost*: a piece of work of k iterations that must be done within L seconds is charged at least
a(L) = k * f(L / k) device-seconds, where f is the lower convex hull of the points (seconds, device-seconds) of one
iteration at each width. It is convex, so that to mix widths over time is charged no less.

*Heads and tails*: a piece cannot begin before its head, the longest chain of decisions and iterations at their fastest
that comes before it, and at least its tail remains after its end. A trial goes through its stages in order. A stage
that follows a stage of a synchronous group begins when the last trial of that group is done. So in a schedule of T
seconds each piece has T - head - tail seconds, less the pauses between its iterations, and for each r and q

- all pieces with a tail of q or more are done by T - q: their a() add up to at most what is ready until T - q;
- all pieces with a head of r or more begin at r: their a() add up to at most what is ready from r to T.

`least_makespan` is the smallest T for which this is true. A synchronous group is itself such a problem, which says when
it can be done at the earliest (the head of what follows), and how much time what follows it needs (its tail).

*Start-up*: the k-th device that is of use is ready when the k-th process is, because a device without a process runs
nothing, and processes start as `Twin` starts them. A pause between two iterations of a trial is at least the
shortest of the job's pauses; it is charged no device-seconds. Resizes, memory and the searcher's limits are left out.
All of this can only make the bound smaller.

What is unknown of the speeds is what `Profile` says: beyond the widest measured width nothing gets faster, and beyond
the largest measured number of trials on a device they take turns. The bound is one for these speeds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fluidtune.twin.recorded_job import Costs, RecordedJob

Floats = NDArray[np.float64]
#: The bound is computed to this part of itself, from below. Schedules differ by far more.
PRECISION = 1e-4
#: A difference of two times that is this part of them is rounding.
ROUNDING = 1e-9


@dataclass(frozen=True)
class LeastMakespan:
    """``seconds``: the bound, from the begin of the job. ``path_seconds``: the longest chain at its fastest alone,
    start-up included. ``area_seconds``: all work at its cheapest on all devices, start-up included.
    """

    seconds: float
    path_seconds: float
    area_seconds: float


class _Speeds(NamedTuple):
    """Seconds and device-seconds of an iteration, from the fastest to the cheapest: seconds ascend, the others fall."""

    seconds: Floats
    areas: Floats


def _speeds(job: RecordedJob, devices: int, gang: int) -> _Speeds:
    """The speeds of trials that need ``gang`` devices together."""
    profile = job.profile
    if gang > 1:
        return _hull([(profile.fastest(gang), gang * profile.fastest(gang))])
    points = [(seconds := profile.iteration((1,), trials), seconds / trials) for trials in (1, *profile.packed)]
    if job.growable:
        widest = min(devices, job.max_workers or devices, profile.widest)
        points += [(seconds := profile.fastest(width), seconds * width) for width in range(2, widest + 1)]
    return _hull(points)


def _hull(points: list[tuple[float, float]]) -> _Speeds:
    """The part of the lower convex hull on which more seconds cost fewer device-seconds."""
    hull: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if hull and y >= hull[-1][1]:
            continue
        while len(hull) > 1:
            (x1, y1), (x2, y2) = hull[-2:]
            if (y2 - y1) * (x - x1) < (y - y1) * (x2 - x1):
                break  # the second one lies below the line from the first one to this one
            hull.pop()
        hull.append((x, y))
    found = np.array(hull)
    return _Speeds(found[:, 0], found[:, 1])


class _Pieces:
    """The stages of all trials, which are pieces of work: as arrays, and which of a trial follows which."""

    def __init__(self, job: RecordedJob, devices: int):
        pause = min(job.costs.turn, job.costs.cold + job.costs.first)
        stages = [(place, stage, trial.cost) for trial in job.trials for place, stage in enumerate(trial.stages)]
        self.groups = [stage.group for _, stage, _ in stages]
        #: Iterations times the trial's cost, the seconds between them, and the devices that they need together.
        self.work = np.array([stage.iterations * cost for _, stage, cost in stages], dtype=float)
        self.pauses = np.array([max(0, stage.iterations - (place == 0)) * pause for place, stage, _ in stages])
        self.gangs = np.array([max(1, int(stage.share)) for _, stage, _ in stages], dtype=int)
        self.speeds = {gang: _speeds(job, devices, gang) for gang in set(self.gangs.tolist())}
        #: Seconds of each piece at its fastest, and its device-seconds at its cheapest.
        self.least = self.work * np.array([self.speeds[gang].seconds[0] for gang in self.gangs]) + self.pauses
        self.cheapest = self.work * np.array([self.speeds[gang].areas[-1] for gang in self.gangs])
        #: The piece before each piece of the same trial, and the one after it.
        self.before = {number: number - 1 for number, (place, _, _) in enumerate(stages) if place}
        self.next = {one: two for two, one in self.before.items()}

    def areas(self, limits: Floats, of: NDArray[np.intp]) -> Floats:
        """The fewest device-seconds with which the pieces ``of`` can be done, each within its limit in seconds."""
        out = np.zeros(len(of))
        work, gangs = self.work[of], self.gangs[of]
        with np.errstate(divide="ignore", invalid="ignore"):
            each = (limits - self.pauses[of]) / work
        for gang, speeds in self.speeds.items():
            # A limit just below the fastest is rounding, since no T is tried that is below a piece's own least.
            these = (gangs == gang) & (work > 0)
            out[these] = work[these] * np.interp(each[these], speeds.seconds, speeds.areas)
        return out


class _Ready:
    """How many device-seconds there are until a time; ``at``: when each device is ready, ascending."""

    def __init__(self, at: Floats):
        self._at, self._sums = at, np.concatenate([[0.0], np.cumsum(at)])

    def until(self, times: Floats | float) -> Floats:
        count = np.searchsorted(self._at, times, side="right")
        return np.asarray(count * times - self._sums[count], dtype=np.float64)


def _ready(costs: Costs, devices: int, gang: int) -> Floats:
    """When the first, second, ... device can begin its first iteration at the earliest.

    ``gang``: the most devices that one process serves.
    """
    most, seconds = costs.starts(devices)
    rounds = np.arange(devices) // gang // most + 1
    return np.asarray(costs.begin + costs.first + seconds * rounds, dtype=np.float64)


def _smallest(pieces: _Pieces, of: NDArray[np.intp], heads: Floats, tails: Floats, ready: _Ready | None) -> float:
    """The smallest T with which the pieces ``of`` satisfy the conditions of the module's docstring; from below.

    ``heads`` and ``tails``: seconds, of these pieces. ``ready``: None: there are devices without end.
    """
    low = float((heads + pieces.least[of] + tails).max())
    if ready is None:
        return low
    by_tail, by_head = np.argsort(-tails, kind="stable"), np.argsort(-heads, kind="stable")
    before = ready.until(heads[by_head])

    def fits(limit: float) -> bool:
        areas = pieces.areas(limit - heads - tails, of)
        late = np.cumsum(areas[by_tail]) <= ready.until(limit - tails[by_tail]) * (1 + ROUNDING)
        early = np.cumsum(areas[by_head]) <= (ready.until(limit) - before) * (1 + ROUNDING)
        return bool(late.all() and early.all())

    return _bisect(fits, low)


def _bisect(fits: Callable[[float], bool], low: float) -> float:
    """A time up to which nothing ``fits``, at most PRECISION below the first that does; at least ``low``."""
    if fits(low):
        return low
    high = 2 * low or 1.0
    while not fits(high):
        low, high = high, 2 * high
    while high - low > PRECISION * low:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low


class _Chains:
    """Which piece waits for which, and so the head and the tail of each."""

    def __init__(self, job: RecordedJob, pieces: _Pieces):
        self._pieces, self._count = pieces, len(pieces.groups)
        members: dict[str, list[int]] = {}
        for number, group in enumerate(pieces.groups):
            members.setdefault(group, []).append(number)
        #: By synchronous group that something follows: its pieces, and the pieces that follow.
        self._barriers = {
            group: (np.array(found), np.array(after))
            for group, found in members.items()
            if job.synchronous.get(group, True) and (after := [pieces.next[one] for one in found if one in pieces.next])
        }
        self._order = self._sorted()

    def _sorted(self) -> list[int | str]:
        """Pieces (numbers) and barriers (names of groups), each after all that it waits for."""
        sorter: TopologicalSorter[int | str] = TopologicalSorter({number: () for number in range(self._count)})
        for group, (found, after) in self._barriers.items():
            sorter.add(group, *map(int, found))
            for number in after:
                sorter.add(int(number), group)
        for number, before in self._pieces.before.items():
            sorter.add(number, before)
        try:
            return list(sorter.static_order())
        except CycleError:
            # Groups that wait for each other are none that a tuning algorithm makes: only the trials' own order counts.
            self._barriers = {}
            return list(range(self._count))

    def heads(self, ready: _Ready | None, first: float) -> Floats:
        """When each piece can begin at the earliest. ``first``: when the first device is ready."""
        heads = np.full(self._count, first)
        done: dict[str, float] = {}
        for node in self._order:
            if isinstance(node, str):
                found, _ = self._barriers[node]
                done[node] = _smallest(self._pieces, found, heads[found], np.zeros(len(found)), ready)
            elif (before := self._pieces.before.get(node)) is not None:
                own = heads[before] + self._pieces.least[before]
                heads[node] = max(own, done.get(self._pieces.groups[before], 0.0))
        return heads

    def tails(self, ready: _Ready | None) -> Floats:
        """How many seconds remain after the end of each piece at least. ``ready``: all devices, from 0 on."""
        tails = np.zeros(self._count)
        needed: dict[str, float] = {}
        for node in reversed(self._order):
            if isinstance(node, str):
                _, after = self._barriers[node]
                needed[node] = _smallest(self._pieces, after, np.zeros(len(after)), tails[after], ready)
                continue
            following = self._pieces.next.get(node)
            own = 0.0 if following is None else tails[following] + self._pieces.least[following]
            tails[node] = max(own, needed.get(self._pieces.groups[node], 0.0))
        return tails


def least_makespan(job: RecordedJob, devices: int) -> LeastMakespan:
    """Seconds below which no schedule of ``job`` on ``devices`` devices can be. See the module for what is a schedule.

    The bound is 0 for a job without iterations.
    """
    pieces = _Pieces(job, devices)
    if not pieces.work.any():
        return LeastMakespan(0.0, 0.0, 0.0)
    at = _ready(job.costs, devices, max(pieces.speeds))
    first, ready, chains = float(at[0]), _Ready(at), _Chains(job, pieces)
    heads, tails = chains.heads(ready, first), chains.tails(_Ready(np.zeros(devices)))
    area = pieces.cheapest.sum()
    return LeastMakespan(
        seconds=_smallest(pieces, np.arange(len(heads)), heads, tails, ready),
        path_seconds=float((chains.heads(None, first) + pieces.least).max()),
        area_seconds=_bisect(lambda limit: bool(ready.until(limit) >= area * (1 - ROUNDING)), first),
    )
