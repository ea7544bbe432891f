"""The shortest of several schedules of one TrialGroup.

They are the static one (`fluidtune.planning.plan`), one of full devices up to a target time (`wrap`) and mixtures of
configurations (`mix`). So the result is never longer than the static one. It stops as soon as one is within a
thousandth of a lower bound. This model does not know what a resize costs; a plan with many segments is for trials that
are cheap to resize.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from benchmarks.planners.mix import Pricer, hedge, simplex
from benchmarks.planners.modes import Modes, relaxed_bound
from benchmarks.planners.realise import realise
from benchmarks.planners.wrap import wrap
from fluidtune import planning
from fluidtune.planning import Schedule, TrialLoad
from fluidtune.planning.loads import check_unique

#: A schedule that is at most this many times the lower bound is not improved. Estimates of heights are
#: worse.
_CLOSE = 1.001
#: The linear programme of mixtures is solved for at most this many trials. Beyond, it needs too many pivots
#: (`benchmarks.planner` shows the time).
_FEW = 64
#: After this many pivots the simplex is stopped. It is close long before.
_PIVOTS = 2000
#: Trials times modes times steps that one run of `hedge` may take. About 0.1 s.
_EFFORT = 500_000
#: Steps of one run of `hedge` where these are affordable. 400 steps gain another 0.2 % and have twice the
#: segments per trial.
_FINE = 120
#: With fewer steps than this `hedge` is not run. Judgement: `wrap` does better when there are that many
#: trials.
_ROUGH = 24
#: Eagerness of the runs of `hedge`: of the first two, and of the two whose prior is what the first found. No
#: eagerness is best for every group.
_FIRST_EAGERNESS, _LATER_EAGERNESS = (10.0, 100.0), (10.0, 30.0)


def plan(loads: Iterable[TrialLoad], n: int, *, c: int, d: int) -> Schedule:
    """A schedule of ``loads`` on ``n`` devices with packing limit ``c`` and scaling limit ``d``.

    A trial may have several segments, of different widths, one after the other. Times are seconds from the plan's
    start; a trial of height 0 has no segment. The same input gives the same plan.
    Raises ValueError for a limit below 1 or a trial given twice.
    """
    listed = check_unique(loads)
    static = planning.plan(listed, n, c=c, d=d)
    if not static.segments:
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
