"""The twin: arbiter, agents and apps on a virtual clock.

The arbiter and the agents are the same state machines that run on Ray; only apps, GPUs and time are simulated.
`simulate` runs whole workloads under Themis and its baselines; `faults` breaks everything that can break, from a seed.
"""
