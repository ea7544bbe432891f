"""Salus: several trials share one device, in memory and by turns at iteration boundaries.

It decides which trials a device admits (`admission`), in which lane of its memory each is (`lanes`), and whose
iteration runs next in a lane (`turns`), from what trials need and by a policy (`policies`). These modules are pure, and
`benchmarks.shared_device` runs them on a virtual clock. For trials in real processes, `client` is a trial's side and
`service` the device's; with `gate` and `seat_table`, trials take turns by themselves in shared memory. `trial` and
`memory` measure what a trial needs and hold it to what it was promised. `packing` answers for those who place trials.

Start with `messages`, then `admission` and `turns`; docs/salus.md has the decisions and the figures. Which trials share
a device is not decided here (fluidtune does that). Nothing here imports ray or fluidtune, and what this module exports
needs neither torch nor a GPU.
"""

from salus_share.admission import Admission
from salus_share.errors import Refused, SalusError, ServiceLost, StaleToken
from salus_share.lanes import Lane, LaneTable
from salus_share.messages import Need
from salus_share.packing import SEATS, choose_device, divide, fit_together, shares
from salus_share.policies import Policy, policy

__all__ = [
    "SEATS",
    "Admission",
    "Lane",
    "LaneTable",
    "Need",
    "Policy",
    "Refused",
    "SalusError",
    "ServiceLost",
    "StaleToken",
    "choose_device",
    "divide",
    "fit_together",
    "policy",
    "shares",
]
