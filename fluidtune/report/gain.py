"""An estimate of what packing and growing gained over running every trial at width 1, from one run's iterations.

This module decides the formula and nothing else. The result is called an estimate wherever it is shown. A measured
comparison is two runs side by side (benchmarks/). Pure.

The formula. Trial k did iteration i in s(k, i) seconds at width w(k, i). At width 1 an iteration would have taken
s1(k) seconds:

    s1(k) = median of its own iterations at width 1, where it has some; else
            (median of its iterations at w) / r(w), w its most frequent width that has an r(w), where
            r(w) = median over the trials that ran at both widths of (median at w / median at 1); else
            for w < 1 its median times w (as if packing were only taking turns), for w > 1 its median (as if
            more devices did not help): the case in which nothing is gained.

    device-seconds saved at w   = sum over the iterations at w of  s1(k) - w * s(k, i)
    seconds saved               = (makespan of everything at width 1) - (seconds that the run took)

Growing trades device-seconds for time, so the device-seconds saved are usually negative for w > 1. Packing trades
time for device-seconds. The makespan at width 1 is that of list scheduling: the trials, in the order in which they
were added, on as many devices as the run had on average. A trial takes s1(k) * iterations, and besides what it held
devices for in this run outside iterations and resizes: its starts, and what lies between its iterations. The time in
which no trial held a device is as in this run, too. So the estimate compares widths and nothing else; whether warm or
forked processes paid is not in it. A trial of a synchronous group that returns after a pause waits for all trials
that had ended before it returned, because a rung waits for the rung below.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from fluidtune.report.durations import Durations, iterations_in
from fluidtune.report.events import EventDict
from fluidtune.report.occupancy import Interval


@dataclass(frozen=True)
class EstimatedGain:
    """An estimate; the module's docstring has the formula. A negative number is a loss."""

    #: Device-seconds that packed iterations (width < 1) saved, compared with width 1.
    packing_device_seconds: float
    #: Device-seconds that grown iterations (width > 1) saved, compared with width 1; usually negative.
    growing_device_seconds: float
    #: Estimated makespan (s) of all trials at width 1.
    seconds_at_width_one: float
    #: `seconds_at_width_one` less the seconds that the run took.
    seconds_saved: float
    #: Number of iterations without anything to compare them with; the estimate counts them as no gain.
    iterations_without_comparison: int


def width_of(value: float) -> float:
    """A width as a dictionary key: rounded to 4 digits, so that 1/3 is one width however it was computed."""
    return round(float(value), 4)


@dataclass
class _Part:
    """A trial's work from one `trial_added` to the next."""

    trial: str
    #: The part begins after this many parts have ended; 0 if it waits for none.
    waits_for: int
    #: Number of parts that ended before this one; None while this one runs.
    rank: int | None = None
    iterations: int = 0
    #: When the part began, unix seconds.
    since: float = 0.0
    #: Seconds that the trial held devices for neither iterations nor resizes; less than 0 while not all are counted.
    aside: float = 0.0


@dataclass
class _Work:
    """The trials' work as the events report it."""

    parts: list[_Part] = field(default_factory=list)
    #: trial -> width -> its iterations at that width.
    times: dict[str, dict[float, Durations]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(Durations))
    )


def _work(events: Iterable[EventDict], held: Iterable[Interval]) -> _Work:
    work = _Work()
    parts: dict[str, list[_Part]] = defaultdict(list)
    last: dict[str, _Part] = {}
    synchronous: dict[str, bool] = {}
    ended = 0

    def add(trial: str, since: float, waits_for: int = 0) -> _Part:
        last[trial] = part = _Part(trial, waits_for, since=since)
        work.parts.append(part)
        parts[trial].append(part)
        return part

    for event in events:
        name = event["event"]
        if name == "trial_result":
            seconds, width = event["seconds"], event["width"]
            if seconds is None or width is None or seconds < 0 or width < 0:
                continue
            trial = event["trial"]
            if width:  # 0: other trials went first for an unknown part of this iteration
                work.times[trial][width_of(width)].add(event)
            part = last.get(trial) or add(trial, 0.0)
            part.iterations += iterations_in(event)
            part.aside -= float(seconds) * iterations_in(event)
        elif name == "group_announced":
            synchronous[event["group"]] = bool(event["synchronous"])
        elif name == "trial_added":
            returns = event["trial"] in last
            waits = returns and synchronous.get(event["group"], False)
            add(event["trial"], event["t"], ended if waits else 0)
        elif name == "resized" and event["seconds"] and event["trial"] in last:
            last[event["trial"]].aside -= float(event["seconds"])
        elif name == "trial_ended":
            part = last.get(event["trial"]) or add(event["trial"], 0.0)
            if part.rank is None:
                part.rank = ended
                ended += 1
    for trial, start, end in {(interval.trial, interval.start, interval.end) for interval in held}:
        within = [part for part in parts[trial] if part.since <= start] or parts[trial]
        if within:
            within[-1].aside += end - start
    return work


