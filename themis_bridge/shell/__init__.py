"""Arbiter and agents on Ray: thin shells around the state machines, and the only modules here that import ray.

`actor`: the arbiter's process. `tenant`: the agent's side, in a tuning job's driver. `control`: start, watch, stop.
`reservations`: leases as placement groups.
"""
