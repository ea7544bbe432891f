"""Ends the runs of Weights & Biases and MLflow that a trial has left open, where the end of its process does not.

A child process writes a run of Weights & Biases, and Ray kills it when the process leaves Ray. Under stock Ray Tune the
run has no end therefore, and what was logged last may be missing. MLflow's exit handler ends runs of the main thread
only, and a trial's function has a thread of its own.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any, Literal


def end_mlflow_runs(status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
    """End the runs of MLflow that this thread has open."""
    mlflow: Any = sys.modules.get("mlflow")
    if mlflow is not None:
        with suppress(Exception):
            while mlflow.active_run() is not None:
                mlflow.end_run(status)


def end_trackers() -> None:
    """End what needs child processes; the process is about to leave Ray, and its exit handlers run after that."""
    wandb: Any = sys.modules.get("wandb")
    if wandb is not None:
        with suppress(Exception):
            wandb.teardown()
