"""Keeps a trial's log files whole when it is started again.

Tune's JSON and CSV loggers append to a local file, which is uploaded to the trial's storage now and then. When a trial
with a checkpoint starts again, they first copy the storage's older file over the local one. When a trial without a
checkpoint starts under a new driver, they begin an empty file or, on the same Ray, append to all that the dead driver
wrote. Either way the log loses iterations that were reported, or repeats them. So before Tune starts such a trial, both
files are made to hold exactly the iterations that Tune knows to be reported.

A storage that cannot be reached does not end the job, as it does not under stock Tune: a warning says what was left
out. The filesystems of fsspec raise errors of their own kinds then.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from typing import Any

import pyarrow.fs
from ray.tune.experiment import Trial

from fluidtune.ray_compat.trainable import EXPR_PROGRESS_FILE, EXPR_RESULT_FILE
from fluidtune.ray_compat.whole_files import copy_whole

logger = logging.getLogger(__name__)

_HERE = pyarrow.fs.LocalFileSystem()
_LINE = re.compile(r"[^\n]*\n|[^\n]+")


def upload(trial: Trial) -> None:
    """This driver has written the trial's log: copy it to the trial's storage, where the loggers look for it."""
    local = trial.local_path
    if not local or not os.path.isdir(local):
        return
    for entry in os.scandir(local):
        if entry.is_file():
            _copy_up(trial, entry.name)


def take_over(trial: Trial, reported: int) -> None:
    """A new driver starts the trial: keep the first ``reported`` results of the last driver's log."""
    for name, keep in ((EXPR_RESULT_FILE, _json_lines), (EXPR_PROGRESS_FILE, _csv_rows)):
        local = os.path.join(trial.local_path, name)
        if not reported:
            # The loggers begin a new file, which overwrites the storage's one if there is one.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(local)
            continue
        # The driver's own folder may have more than the trial's storage.
        texts, unread = [_read(_HERE, local)], False
        try:
            texts.insert(0, _read(trial.storage.storage_filesystem, _remote(trial, name)))
        except Exception as error:
            unread = True
            _warn(trial, f"{name} could not be read from", error)
        # Only "\n" ends a line: `splitlines` knows nine more characters, which a value may hold.
        found = [keep(_LINE.findall(text), reported) for text in texts if text is not None]
        if not found:
            continue
        kept = max(found, key=len)
        os.makedirs(trial.local_path, exist_ok=True)
        with open(local, "w") as file:
            file.writelines(kept)
        if not unread:  # what is stored may have more lines
            _copy_up(trial, name)


def _read(files: Any, path: str) -> str | None:
    """The content of a file; None: there is none."""
    with contextlib.suppress(FileNotFoundError), files.open_input_stream(path) as stream:
        return str(stream.readall().decode(errors="replace"))
    return None


def _json_lines(lines: list[str], reported: int) -> list[str]:
    kept = []
    for line in lines[:reported]:
        try:
            json.loads(line)
        except ValueError:
            break  # the line that was being written
        kept.append(line)
    return kept


def _csv_rows(lines: list[str], reported: int) -> list[str]:
    # There is one row for each result, from the first on, below the names. A quoted value may hold commas and line
    # breaks, and a quote as two: so a row has an even number of them.
    rows = whole = quotes = 0
    for number, line in enumerate(lines, 1):
        quotes += line.count('"')
        if quotes % 2 == 0 and line.endswith("\n") and rows <= reported:
            rows, whole = rows + 1, number
    return lines[:whole]


def _remote(trial: Trial, name: str) -> str:
    return os.path.join(trial.storage.trial_fs_path, name)


def _copy_up(trial: Trial, name: str) -> None:
    storage = trial.storage
    try:
        storage.storage_filesystem.create_dir(storage.trial_fs_path)
        copy_whole(os.path.join(trial.local_path, name), storage.storage_filesystem, _remote(trial, name))
    except Exception as error:
        _warn(trial, f"{name} was not uploaded to", error)


def _warn(trial: Trial, what: str, error: Exception) -> None:
    line = "FluidTune: %s %s, so the log of trial %s may lack iterations there; check that storage: %s"
    logger.warning(line, what, trial.storage.trial_fs_path, trial.trial_id, error)
