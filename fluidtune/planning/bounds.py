"""How soon a TrialGroup could be done at best. No schedule is built here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

from fluidtune.planning.loads import TrialLoad, Width, check_limits, check_unique, runtime


def lower_bound(loads: Iterable[TrialLoad], n: int, *, c: int, d: int) -> float:
    """Seconds below which no schedule can be: ``max(max_i min_w h_i(w), sum_i min_w w * h_i(w) / n)``.

    w ranges over the allowed widths: 1/p for p = 1 to c and the whole numbers 1 to min(d, n). The two parts
    may want different widths of one trial, so the best schedule can be far above this: 4 equal trials on 4
    devices with c = d = 4 and no overheads cannot be done before h, and the bound is h / 4.
    The bound is 0 when nothing is left to run. Raises ValueError for a limit below 1 or a trial given twice.
    """
    n, c, d = check_limits(n, c, d)
    widths: list[Width] = [Fraction(1, p) for p in range(c, 1, -1)] + list(range(1, min(d, n) + 1))
    longest, areas = 0.0, []
    for load in check_unique(loads):
        times = [runtime(load, width) for width in widths]
        longest = max(longest, min(times))
        areas.append(min(time * float(width) for time, width in zip(times, widths, strict=True)))
    return max(longest, math.fsum(areas) / n)
