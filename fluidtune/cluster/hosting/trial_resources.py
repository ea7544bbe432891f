"""A trial finds in its process what it asks for: Ray names these resources, and libraries have a thread for each core.

Ray names what a process holds itself. A forked process holds nothing of its device, and that of a trial over several
devices of cores is in the bundle of the first. Ray gives libraries as many threads as the process holds cores.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import ray

from fluidtune.cluster.forks.child import is_forked
from fluidtune.ray_compat.accelerators import claim_resources

_THREADS = "OMP_NUM_THREADS"


class TrialResources:
    """What the trials of this process find, one after the other."""

    def __init__(self) -> None:
        #: The number of threads that this process began with; 0: the user has set it. None: no trial has had several
        #: devices yet.
        self._own: int | None = None

    def take(self, asked: Mapping[str, float], threads_of_device: int | None) -> None:
        """Have the next trial find what it asks for.

        ``threads_of_device``: those that the libraries of a process on one device have, if the trial has several
        devices of cores; None: it has not. In a forked process, libraries other than torch have read their number of
        threads already.
        """
        if ray.is_initialized():  # a worker without Ray is one of a test
            claim_resources(asked)
        if threads_of_device is not None and self._own is None:
            # The user's own number of threads holds for all trials.
            self._own = threads_of_device if os.environ.get(_THREADS) == str(threads_of_device) else 0
        if not self._own:
            return
        threads = self._own if threads_of_device is None else max(1, int(asked["CPU"]))
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(threads)
        if not is_forked():
            os.environ[_THREADS] = str(threads)
