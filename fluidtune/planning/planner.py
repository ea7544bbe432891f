"""The plan of one TrialGroup: which policy's schedule is used.

"static" is the paper's: StaticFluid's widths, list-scheduled. "best" builds several schedules (that one,
full devices up to a target time, mixtures of configurations) and returns the one that is done first, so it
is never later than "static". It stops building as soon as one is within a thousandth of a lower bound. What
a resize costs is not in this model: a plan with many segments is for trials that are cheap to resize.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, get_args

import numpy as np

from fluidtune.planning.bounds import Modes, relaxed_bound
from fluidtune.planning.fluid import static_fluid
from fluidtune.planning.loads import TrialLoad, check_limits, check_unique
from fluidtune.planning.mix import Pricer, hedge, simplex
from fluidtune.planning.placement import place
from fluidtune.planning.realise import realise
from fluidtune.planning.schedule import Schedule
from fluidtune.planning.wrap import wrap

Policy = Literal["static", "best"]

#: A schedule this close to the bound is not improved any further.
_CLOSE = 1.001
#: Up to so many trials the linear programme of mixtures is solved; beyond, it takes too many pivots.
_FEW = 64
#: Trials times modes times steps that one run of `hedge` may take: about 0.1 s.
_EFFORT = 500_000
#: Steps of one run of `hedge` where that is affordable; 400 gain another 0.2 % at twice the segments a trial.
_FINE = 120
#: With fewer steps than this `hedge` is too rough to beat `wrap`, which does well when trials are that many.
_ROUGH = 24


def plan(loads: Iterable[TrialLoad], n: int, *, c: int, d: int, policy: Policy = "best") -> Schedule:
    """A schedule of ``loads`` on ``n`` devices with packing limit ``c`` and scaling limit ``d``.

    ``policy``: "best" (a trial may have several segments, of different widths, one after the other) or "static" (alg.
    3.1; one segment a trial), whose makespan is never earlier. Times in seconds from the plan's start; a
    trial of height 0 has no segment. The same input gives the same plan.
    Raises ValueError for a limit below 1, a trial given twice, or another policy.
    """
    if policy not in get_args(Policy):
        raise ValueError(f"policy is {policy!r}, expected one of {', '.join(map(repr, get_args(Policy)))}")
    n, c, d = check_limits(n, c, d)
    listed = check_unique(loads)
    static = place(listed, static_fluid(listed, n, c=c, d=d), n)
    if policy == "static" or not static.segments:
        return static
    modes = Modes(listed, n, c=c, d=d)
    bound = relaxed_bound(modes)
    best = static
    for found in _candidates(modes, bound):
        if best.makespan <= bound * _CLOSE:
            break
        if found is not None and found.makespan < best.makespan:
            best = found
    return best


def _candidates(modes: Modes, bound: float) -> Iterator[Schedule | None]:
    """Schedules to choose from, the cheap ones with few segments first; each is built when asked for."""
    yield wrap(modes, bound)
    pricer = Pricer(modes)
    if len(modes.ids) <= _FEW:
        yield realise(modes, simplex(modes, pricer, pivots=2000, close=_CLOSE - 1))
    passes = min(_FINE, _EFFORT // (len(modes.ids) * len(modes.sizes)))
    if passes < _ROUGH:
        return
    step = bound / passes
    # No eagerness is best for every group; weights that told much in one run are a good prior for others.
    even = np.ones(len(modes.ids))
    first, telling = hedge(modes, pricer, step, 10.0, even)
    mixtures = [first, hedge(modes, pricer, step, 100.0, even)[0]]
    prior = np.maximum(telling / telling.max(), 1e-6)
    mixtures += [hedge(modes, pricer, step, eagerness, prior)[0] for eagerness in (10.0, 30.0)]
    yield realise(modes, min(mixtures, key=lambda steps: sum(step.seconds for step in steps)))
