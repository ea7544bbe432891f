"""Emulated devices: nothing is computed, and an iteration takes as long as a profile says.

Ray, Tune, the engine, worker processes and checkpoints are real; only the training is not. A trainable is *paced*
(`paced_trainable`): whatever its own step takes, its iteration lasts as long as the profile says for its placement and
its neighbours. A worker on an emulated device imports no torch, so that fifty of them fit on a laptop. All must be on
one machine, because neighbours find each other in a folder (`occupancy_board`). `emulated_session` has a trial's leader
and its followers. Nothing is decided here.
"""

from fluidtune.cluster.emulated.emulated_session import EmulatedFollower, EmulatedSession
from fluidtune.cluster.emulated.paced_trainable import Emulation, paced, use_host

__all__ = ["EmulatedFollower", "EmulatedSession", "Emulation", "paced", "use_host"]
