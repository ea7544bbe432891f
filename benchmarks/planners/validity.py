"""Whether a schedule is valid in the model: no device over-committed, all work done, no width beyond the limits."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from fractions import Fraction
from itertools import pairwise

from fluidtune.planning import Schedule, TrialLoad, runtime
from fluidtune.planning.loads import as_width, check_limits, check_unique


def check(schedule: Schedule, loads: Iterable[TrialLoad], n: int, *, c: int, d: int) -> None:
    """Raise ValueError, naming the first broken rule, unless ``schedule`` does all of ``loads`` on n devices.

    Rules: widths are 1/p for p = 1 to c or whole up to d; a width w >= 1 names w distinct devices; shares of a device
    add up to at most 1 at any time; a trial's segments do not overlap; and the sum of (end - start) / runtime(load,
    width) is 1 for each trial, to one part in a billion or, for a trial that is very short compared with the makespan,
    to the rounding of its starts and ends.
    """
    n, c, d = check_limits(n, c, d)

    def fastest(load: TrialLoad) -> float:
        return min(runtime(load, width) for width in range(1, d + 1))

    by_id = {load.trial_id: load for load in check_unique(loads)}
    done: dict[str, list[float]] = defaultdict(list)
    own: dict[str, list[tuple[float, float]]] = defaultdict(list)
    changes: list[tuple[float, int, int, Fraction | int]] = []
    for segment in schedule.segments:
        load, width = by_id.get(segment.trial_id), as_width(segment.width)
        if load is None:
            raise ValueError(f"{segment} is of a trial that is not among the loads")
        if not 0 <= segment.start <= segment.end < math.inf:
            raise ValueError(f"{segment} does not last from a start >= 0 to an end that is not before it")
        if width > d or width < Fraction(1, c) or (width < 1 and Fraction(width).numerator != 1):
            raise ValueError(f"{segment} is wider than d = {d}, narrower than 1/{c}, or not 1/p")
        distinct = set(segment.devices)
        if len(distinct) != len(segment.devices) or len(distinct) != max(1, int(width)):
            raise ValueError(f"{segment} does not name the distinct devices of its width")
        if not all(0 <= device < n for device in distinct):
            raise ValueError(f"{segment} is on a device that is not among 0 to {n - 1}")
        done[segment.trial_id].append((segment.end - segment.start) / runtime(load, width))
        own[segment.trial_id].append((segment.start, segment.end))
        share = min(width, 1)
        for device in distinct:
            changes.append((segment.start, 1, device, share))
            changes.append((segment.end, 0, device, -share))
    for trial_id, spans in own.items():
        spans.sort()
        for (_, end), (start, _) in pairwise(spans):
            if start < end:
                raise ValueError(f"trial {trial_id!r} runs twice at {start} s")
    used: dict[int, Fraction | int] = defaultdict(int)
    for time, _, device, share in sorted(changes):
        used[device] += share
        if used[device] > 1:
            raise ValueError(f"device {device} is over-committed at {time} s: {used[device]} of it")
    for load in by_id.values():
        if load.height == 0:
            continue
        work = math.fsum(done[load.trial_id])
        rounding = 2 * math.ulp(schedule.makespan) * len(done[load.trial_id]) / fastest(load)
        if abs(work - 1) > 1e-9 + rounding:
            raise ValueError(f"trial {load.trial_id!r} has done {work} of its work, expected 1")
