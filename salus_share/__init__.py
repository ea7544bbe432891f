"""Salus: several trials on one GPU, switched at iteration boundaries.

A lane manager packs trials by persistent and ephemeral memory and runs one iteration per lane at a time. Which
trials share a GPU is not decided here (fluidtune does). Imports neither ray nor fluidtune; what is named here
needs neither torch nor a GPU.
"""

from salus_share.admission import Admission
from salus_share.errors import Refused, SalusError, ServiceLost, StaleToken
from salus_share.lanes import Lane, LaneTable
from salus_share.messages import Need
from salus_share.packing import SEATS, choose_device, divide, fit_together, packing_limit, shares
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
    "packing_limit",
    "policy",
    "shares",
]
