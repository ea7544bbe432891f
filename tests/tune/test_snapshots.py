"""What follows once the run's storage has a snapshot of Tune: commits of trials that ended for good are deleted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fluidtune.tune.snapshots import Snapshots


def snapshots(delete: Any, save: Any = None) -> Any:
    """Those of a run whose trial "a" has ended. ``save`` is called when Tune is to save its state."""
    syncer = SimpleNamespace(storage_filesystem=None, sync_period=0.0, sync_timeout=0.0, wait=lambda: None)
    private = {"_storage": SimpleNamespace(syncer=syncer), "_cached_trial_decisions": {}}
    controller = SimpleNamespace(get_trials=lambda: [], checkpoint=lambda force: save(force), **private)
    made: Any = Snapshots(controller, delete)
    made.trial_ended("a")
    return made


def test_nothing_is_deleted_before_the_storage_has_the_end_of_its_trial() -> None:
    """The driver may die before. Seen: on a full disk, a restored run began at 0."""
    deleted: list[str] = []
    made = snapshots(deleted.append)
    refused, stored = made.state_written(), made.state_written()
    made.trial_ended("b")
    refused(False)
    made.delete_commits()
    assert deleted == []
    stored(True)
    made.delete_commits()
    made.delete_commits()
    assert deleted == ["a"]


@pytest.mark.parametrize(("saved", "stored"), [(True, True), (True, False), (False, True)])
def test_what_ended_lately_keeps_its_commits_when_its_end_is_never_stored(saved: bool, stored: bool) -> None:
    deleted: list[str] = []
    made = snapshots(deleted.append)
    made.state_written()(stored)
    made.trial_ended("b")
    made.run_ended(saved)
    made.delete_commits()
    assert deleted == ["a", "b"][: (1 + saved) * stored]


def test_a_storage_that_fails_ends_no_job(caplog: pytest.LogCaptureFixture) -> None:
    def fails(trial: Any) -> None:
        raise OSError("directory not empty")

    made = snapshots(fails)
    made.run_ended(saved=True)
    made.delete_commits()
    assert "stay where they are: directory not empty" in caplog.text


def test_nothing_is_saved_of_how_tune_ends_a_run_that_failed() -> None:
    """Seen: a callback raised, and a restored run took the trials that Tune had stopped for finished."""
    saves: list[bool] = []
    made = snapshots(None, saves.append)
    made.save_if_due()
    made.run_ended(saved=False)
    made.save_if_due()
    assert saves == [True]
