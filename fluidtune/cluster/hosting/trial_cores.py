"""The one process of a trial over several devices of cores has the cores of all of them.

Ray gives a process the cores that its bundle holds, and its libraries the same number of threads. A trial that asks for
more cores than the job's first one holds several bundles, and its process is in the first.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import ray

from fluidtune.cluster.forks.child import is_forked
from fluidtune.ray_compat.accelerators import claim_cores, watch_cores

_THREADS = "OMP_NUM_THREADS"


class TrialCores:
    """The cores of this process' trials. It is made before the first one."""

    def __init__(self) -> None:
        #: The number of threads that Ray gives to this process; None: no trial has had more cores yet.
        self._own: int | None = None
        if ray.is_initialized():  # a worker without Ray is one of a test
            watch_cores()

    def take(self, cores: float | None) -> None:
        """Have the next trial find this number of cores; None: that of this process.

        In a forked process, libraries other than torch have read their number of threads already.
        """
        if cores is not None and self._own is None:
            own = max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 0.0)))
            # The user's own number of threads holds for all trials.
            self._own = own if os.environ.get(_THREADS) == str(own) else 0
        claim_cores(cores)
        if not self._own:
            return
        threads = max(1, int(cores or self._own))
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(threads)
        if not is_forked():
            os.environ[_THREADS] = str(threads)
