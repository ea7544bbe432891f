"""Scripts of guides as trials: in a process that served others each reports what it reports alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.idioms.guide_scripts import SCRIPTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def found(folder: str) -> dict[str, dict[str, Any]]:
    """By mode and script what it has reported, and why its process serves no further trial."""
    processes = {}
    for mode in ("alone", "warm"):
        run = f"from tests.idioms import in_one_process as p; p.main({mode!r}, {folder!r}, {SCRIPTS!r})"
        command = [sys.executable, "-W", "ignore", "-c", run]
        processes[mode] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return {mode: json.loads(process.communicate(timeout=580)[0]) for mode, process in processes.items()}


def trouble(alone: list[Any], after: list[Any], why: str | None, dirty: str | None) -> str | None:
    """What is wrong with a script that has reported this; None: nothing."""
    if not alone or "error" in alone[-1] or "error" in after[-1]:
        return f"it fails: alone {alone[-1:]}, after others {after[-1:]}"
    if dirty is not None:
        return None if why is not None and dirty in why else f"its process stays: {why}"
    if why is not None:
        return f"its process is replaced: {why}"
    return None if after == alone else f"alone {alone}, after others {after}"


def test_scripts_of_guides_report_after_others_what_they_report_alone(tmp_path: Path) -> None:
    """One test, so that all of them run in the same two processes. docs/kinds-of-scripts.md; docs/bugs.md, 212, 213"""
    reported = found(str(tmp_path))
    wrong = {}
    for script, dirty in SCRIPTS.items():
        (alone, _), (after, why) = reported["alone"][script], reported["warm"][script]
        wrong[script] = trouble(alone, after, why, dirty)
    assert not any(wrong.values()), {script: what for script, what in wrong.items() if what}
