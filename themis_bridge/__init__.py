"""Themis for Ray Tune: an arbiter leases whole GPUs to the tuning apps of one Ray cluster.

An auction on finish-time fairness decides which app holds which GPU until when; an agent in every app bids and
hands the leases to the app's executor. What a trial does with a GPU is not decided here (fluidtune does), nor
whose iteration runs on it (salus_share does). Imports neither; only `themis_bridge.shell` imports ray.
"""

from themis_bridge.auction import Bid, Clearing, clear_auction
from themis_bridge.errors import ThemisError
from themis_bridge.fairness import JobInfo, independent_finish_time, shared_finish_time

__all__ = [
    "Bid",
    "Clearing",
    "JobInfo",
    "ThemisError",
    "clear_auction",
    "independent_finish_time",
    "shared_finish_time",
]
