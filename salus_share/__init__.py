"""Salus: several trials share one device, in memory and by turns at iteration boundaries.

It decides which trials fit on a device and in which lane of its memory each is (`lanes`), which device a trial joins
and what part of it each gets (`packing`), and whose iteration runs next in a lane (`turns`), by a policy (`policies`).
These modules are pure, and `benchmarks.shared_device` runs them on a virtual clock. In real processes, trials take
turns by themselves in shared memory (`gate`, `seat_table`), and `memory` measures what a trial needs and holds it to
what it was promised.

Start with `lanes` and `turns`; docs/salus.md has the decisions and the figures. When a trial comes to a device, and its
lane there, is not decided here (fluidtune's engine does that). Nothing here imports ray or fluidtune, and what this
module exports needs neither torch nor a GPU.
"""

from salus_share.errors import SalusError
from salus_share.lanes import Lane, LaneTable, Need
from salus_share.packing import SEATS, choose_device, shares
from salus_share.policies import Policy, policy

__all__ = ["SEATS", "Lane", "LaneTable", "Need", "Policy", "SalusError", "choose_device", "policy", "shares"]
