"""Keeps a trial's log files whole when it is started again.

Tune's JSON and CSV loggers append to a local file that is uploaded to the trial's storage now and then. When a
trial with a checkpoint starts again they first copy the storage's older file over the local one, and when one
without starts under a new driver they begin an empty file: either way iterations that were reported are gone
from the log, or come twice. Before Tune starts such a trial, both places get what Tune knows to be reported.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pyarrow.fs
from ray.tune.experiment import Trial
from ray.tune.result import EXPR_PROGRESS_FILE, EXPR_RESULT_FILE, TRAINING_ITERATION


def upload(trial: Trial) -> None:
    """This driver has logged the trial: bring its files to its storage, where the loggers look for them."""
    local = trial.local_path
    if not local or not os.path.isdir(local):
        return
    for entry in os.scandir(local):
        if entry.is_file():
            _copy_up(trial, entry.name)


def take_over(trial: Trial, reported: int) -> None:
    """A new driver continues the trial: its log is what the storage has, up to iteration ``reported``."""
    for name, keep in ((EXPR_RESULT_FILE, _json_lines), (EXPR_PROGRESS_FILE, _csv_rows)):
        try:
            with trial.storage.storage_filesystem.open_input_stream(_remote(trial, name)) as stream:
                text = stream.readall().decode(errors="replace")
        except FileNotFoundError:
            continue
        os.makedirs(trial.local_path, exist_ok=True)
        with open(os.path.join(trial.local_path, name), "w") as file:
            file.writelines(keep(text.splitlines(keepends=True), reported))
        _copy_up(trial, name)


def _json_lines(lines: list[str], reported: int) -> list[str]:
    kept = []
    for line in lines:
        try:
            result: dict[str, Any] = json.loads(line)
        except ValueError:
            break  # the line that was being written
        if result.get(TRAINING_ITERATION, 0) > reported:
            break
        kept.append(line)
    return kept


def _csv_rows(lines: list[str], reported: int) -> list[str]:
    if not lines:
        return []
    columns = lines[0].rstrip("\r\n").split(",")
    if TRAINING_ITERATION not in columns:
        return lines
    # One row an iteration and none is ever skipped; counting does not trip over quoted commas.
    return [line for line in lines[: reported + 1] if line.endswith("\n")]


def _remote(trial: Trial, name: str) -> str:
    return os.path.join(trial.storage.trial_fs_path, name)


def _copy_up(trial: Trial, name: str) -> None:
    storage = trial.storage
    storage.storage_filesystem.create_dir(storage.trial_fs_path)
    pyarrow.fs.copy_files(
        os.path.join(trial.local_path, name),
        _remote(trial, name),
        source_filesystem=pyarrow.fs.LocalFileSystem(),
        destination_filesystem=storage.storage_filesystem,
    )
