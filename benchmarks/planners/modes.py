"""Run times and areas (device-seconds) over the allowed widths as arrays, and the fractional lower bound."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from fluidtune.planning.loads import TrialLoad, Width, check_limits, check_unique

Floats = NDArray[np.float64]
#: The relaxed bound is computed to this part of itself. A tenth of what `best` calls close.
_PRECISION = 1e-4
#: Entries of the largest table of pairs of modes that is made at once. 8 MB of floats each.
_TABLE = 1_000_000


class Modes:
    """Every trial with work left at every width that it may have, as arrays of shape (trials, modes).

    A *mode* is the index of an allowed width, narrowest first: 1/c, ..., 1/2, 1, 2, ..., min(d, n). Trials of height 0
    are left out. ``times``: seconds to the trial's end. ``areas``: device-seconds to its end. ``gains``: seconds of its
    height that are done in one second (height / time): 1 on one device, alpha**-(p-1) on a share 1/p, w * beta**-(w-1)
    on w devices.
    """

    def __init__(self, loads: Iterable[TrialLoad], n: int, *, c: int, d: int) -> None:
        self.n, self.c, self.d = check_limits(n, c, d)
        left = [load for load in check_unique(loads) if load.height > 0]
        self.ids = [load.trial_id for load in left]
        self.heights: Floats = np.array([load.height for load in left], dtype=float)
        alphas, betas = (np.array([getattr(load, name) for load in left]) for name in ("alpha", "beta"))
        packed, wide = np.arange(self.c, 1, -1), np.arange(1, min(self.d, self.n) + 1)
        self.widths: list[Width] = [Fraction(1, int(p)) for p in packed] + [int(w) for w in wide]
        self.sizes: Floats = np.concatenate([1.0 / packed, wide])
        # An overhead beyond what a float holds gives a gain of 0 and an infinite time, and the mode is never chosen.
        with np.errstate(over="ignore", under="ignore", divide="ignore"):
            self.gains: Floats = np.concatenate(
                [1.0 / alphas[:, None] ** (packed - 1), wide / betas[:, None] ** (wide - 1)], axis=1
            )
            self.times: Floats = self.heights[:, None] / self.gains
            self.areas: Floats = self.times * self.sizes


def simple_bound(modes: Modes) -> float:
    """`fluidtune.planning.lower_bound`, in seconds, over a table of modes."""
    if not modes.ids:
        return 0.0
    return max(float(modes.times.min(axis=1).max()), float(modes.areas.min(axis=1).sum()) / modes.n)


def relaxed_bound(modes: Modes) -> float:
    """A lower bound, in seconds, that is at least `simple_bound`: the fractional relaxation.

    It is the smallest T at which every trial can be done within T, mixing widths over time, with device-seconds that
    add up to at most n * T. So it also bounds schedules in which a trial changes its width. It is not exact, since a
    share is charged for itself alone even where the rest of its device is idle.
    """
    low = simple_bound(modes)
    if not modes.ids or _least_areas(modes, low).sum() <= modes.n * low:
        return low
    # Every trial at its fastest, one after another, is a schedule; the answer lies between.
    high = float(modes.times.min(axis=1).sum())
    while high - low > _PRECISION * low:
        middle = (low * high) ** 0.5 if high > 2 * low else (low + high) / 2
        if _least_areas(modes, middle).sum() <= modes.n * middle:
            high = middle
        else:
            low = middle
    return low


def _least_areas(modes: Modes, limit: float) -> Floats:
    """The fewest device-seconds with which each trial can be done in ``limit`` seconds, mixing two widths."""
    cheapest = modes.areas.argmin(axis=1)
    rows = np.arange(len(cheapest))
    areas: Floats = modes.areas[rows, cheapest].copy()
    hurried = np.flatnonzero(modes.times[rows, cheapest] > limit)
    at_once = max(1, _TABLE // len(modes.sizes) ** 2)  # number of trials
    for first in range(0, len(hurried), at_once):
        some = hurried[first : first + at_once]
        times, costs = modes.times[some], modes.areas[some]
        fast = times <= limit
        # Part of the work is done at a slow width and the rest at a fast one, so that the times just meet the limit.
        # Where the "slow" width is fast itself, only the fast one is used.
        between = np.where(fast | ~np.isfinite(times), np.inf, times)[:, None, :]
        slow_costs = np.where(np.isfinite(between), costs[:, None, :], 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):  # of widths that are not fast; these are left out below
            part = (limit - times[:, :, None]) / (between - times[:, :, None])
            mixed = part * slow_costs + (1 - part) * costs[:, :, None]
        areas[some] = np.where(fast[:, :, None], mixed, np.inf).min(axis=(1, 2))
    return areas
