"""Planning: what a TrialGroup's trials should run on, decided from numbers alone.

Run times and the packing limit (`loads`), the paper's width rules (`fluid`), their placement on devices
(`placement`), schedules nearer to the best (`wrap`, `mix`, chosen by `planner`) and lower bounds (`bounds`).
Pure: no Ray, no torch, no clock, no randomness. It starts and measures nothing.
"""

from fluidtune.planning.bounds import lower_bound
from fluidtune.planning.fluid import dynamic_fluid, static_fluid
from fluidtune.planning.loads import PACKING_THRESHOLD, TrialLoad, Width, marginal_benefit, packing_limit, runtime
from fluidtune.planning.placement import place
from fluidtune.planning.planner import plan
from fluidtune.planning.schedule import Schedule, Segment, check

__all__ = [
    "PACKING_THRESHOLD",
    "Schedule",
    "Segment",
    "TrialLoad",
    "Width",
    "check",
    "dynamic_fluid",
    "lower_bound",
    "marginal_benefit",
    "packing_limit",
    "place",
    "plan",
    "runtime",
    "static_fluid",
]
