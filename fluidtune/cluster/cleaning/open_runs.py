"""Ends the runs of trackers that a trial has left open, where the end of its process would not do so, or comes later.

A run of Weights & Biases is written by a child process, which Ray kills when the process leaves Ray. Under stock Ray
Tune such a run has no end, and what was logged last may be missing.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any


def end_open_runs() -> None:
    """End the trial's runs; the process is used again. (Otherwise the next trial would log into them.)"""
    wandb: Any = sys.modules.get("wandb")
    mlflow: Any = sys.modules.get("mlflow")
    if wandb is not None:
        with suppress(Exception):
            wandb.finish()
    if mlflow is not None:
        with suppress(Exception):
            while mlflow.active_run() is not None:
                mlflow.end_run()


def end_trackers() -> None:
    """End what needs child processes; the process is about to leave Ray. Exit handlers do the rest (MLflow's does)."""
    wandb: Any = sys.modules.get("wandb")
    if wandb is not None:
        with suppress(Exception):
            wandb.teardown()
