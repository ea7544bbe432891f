"""A fork server's parts are killed at random: no program is lost, none runs twice, nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.forks import failed, run

pytestmark = pytest.mark.faults


def test_parts_are_killed_while_processes_are_started(tmp_path: Path, kills: int) -> None:
    found = run(30 * kills, 7, tmp_path)
    assert not failed(found), found
    assert found["forked"] > 0 and found["kills"]["server"] > 0
