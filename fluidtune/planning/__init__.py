"""Planning: how wide the trials of a TrialGroup should run, on which devices and when.

It decides from numbers alone: the heights and overheads of trials, the number of devices, and the limits c and d.

- `loads`: run times (eq. 3.2), the packing limit (eq. 3.1), a lower bound. Start reading here.
- `fluid`: the paper's rules for widths, StaticFluid (alg. 3.1) and DynamicFluid (alg. 3.2). The engine uses the two
  functions that they consist of, `static_widths` and `resize_pays`.
- `placement`: what a plan is, and the static one, from widths to devices and times. The engine makes no plan;
  benchmarks compare it with this one.

Pure: no Ray, no torch, no clock, no randomness. The engine knows which trials wait and which devices are free.
"""

from fluidtune.planning.fluid import dynamic_fluid, static_fluid
from fluidtune.planning.loads import TrialLoad, Width, lower_bound, packing_limit, runtime
from fluidtune.planning.placement import Schedule, Segment, plan

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
