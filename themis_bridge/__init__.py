"""Themis for Ray Tune: an arbiter leases whole GPUs to the tuning apps of one Ray cluster.

An auction on finish-time fairness decides which app holds which GPU until when; an agent in every app bids and
hands the leases to the app's executor. What a trial does with a GPU is not decided here (fluidtune does), nor
whose iteration runs on it (salus_share does). Empty so far: the pure auction, leases and arbiter come next.
"""
