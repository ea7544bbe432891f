"""Whatever a trial changes in its process, the next one finds it as in a new process, or gets a new process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.process_properties import DIRTY, PROPERTIES

pytestmark = pytest.mark.slow

#: A module of the user's own, whose state a trial changes.
MODULE = "STATE = []\n\n\ndef answer():\n    return 42\n"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """What each property is in a new process, and in one that a trial has left."""
    processes = {}
    for mode in ("fresh", "warm"):
        folder: Path = tmp_path_factory.mktemp(mode)
        (folder / "a_users_module.py").write_text(MODULE)
        run = f"from tests.cluster import process_properties as p; p.main({mode!r}, {str(folder)!r})"
        # A process of its own: a fork of this one has what other tests have changed.
        processes[mode] = subprocess.Popen([sys.executable, "-c", run], stdout=subprocess.PIPE, text=True)
    yield {mode: json.loads(process.communicate(timeout=120)[0]) for mode, process in processes.items()}


@pytest.mark.parametrize("where", ["thread", "main"])
@pytest.mark.parametrize("name", PROPERTIES)
def test_the_next_trial_finds_what_a_new_process_has(found: dict[str, dict[str, Any]], name: str, where: str) -> None:
    # docs/bugs.md, 121
    why, seen = found["warm"][f"{name} ({where})"]
    if why is None:
        assert seen == found["fresh"][name]
        assert name not in DIRTY or name == "priority"  # root may lower it again
    else:
        assert name in DIRTY, why
