"""Arbiter and agents on Ray: thin shells around the state machines, and the only modules here that import ray.

`actor`: the arbiter's process. `tenant`: the agent's side, in the driver of a tuning job. `control`: start, watch, stop.
"""
