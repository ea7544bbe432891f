"""Planning: how wide the trials of a TrialGroup should run, on which devices and when.

It decides from numbers alone: the heights and overheads of trials, the number of devices, and the limits c and d.

- `loads`: run times (eq. 3.2) and the packing limit (eq. 3.1). Start reading here.
- `fluid`: the paper's rules for widths, StaticFluid (alg. 3.1) and DynamicFluid (alg. 3.2), which the engine uses.
- `placement`: the static plan, from widths to devices and times. `schedule`: what a plan is.
- `bounds`: how short a schedule can be at best.

Pure: no Ray, no torch, no clock, no randomness. It measures nothing and starts nothing. Which trials wait and which
devices are free at a moment is the engine's matter.
"""

from fluidtune.planning.bounds import lower_bound
from fluidtune.planning.fluid import dynamic_fluid, static_fluid
from fluidtune.planning.loads import TrialLoad, Width, packing_limit, runtime
from fluidtune.planning.placement import plan
from fluidtune.planning.schedule import Schedule, Segment

__all__ = [
    "Schedule",
    "Segment",
    "TrialLoad",
    "Width",
    "dynamic_fluid",
    "lower_bound",
    "packing_limit",
    "plan",
    "runtime",
    "static_fluid",
]
