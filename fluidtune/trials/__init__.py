"""A trial's life in the driver: where it is, what its workers do, what follows from an answer or a loss.

Events go in (the engine has a place for it, a worker has loaded it, a follower died), instructions come out (call the
leader, unload a worker, hand the engine an event, tell Tune); `messages` lists both. Pure: no Ray, no torch, no clock.
`fluidtune.tune` carries the instructions out, and has one `TrialStateMachine` for each trial that Tune wants to run.

Start reading at `life_states` and docs/trials.md (the states, and the tables of their changes as diagrams), then
`lifecycle.handle`. `life` is the record. `calls`, `resizes` and `recoveries` decide.

It decides neither which devices a trial has nor how wide it is (the engine does), nor when a trial ends (Tune does).
"""

from fluidtune.trials.life import LifeError, TrialStateMachine
from fluidtune.trials.lifecycle import handle

__all__ = ["LifeError", "TrialStateMachine", "handle"]
