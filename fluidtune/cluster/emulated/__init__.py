"""Emulated devices: nothing is computed, an iteration takes as long as a profile says.

Ray, Tune, the engine, worker processes and checkpoints are real; only the training is not. A trainable is
*paced* (`trainable.paced`): whatever its own step takes, its iteration lasts what the profile says for its width,
its placement and its neighbours. Stock Ray Tune runs the same paced trainable on the same devices. A worker on an
emulated device imports no torch, so that fifty of them fit a laptop. One machine only: neighbours find each other in
a file (`board`). Nothing is decided here.
"""

from fluidtune.cluster.emulated.emulated_session import EmulatedSession
from fluidtune.cluster.emulated.paced_trainable import Emulation, paced, use_host

__all__ = ["EmulatedSession", "Emulation", "paced", "use_host"]
