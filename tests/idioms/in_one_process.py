"""Scripts of guides as trials of one process, without Ray: what each reports after others, and alone.

``main("alone", FOLDER)`` runs each script in a fork of a process in which no trial has run. ``warm`` lets one process
serve two trials of each script, one script after the other, and cleans it after each trial as a worker does. Scripts
after which the process serves no further trial run in a fork of it.
"""

from __future__ import annotations

import importlib
import json
import os
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.cluster.process_properties import in_a_copy

#: What the script of the present trial has reported.
REPORTS: list[Any] = []


def run(script: str, seed: int, folder: Path) -> list[dict[str, Any]]:
    """Run a script in a thread, as a trial's function does, and return what it reports."""
    reports = REPORTS
    reports.clear()
    folder.mkdir(parents=True, exist_ok=True)

    def call() -> None:
        os.chdir(folder)
        try:
            getattr(importlib.import_module("tests.idioms.guide_scripts"), script)({"seed": seed})
        except BaseException:
            reports.append({"error": traceback.format_exc()})

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return list(reports)


def without_children(call: Callable[[], Any]) -> Any:
    """``call()``; the processes that it has left are ended."""
    try:
        return call()
    finally:
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()


def main(mode: str, folder: str, scripts: dict[str, str | None]) -> None:
    """Print {script: [reports, why the process is not used again]}. ``scripts``: as in `guide_scripts`."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what scripts and libraries print
    baseline = None
    # A fork server has imported them before the process began.
    for name in ("ray.tune", "torch", "torch._dynamo", "sklearn", "numpy"):
        importlib.import_module(name)
    from ray import tune

    tune.report = REPORTS.append
    if mode == "warm":
        from fluidtune.cluster.cleaning.process_reset import ProcessBaseline

        baseline = ProcessBaseline()
        baseline.note_imports()

    def turn(script: str, seed: int) -> list[Any]:
        found = run(script, seed, Path(folder, mode, f"{script}-{seed}"))
        return [found, baseline.restore() if baseline is not None else None]

    def both(script: str) -> list[Any]:
        first = turn(script, 2)
        return first if first[1] is not None else turn(script, 1)

    def in_fork(call: Callable[[], Any]) -> Any:
        return in_a_copy(lambda: without_children(call))

    answers = {}
    # Forks come first, because OpenMP's threads survive none.
    for script, dirty in sorted(scripts.items(), key=lambda each: each[1] is None):
        if baseline is None:
            answers[script] = in_fork(lambda script=script: turn(script, 1))
        else:
            answers[script] = in_fork(lambda script=script: both(script)) if dirty else both(script)
    output.write(json.dumps(answers, default=float))
    output.flush()
    os._exit(0)
