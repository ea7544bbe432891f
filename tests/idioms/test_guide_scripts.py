"""Scripts of guides as trials: in a process that served others each reports what it reports alone."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.idioms import library_scripts, torch_scripts
from tests.idioms.in_one_process import DIRTY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPTS = [each.__name__ for each in (*torch_scripts.SCRIPTS, *library_scripts.SCRIPTS)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By mode and script what it has reported, and why its process serves no further trial."""
    folder = str(tmp_path_factory.mktemp("scripts"))
    processes = {}
    for mode in ("alone", "warm"):
        run = f"from tests.idioms import in_one_process as p; p.main({mode!r}, {folder!r}, {SCRIPTS!r})"
        command = [sys.executable, "-W", "ignore", "-c", run]
        processes[mode] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return {mode: json.loads(process.communicate(timeout=580)[0]) for mode, process in processes.items()}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_of_a_guide_reports_after_others_what_it_reports_alone(
    found: dict[str, dict[str, Any]], script: str
) -> None:
    # docs/kinds-of-scripts.md; docs/bugs.md, 212 and 213
    (alone, _), (after, why) = found["alone"][script], found["warm"][script]
    assert alone and "error" not in alone[-1] and "error" not in after[-1]
    if script in DIRTY:
        assert DIRTY[script] in why
    else:
        assert why is None
        assert after == alone
