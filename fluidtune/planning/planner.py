"""The plan of one TrialGroup, by one of two policies.

"static" is the paper's: StaticFluid's widths, list-scheduled (`placement`). "best" builds several schedules, this one,
one of full devices up to a target time (`wrap`) and mixtures of configurations (`mix`), and returns the shortest, so
that it is never longer than "static". It stops as soon as one is within a thousandth of a lower bound. This model does
not know what a resize costs; a plan with many segments is for trials that are cheap to resize.
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

#: A schedule that is at most this many times the lower bound is not improved. Judgement: estimates of heights are
#: worse.
_CLOSE = 1.001
#: The linear programme of mixtures is solved for at most this many trials. Judgement: beyond, it needs too many pivots
#: (`benchmarks.planner` shows the time).
_FEW = 64
#: After this many pivots the simplex is stopped. Judgement: it is close long before.
_PIVOTS = 2000
#: Trials times modes times steps that one run of `hedge` may take. Judgement: about 0.1 s.
_EFFORT = 500_000
#: Steps of one run of `hedge` where these are affordable. Judgement: 400 steps gain another 0.2 % and have twice the
#: segments per trial.
_FINE = 120
#: With fewer steps than this `hedge` is not run. Judgement: `wrap` does better when there are that many
#: trials.
_ROUGH = 24
#: Eagerness of the runs of `hedge`: of the first two, and of the two whose prior is what the first found. Judgement: no
#: eagerness is best for every group.
_FIRST_EAGERNESS, _LATER_EAGERNESS = (10.0, 100.0), (10.0, 30.0)


def plan(loads: Iterable[TrialLoad], n: int, *, c: int, d: int, policy: Policy = "best") -> Schedule:
    """A schedule of ``loads`` on ``n`` devices with packing limit ``c`` and scaling limit ``d``.

    ``policy``: "best" (a trial may have several segments, of different widths, one after the other) or "static" (alg.
    3.1; one segment per trial), whose makespan is never shorter. Times are seconds from the plan's start; a trial of
    height 0 has no segment. The same input gives the same plan.
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
    """Schedules to choose from; those that are cheap and have few segments come first. Each is built when asked for."""
    yield wrap(modes, bound)
    pricer = Pricer(modes)
    if len(modes.ids) <= _FEW:
        yield realise(modes, simplex(modes, pricer, pivots=_PIVOTS, close=_CLOSE - 1))
    passes = min(_FINE, _EFFORT // (len(modes.ids) * len(modes.sizes)))
    if passes < _ROUGH:
        return
    step = bound / passes
    even = np.ones(len(modes.ids))
    found = [hedge(modes, pricer, step, eagerness, even) for eagerness in _FIRST_EAGERNESS]
    # The weights that gave the largest bound in the first run are a good prior for others.
    telling = found[0][1]
    prior = np.maximum(telling / telling.max(), 1e-6)
    found += [hedge(modes, pricer, step, eagerness, prior) for eagerness in _LATER_EAGERNESS]
    mixtures = [steps for steps, _ in found]
    yield realise(modes, min(mixtures, key=lambda steps: sum(step.seconds for step in steps)))
