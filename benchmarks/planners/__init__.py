"""Plans of a TrialGroup that are shorter than the paper's, to measure how far StaticFluid is from the best.

`best` takes the shortest of several schedules: the static one, one of full devices up to a target time (`wrap`), and
mixtures of configurations (`mix`), for which `realise` finds devices. `modes` tabulates times and areas over the widths
and has the fractional lower bound. `validity` says whether a schedule is valid. FluidTune's engine uses none of this:
it decides anew at every event, from estimates.
"""

from benchmarks.planners.best import plan
from benchmarks.planners.modes import Modes, relaxed_bound
from benchmarks.planners.validity import check

__all__ = ["Modes", "check", "plan", "relaxed_bound"]
