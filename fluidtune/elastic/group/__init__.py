"""How the workers of a trial become a group, are resized at boundaries, go on after a loss, and end.

Start with `worker_session`, the protocol to the worker process. `session` is what stands behind it, `boundary` what
happens between two iterations and how a joiner enters. `in_place_recovery` finds who is left of a group that broke.
`current_session` is where the loop finds its session, and `loop_thread` runs a follower's loop.
"""
