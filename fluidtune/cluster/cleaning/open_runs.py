"""Ends the runs of Weights & Biases that a trial has left open, where the end of its process would come too late.

A child process writes such a run, and Ray kills it when the process leaves Ray. Under stock Ray Tune the run has no end
therefore, and what was logged last may be missing.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any


def end_open_run() -> None:
    """End the trial's run; the process is used again. (Otherwise the next trial would log into it.)"""
    wandb: Any = sys.modules.get("wandb")
    if wandb is not None:
        with suppress(Exception):
            wandb.finish()


def end_trackers() -> None:
    """End what needs child processes; the process is about to leave Ray, and its exit handlers run after that."""
    wandb: Any = sys.modules.get("wandb")
    if wandb is not None:
        with suppress(Exception):
            wandb.teardown()
