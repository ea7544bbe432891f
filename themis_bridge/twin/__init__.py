"""The twin: arbiter, agents and apps on a virtual clock.

The arbiter and the agents are the very state machines that run on Ray; only apps, GPUs and time are simulated.
`faults` breaks everything that can break, from a seed; `simulate` runs whole workloads under Themis and its baselines.
"""
