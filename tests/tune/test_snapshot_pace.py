"""Tune saves its state before commits drop results that it has not."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fluidtune.cluster.hosting import result_replay
from fluidtune.cluster.hosting.result_replay import ReportedResults
from fluidtune.tune.snapshot_pace import SnapshotPace
from tests.ray_compat.test_whole_files import brought, stored, written


@pytest.mark.parametrize("seconds", [0.015, 1.0, 40.0])
def test_a_commit_has_each_result_that_tunes_state_has_not(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/bugs.md, 662. Storing the state takes ten iterations, at most 40 s, and Tune saves nothing by itself."""
    now = 1e9
    monkeypatch.setattr(result_replay.time, "time", lambda: now)
    monkeypatch.setattr(result_replay, "time_total", lambda trainable: 0.0)
    reports, pace = ReportedResults(0, "mark"), SnapshotPace(lambda: now)
    reports.trainable = SimpleNamespace(iteration=0)  # type: ignore[assignment]
    in_storage, on_their_way, saves = 0, list[tuple[float, int]](), 0
    for iteration in range(1, 3000):
        now += seconds
        reports.trainable.iteration = iteration  # type: ignore[union-attr]
        reports.keep_result({"loss": iteration})
        pace.result_reported("trial")
        if pace.is_due():
            pace.state_written()
            on_their_way.append((now + min(40.0, 10 * seconds), iteration))
            saves += 1
        if on_their_way and on_their_way[-1][0] <= now:
            pace.state_stored()
        in_storage = max([in_storage, *(known for there, known in on_their_way if there <= now)])
        commit: Any = SimpleNamespace(fingerprint="mark", note=reports.note())
        assert ReportedResults(in_storage, "mark")._usable(commit)
    assert saves < 3000 * seconds / 40 + 3000 / 500


def test_a_job_without_commits_asks_for_nothing() -> None:
    now = 0.0
    pace = SnapshotPace(lambda: now)
    now = 1e6
    assert not pace.is_due()


def test_no_further_state_is_asked_for_while_one_is_on_its_way() -> None:
    """Tune would wait for that one, and no trial would go on."""
    now = 0.0
    pace = SnapshotPace(lambda: now)
    pace.state_written()
    pace.result_reported("trial")
    now = 1000.0
    assert not pace.is_due()
    pace.state_stored()
    assert pace.is_due()


class States:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def state_written(self) -> None:
        self.heard.append("written")

    def state_stored(self) -> None:
        self.heard.append("stored")


def test_the_storage_says_when_tune_has_written_its_state(tmp_path: Path) -> None:
    states = States()
    storage = stored(tmp_path, states=states)
    written(tmp_path / "here", "result")
    brought(storage.syncer, tmp_path / "here", str(tmp_path / "there"))
    assert not states.heard, "there are files of trials only"
    written(tmp_path / "here", "result", state="{}")
    brought(storage.syncer, tmp_path / "here", str(tmp_path / "there"))
    assert states.heard == ["written", "stored"]
    (tmp_path / "full").touch()
    written(tmp_path / "here", "result", state="{} ")
    with pytest.raises(Exception):  # noqa: B017
        brought(storage.syncer, tmp_path / "here", str(tmp_path / "full"))
    assert states.heard == ["written", "stored"] * 2, "a storage that takes nothing is asked again"
    assert pickle.loads(pickle.dumps(storage.syncer))._states is None
