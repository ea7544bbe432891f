"""Decides whether a worker process may serve another trial.

A warm worker saves the seconds that a new process costs, provided that the next trial finds it as it would find a new
process. What can be put back is put back: random streams, environment, working directory, torch's defaults. What
cannot be put back (threads, child processes, memory) makes the worker *dirty*, and its owner replaces it. The random
streams of Python, numpy and torch start from entropy, as in a new process.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
from typing import Any

import psutil

from fluidtune.cluster.gpu_probe import torch_on_gpu
from fluidtune.cluster.lanes import is_lane_service

#: Bytes by which a process may have grown since its first trial was loaded. Judgement: allocators and caches of
#: libraries keep hundreds of MiB, which the next trial uses again.
MEMORY_ALLOWANCE = 1 << 30
#: Bytes of GPU memory that torch's allocator may hold after its cache was emptied. Judgement: the workspaces of CUDA's
#: libraries take tens of MiB; a trial's model takes more.
GPU_MEMORY_ALLOWANCE = 64 << 20
#: Seconds that threads which are ending may take. Judgement: small against the start of a new process.
GRACE_S = 2.0
#: How the names of threads begin that libraries start once per process, and that hold nothing of a trial.
HARMLESS_THREADS = ("ray_", "Dummy-", "tqdm", "TMonitor", "pymp", "asyncio_", "IOThread", "AsyncIO", "fluid-")


class ProcessBaseline:
    """What the process was like before the first trial's code ran in it."""

    def __init__(self) -> None:
        self._cwd = os.getcwd()
        self._env = dict(os.environ)
        self._path = list(sys.path)
        self._threads = {t.ident for t in threading.enumerate()}
        self._process = psutil.Process()
        self._children = {p.pid for p in self._process.children()}
        self._rss: int | None = None
        self._torch: dict[str, Any] | None = None
        self._frozen = False

    def note_imports(self) -> None:
        """Note size and torch's defaults; called when a trial's modules are imported and its code has not run."""
        if self._rss is None:
            self._rss = self._process.memory_info().rss
        torch = sys.modules.get("torch")
        if torch is not None and self._torch is None:
            self._torch = {
                "dtype": torch.get_default_dtype(),
                "threads": torch.get_num_threads(),
                "deterministic": torch.are_deterministic_algorithms_enabled(),
            }

    def _as_imported(self, torch: Any) -> dict[str, Any]:
        """torch's defaults after its import, for a trial whose own code was the first to import it."""
        threads = self._env.get("OMP_NUM_THREADS", "")
        return {
            "dtype": torch.float32,
            "threads": int(threads) if threads.isdecimal() else torch.get_num_threads(),
            "deterministic": False,
        }

    def restore(self) -> str | None:
        """Put back what a trial has changed.

        Returns None if the process is as good as new, else one line that says what the trial has left behind.
        """
        os.chdir(self._cwd)
        for name in set(os.environ) - set(self._env):
            del os.environ[name]
        os.environ.update(self._env)
        sys.path[:] = self._path
        random.seed()
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed()
        self._restore_torch()
        gc.collect()
        if not self._frozen:
            # The objects that survive the first trial belong to libraries: later collections need not look at them.
            gc.freeze()
            self._frozen = True
        return self._leftovers()

    def _restore_torch(self) -> None:
        torch = sys.modules.get("torch")
        if torch is None:
            return
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        if self._torch is None:
            self._torch = self._as_imported(torch)
        torch.seed()
        torch.set_default_dtype(self._torch["dtype"])
        if torch.are_deterministic_algorithms_enabled() != self._torch["deterministic"]:
            # Only then: its first call imports torch's compiler, a second or more.
            torch.use_deterministic_algorithms(self._torch["deterministic"])
        if torch.get_num_threads() != self._torch["threads"]:
            torch.set_num_threads(self._torch["threads"])
        if torch_on_gpu(torch) is not None:
            torch.cuda.empty_cache()

    def _leftovers(self) -> str | None:
        deadline = time.monotonic() + GRACE_S
        while True:
            threads = [
                t.name
                for t in threading.enumerate()
                if t.ident not in self._threads and not t.name.startswith(HARMLESS_THREADS)
            ]
            if not threads or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        if threads:
            return f"threads left running: {', '.join(sorted(threads))}"
        children = [p for p in self._process.children() if p.pid not in self._children and _runs_for_a_trial(p)]
        if children:
            return f"processes left running: {', '.join(str(p.pid) for p in children)}"
        if self._rss is not None:
            grown = self._process.memory_info().rss - self._rss
            if grown > MEMORY_ALLOWANCE:
                return f"memory left behind: {grown >> 20} MiB more than when it was new"
        torch = torch_on_gpu()
        if torch is not None:
            held = torch.cuda.memory_allocated()
            if held > GPU_MEMORY_ALLOWANCE:
                return f"GPU memory left behind: {held >> 20} MiB"
        return None


def _runs_for_a_trial(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and not is_lane_service(process)
    except psutil.NoSuchProcess:
        return False
