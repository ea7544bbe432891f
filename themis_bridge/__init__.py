"""Themis for Ray Tune: an arbiter leases whole GPUs to the tuning jobs ("apps") of one Ray cluster.

Decided here: which app holds which GPU until when. The decision is an auction on finish-time fairness, rho = the time
that an app takes as things are / the time that it would take on its own share of the cluster. The inputs are what apps
report of their work left, and where the GPUs are.

Start reading with `messages` (all that the arbiter and the apps' agents say to each other), then `arbiter` and `agent`
(the two state machines). The arbiter consists of `arbiter_state`, `auctioneer` (rounds) and `lease_manager`; it asks
`policy` which apps bid and who wins, and `policy` asks `auction` and `winner_determination`. `fairness`, `locality` and
`bids` are an app's side: its rho for any set of GPUs, and its bid. `shell` runs all of this on Ray.
`benchmarks.shared_cluster` runs it on a virtual clock, beside baselines.

Not decided here: what a trial does with a GPU (fluidtune), and whose iteration runs on it (salus_share). This package
imports neither of them, and only `themis_bridge.shell` imports ray.
"""

from themis_bridge.auction import Bid, Clearing, clear_auction
from themis_bridge.errors import ThemisError
from themis_bridge.fairness import JobInfo, independent_finish_time

__all__ = [
    "Bid",
    "Clearing",
    "JobInfo",
    "ThemisError",
    "clear_auction",
    "independent_finish_time",
]
