"""What packing and growing gained, estimated from one run's own iterations, against every trial at width 1.

This module decides the formula and nothing else; what it gives is an estimate and is called so wherever it is
shown. A measured comparison is two runs side by side (benchmarks/). Pure.

The formula. Trial k did iteration i in s(k, i) seconds at width w(k, i). Had it run at width 1, an iteration
would have taken s1(k) seconds:

    s1(k) = median of its own iterations at width 1, where it has some; else
            (median of its iterations at w) / r(w), w its most frequent width that has an r(w), where
            r(w) = median over the trials that ran at both widths of (median at w / median at 1); else
            for w < 1 its median times w (as if packing were only taking turns), for w > 1 its median (as if
            more devices did not help): the case in which nothing is gained.

    device-seconds saved at w   = sum over the iterations at w of  s1(k) - w * s(k, i)
    seconds saved               = (makespan of everything at width 1) - (seconds that the run took)

Growing buys time with device-seconds, so that the first is mostly negative for w > 1, and packing the other
way round. The makespan at width 1 is list scheduling, in the order in which the trials were added, of the
trials' s1(k) * iterations on as many devices as the run had on average: what stock Tune does, with nothing
charged for starting trials. A trial of a synchronous group that comes back after it was paused waits for all
that had ended before it was added: a rung waits for the rung below.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from fluidtune.report.events import EventDict


@dataclass(frozen=True)
class EstimatedGain:
    """An estimate; the module's docstring has the formula. Negative is a loss."""

    #: Device-seconds that packed iterations (width < 1) took less than they would have at width 1.
    packing_device_seconds: float
    #: The same of grown iterations (width > 1); below 0 where more devices cost more than they sped up.
    growing_device_seconds: float
    #: Makespan of everything at width 1, s.
    seconds_at_width_one: float
    #: That, less what the run took, s.
    seconds_saved: float
    #: Iterations of trials for which the run has nothing to compare with, taken as gaining nothing.
    iterations_without_comparison: int


def width_of(value: float) -> float:
    """A width as a key: thirds and the like, however they were rounded, are the same width."""
    return round(float(value), 4)


@dataclass
class _Part:
    """A trial from one `trial_added` to the next."""

    trial: str
    #: How many parts had ended before this one was added, if it must wait for them; else 0.
    waits_for: int
    #: How many parts ended before this one did; None while it goes on.
    rank: int | None = None
    iterations: int = 0


@dataclass
class _Work:
    """What the events say of the trials' work."""

    parts: list[_Part] = field(default_factory=list)
    #: trial -> width -> seconds of each iteration.
    times: dict[str, dict[float, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))


def _work(events: Iterable[EventDict]) -> _Work:
    work = _Work()
    last: dict[str, _Part] = {}
    synchronous: dict[str, bool] = {}
    ended = 0

    def add(trial: str, waits_for: int = 0) -> _Part:
        last[trial] = part = _Part(trial, waits_for)
        work.parts.append(part)
        return part

    for event in events:
        name = event["event"]
        if name == "trial_result":
            seconds, width = event["seconds"], event["width"]
            if seconds is None or width is None or seconds < 0 or width < 0:
                continue
            trial = event["trial"]
            if width:  # at 0 others went first for a part of it that nobody knows
                work.times[trial][width_of(width)].append(float(seconds))
            (last.get(trial) or add(trial)).iterations += 1
        elif name == "group_announced":
            synchronous[event["group"]] = bool(event["synchronous"])
        elif name == "trial_added":
            returns = event["trial"] in last
            waits = returns and synchronous.get(event["group"], False)
            add(event["trial"], ended if waits else 0)
        elif name == "trial_ended":
            part = last.get(event["trial"]) or add(event["trial"])
            if part.rank is None:
                part.rank = ended
                ended += 1
    return work


def _ratios(times: Mapping[str, Mapping[float, list[float]]]) -> dict[float, float]:
    """r(w): how many times longer an iteration takes at w than at 1, in trials that ran at both."""
    seen: dict[float, list[float]] = defaultdict(list)
    for widths in times.values():
        one = median(widths[1.0]) if 1.0 in widths else 0.0
        if one > 0:
            for width, seconds in widths.items():
                seen[width].append(median(seconds) / one)
    return {width: ratio for width, ratios in seen.items() if (ratio := median(ratios)) > 0}


def _at_width_one(widths: Mapping[float, list[float]], ratios: Mapping[float, float]) -> tuple[float, bool]:
    """s1 of a trial, and whether the run has something to compare with."""
    if 1.0 in widths:
        return median(widths[1.0]), True
    by_use = sorted(widths, key=lambda width: -len(widths[width]))
    for width in by_use:
        if width in ratios:
            return median(widths[width]) / ratios[width], True
    width = by_use[0]
    return median(widths[width]) * min(width, 1.0), False


def _makespan(parts: Sequence[_Part], one: Mapping[str, float], devices: int) -> float:
    """Seconds that list scheduling of the parts at width 1 takes on ``devices`` devices.

    A device that is free takes the first part, in the order in which they were added, that need not wait.
    A part depends only on parts that were added before it, so that all of them come to their end.
    """
    follower: dict[int, int] = {}  # part -> the same trial's next part
    latest: dict[str, int] = {}
    for index, part in enumerate(parts):
        if part.trial in latest:
            follower[latest[part.trial]] = index
        latest[part.trial] = index
    follows = set(follower.values())
    at_barrier = [(part.waits_for, index) for index, part in enumerate(parts) if part.waits_for]
    heapq.heapify(at_barrier)
    ready = [index for index, part in enumerate(parts) if not part.waits_for and index not in follows]
    open_conditions = [(index in follows) + (part.waits_for > 0) for index, part in enumerate(parts)]
    running: list[tuple[float, int]] = []
    over: set[int] = set()  # ranks of the parts that are done
    passed = 0  # all ranks below this one are done
    now = 0.0

    def met(index: int) -> None:
        open_conditions[index] -= 1
        if not open_conditions[index]:
            heapq.heappush(ready, index)

    while True:
        while ready and len(running) < devices:
            index = heapq.heappop(ready)
            part = parts[index]
            heapq.heappush(running, (now + one.get(part.trial, 0.0) * part.iterations, index))
        if not running:
            return now
        now, index = heapq.heappop(running)
        if index in follower:
            met(follower[index])
        rank = parts[index].rank
        if rank is not None:
            over.add(rank)
            while passed in over:
                passed += 1
            while at_barrier and at_barrier[0][0] <= passed:
                met(heapq.heappop(at_barrier)[1])


def estimated_gain(events: Iterable[EventDict], wall_seconds: float, devices: float) -> EstimatedGain | None:
    """The estimate for a run that took ``wall_seconds`` on ``devices`` devices on average.

    None where no iteration was reported: there is nothing to estimate from.
    """
    work = _work(events)
    if not work.times:
        return None
    ratios = _ratios(work.times)
    one: dict[str, float] = {}
    without = 0
    saved = {"packing": 0.0, "growing": 0.0}
    for trial, widths in work.times.items():
        one[trial], comparable = _at_width_one(widths, ratios)
        for width, seconds in widths.items():
            if width != 1.0:
                side = "packing" if width < 1 else "growing"
                saved[side] += one[trial] * len(seconds) - width * sum(seconds)
            if not comparable:
                without += len(seconds)
    makespan = _makespan(work.parts, one, max(1, round(devices)))
    return EstimatedGain(saved["packing"], saved["growing"], makespan, makespan - wall_seconds, without)
