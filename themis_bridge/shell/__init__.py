"""Arbiter and agents on Ray: thin shells around the state machines. Only these modules of the package import ray.

`actor` is the arbiter's process, `tenant` the agent in a tuning job's driver. `control` starts, watches and stops the
arbiter. `reservations` makes leases into placement groups. Nothing is decided here.
"""
