"""The paper's two width rules: StaticFluid for a group that arrives, DynamicFluid when something is freed.

Only widths are decided here. `placement` decides which devices a trial gets and when. Neither rule knows how many
devices are free. The widths may add up to more than n, because of the clamp at 1/c or of a scale-up whose matching
scale-down does not pay; the caller then queues what does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from fluidtune.planning.loads import TrialLoad, Width, as_width, check_limits, check_unique, runtime


def static_fluid(loads: Iterable[TrialLoad], n: int, *, c: int, d: int) -> dict[str, Width]:
    """StaticFluid (alg. 3.1): ``w_i = min(max(floor(h_i / sum(h) * n), 1/c), d)``.

    ``n`` devices, packing limit ``c``, scaling limit ``d``, heights in seconds. Returns the width of every trial, an
    int or Fraction(1, c), largest height first, which is the order in which they are to be placed; equal heights keep
    their order. When nothing is left to run, every trial gets 1/c. Raises ValueError for a limit below 1 or a trial
    given twice.
    """
    listed = sorted(check_unique(loads), key=lambda load: -load.height)
    widths = static_widths([load.height for load in listed], n, c=c, d=d)
    return {load.trial_id: width for load, width in zip(listed, widths, strict=True)}


def static_widths(heights: Sequence[float], n: int, *, c: int, d: int) -> list[Width]:
    """The widths of `static_fluid` for trials of these heights, in their order.

    The heights must be finite and >= 0, which is not checked. The engine calls this for many trials, often.
    """
    n, c, d = check_limits(n, c, d)
    narrowest: Width = Fraction(1, c) if c > 1 else 1
    if narrowest == d:
        return [narrowest] * len(heights)
    # Heights are divided by the largest one, so that neither the sum nor the product can overflow.
    top = max(heights, default=0.0) or 1.0
    parts = [height / top for height in heights]
    total = math.fsum(parts)
    if not total:
        return [narrowest] * len(heights)
    # A fair share that is a whole number but for rounding (7 equal trials on 7 devices) counts as whole.
    wholes = [math.floor(part * n / total * (1 + 1e-12)) for part in parts]
    return [min(whole, d) if whole >= 1 else narrowest for whole in wholes]


def dynamic_fluid(
    loads: Iterable[TrialLoad], widths: Mapping[str, Width], n: int, *, c: int, d: int, epsilon: float
) -> dict[str, Width]:
    """DynamicFluid (alg. 3.2): which running trials should change their width when no trial is queued.

    ``loads``: what the trials still have to do; ``widths``: the present width of each; ``epsilon``: seconds that one
    resize costs. With w' the StaticFluid width, a trial is scaled up if ``w' > w and h(w') + eps < h(w)``, down if ``w'
    < w and w' * (h(w') + eps) < w * h(w)``, and otherwise keeps w. Returns the width of every trial of ``loads``,
    largest height first. The rules look at one trial at a time. So the widths can add up to more than n, and a caller
    must let trials grow only as far as devices are free. Raises ValueError for a trial without a width, or a bad limit
    or epsilon.
    """
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise ValueError(f"epsilon is {epsilon!r}, expected the seconds of one resize, finite and >= 0")
    listed = check_unique(loads)
    by_id = {load.trial_id: load for load in listed}
    decided: dict[str, Width] = {}
    for trial_id, wanted in static_fluid(listed, n, c=c, d=d).items():
        if trial_id not in widths:
            raise ValueError(
                f"trial {trial_id!r} has no width; dynamic_fluid is for running trials, start it first or leave it out"
            )
        load, held = by_id[trial_id], as_width(widths[trial_id])
        pays = resize_pays(runtime(load, held), runtime(load, wanted), held, wanted, epsilon)
        decided[trial_id] = wanted if pays else held
    return decided


def resize_pays(before: float, after: float, held: Width, wanted: Width, epsilon: float) -> bool:
    """DynamicFluid's rules for one trial: from the width ``held`` to ``wanted``. See `dynamic_fluid`.

    ``before`` and ``after``: the seconds that the trial has left at these widths.
    """
    if wanted >= held:
        return after + epsilon < before
    return float(wanted) * (after + epsilon) < float(held) * before
