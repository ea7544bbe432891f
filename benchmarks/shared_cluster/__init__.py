"""A cluster that apps share, on a virtual clock: worlds, policies beside Themis, and apps that lie.

The arbiter and the agents are the same state machines that run on Ray; only apps, GPUs and time are simulated.
`simulate` runs whole workloads under Themis and its baselines.
"""
