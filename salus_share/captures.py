"""Refuses CUDA graphs that are captured in the mode in which a neighbour in the same process breaks them.

By default a capture is in the mode "global": a call of CUDA in any other thread that might allocate breaks it, and
fails itself (torch, docs of `torch.cuda.graph`, ``capture_error_mode``). So a trial that captures would also end the
iteration of a trial beside it. Where trials share a process by threads, torch is told to ask here first.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

from salus_share.errors import SalusError


class CaptureRefused(SalusError):
    """A capture would break those of other trials of this process, and be broken by them."""


class Captures:
    """Whether a capture may begin in this process. Torch asks from the first trial's `enter` to the last one's `leave`.

    One object for the process: torch's functions belong to all threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trials = 0
        self._originals: list[tuple[type, str, Any]] = []

    def enter(self) -> None:
        """A trial begins, on a GPU, in a thread of this process."""
        with self._lock:
            self._trials += 1
            if self._trials == 1:
                # The context enters a stream before it begins to capture, and nobody would leave that.
                self._ask_before(torch.cuda.graph, "__enter__", lambda self: self.capture_error_mode)
                self._ask_before(torch.cuda.CUDAGraph, "capture_begin", _mode_of_call)

    def leave(self) -> None:
        """A trial has ended."""
        with self._lock:
            self._trials -= 1
            while not self._trials and self._originals:
                owner, name, original = self._originals.pop()
                setattr(owner, name, original)

    def _ask_before(self, owner: type, name: str, mode_of: Any) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def asking(*args: Any, **kwargs: Any) -> Any:
            self._refuse(mode_of(*args, **kwargs))
            return original(*args, **kwargs)

        self._originals.append((owner, name, original))
        setattr(owner, name, asking)

    def _refuse(self, mode: str) -> None:
        if mode == "global" and self._trials > 1:
            raise CaptureRefused(
                'a CUDA graph is captured with capture_error_mode="global" beside another trial of this process: give'
                ' capture_error_mode="thread_local", or the trial a process of its own'
            )


def _mode_of_call(graph: Any, pool: Any = None, capture_error_mode: str = "global", *_: Any, **__: Any) -> str:
    """The mode of a call of ``CUDAGraph.capture_begin``."""
    return capture_error_mode


captures = Captures()