def _ratios(times: Mapping[str, Mapping[float, Durations]]) -> dict[float, float]:
    """r(w): the time of an iteration at width w over that at width 1, from trials that ran at both."""
    seen: dict[float, list[float]] = defaultdict(list)
    for widths in times.values():
        one = widths[1.0].median() if 1.0 in widths else 0.0
        if one > 0:
            for width, found in widths.items():
                seen[width].append(found.median() / one)
    return {width: ratio for width, ratios in seen.items() if (ratio := median(ratios)) > 0}


def _at_width_one(widths: Mapping[float, Durations], ratios: Mapping[float, float]) -> tuple[float, bool]:
    """s1 of a trial, and whether it comes from a comparison; otherwise it is the case without any gain."""
    if 1.0 in widths:
        return widths[1.0].median(), True
    by_use = sorted(widths, key=lambda width: -widths[width].count)
    for width in by_use:
        if width in ratios:
            return widths[width].median() / ratios[width], True
    width = by_use[0]
    return widths[width].median() * min(width, 1.0), False


def _makespan(parts: Sequence[_Part], one: Mapping[str, float], devices: int) -> float:
    """The makespan (s) of list scheduling all parts at width 1 on ``devices`` devices.

    ``one``: trial -> seconds of one iteration at width 1. A free device takes the first part, in the order of
    `trial_added`, that need not wait. A part depends only on parts that were added before it, so every part ends.
    """
    successor: dict[int, int] = {}  # part -> the next part of the same trial
    latest: dict[str, int] = {}
    for index, part in enumerate(parts):
        if part.trial in latest:
            successor[latest[part.trial]] = index
        latest[part.trial] = index
    follows = set(successor.values())
    at_barrier = [(part.waits_for, index) for index, part in enumerate(parts) if part.waits_for]
    heapq.heapify(at_barrier)
    ready = [index for index, part in enumerate(parts) if not part.waits_for and index not in follows]
    open_conditions = [(index in follows) + (part.waits_for > 0) for index, part in enumerate(parts)]
    running: list[tuple[float, int]] = []
    done: set[int] = set()  # ranks of the parts that have ended
    passed = 0  # all parts with a lower rank have ended
    now = 0.0

    def condition_met(index: int) -> None:
        open_conditions[index] -= 1
        if not open_conditions[index]:
            heapq.heappush(ready, index)

    while True:
        while ready and len(running) < devices:
            index = heapq.heappop(ready)
            part = parts[index]
            takes = one.get(part.trial, 0.0) * part.iterations + max(0.0, part.aside)
            heapq.heappush(running, (now + takes, index))
        if not running:
            return now
        now, index = heapq.heappop(running)
        if index in successor:
            condition_met(successor[index])
        rank = parts[index].rank
        if rank is not None:
            done.add(rank)
            while passed in done:
                passed += 1
            while at_barrier and at_barrier[0][0] <= passed:
                condition_met(heapq.heappop(at_barrier)[1])


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The seconds that lie in one of the spans at least."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def estimated_gain(
    events: Iterable[EventDict], wall_seconds: float, devices: float, held: Sequence[Interval] = ()
) -> EstimatedGain | None:
    """The estimate for a run that took ``wall_seconds`` on ``devices`` devices on average.

    ``held``: what its trials held, see `Occupancy.intervals`; (): only the time of iterations is known. None if no
    iteration was reported.
    """
    work = _work(events, held)
    if not work.times:
        return None
    ratios = _ratios(work.times)
    one: dict[str, float] = {}
    without = 0
    saved = {"packing": 0.0, "growing": 0.0}
    for trial, widths in work.times.items():
        one[trial], comparable = _at_width_one(widths, ratios)
        for width, found in widths.items():
            if width != 1.0:
                side = "packing" if width < 1 else "growing"
                saved[side] += one[trial] * found.count - width * found.total
            if not comparable:
                without += found.count
    makespan = _makespan(work.parts, one, max(1, round(devices)))
    if held:
        makespan += max(0.0, wall_seconds - _covered((interval.start, interval.end) for interval in held))
    return EstimatedGain(saved["packing"], saved["growing"], makespan, makespan - wall_seconds, without)
