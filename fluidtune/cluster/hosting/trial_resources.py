"""A trial finds in its process what it asks for: Ray names these resources, and libraries have a thread for each core.

Ray names what a process holds itself. A forked process holds nothing of its device, and that of a trial over several
devices of cores is in the bundle of the first. Ray gives libraries as many threads as the process holds cores, unless
the user has set their number.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import ray

from fluidtune.cluster.forks.child import environment_at_start, is_forked
from fluidtune.cluster.forks.fork_launcher import THREADS
from fluidtune.ray_compat.accelerators import claim_resources


class TrialResources:
    """What the trials of this process find, one after the other."""

    def __init__(self) -> None:
        #: The user has set the number of threads: it was there when the process started. Ray sets it after that.
        self._users_threads = THREADS in environment_at_start()
        #: The number of threads that this process began with; None: no trial has had several devices yet.
        self._own: int | None = None

    def taken_of(self, environment: Mapping[str, str]) -> dict[str, str]:
        """What this process takes of the driver's variables: not the number of threads, if it is the user's."""
        return {name: value for name, value in environment.items() if name != THREADS or not self._users_threads}

    def take(self, asked: Mapping[str, float], threads_of_device: int | None) -> None:
        """Have the next trial find what it asks for.

        ``threads_of_device``: those that the libraries of a process on one device have, if the trial has several
        devices of cores; None: it has not. In a forked process, libraries other than torch have read their number of
        threads already.
        """
        if ray.is_initialized():  # a worker without Ray is one of a test
            claim_resources(asked)
        self._own = threads_of_device or self._own
        if self._own is None or self._users_threads:
            return
        threads = self._own if threads_of_device is None else max(1, int(asked["CPU"]))
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(threads)
        if not is_forked():
            os.environ[THREADS] = str(threads)
