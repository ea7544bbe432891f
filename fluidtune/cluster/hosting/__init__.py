"""A worker process while it runs a trial's code.

`worker` is the actor, `messages` what a driver and its workers tell each other. `leader_host` runs the trial's code
with a session that `trial_sessions` makes. `result_replay` and `commit_stores` say what commits keep and where they
are, `trial_resources` which resources a trial finds. `open_runs` ends the runs of trackers that the end of a process
leaves open.
"""
