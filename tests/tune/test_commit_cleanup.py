"""When the commits of trials that ended for good are deleted."""

from __future__ import annotations

from typing import Any

import pytest

from fluidtune.tune.commit_cleanup import CommitCleanup


def cleanup(*trials: str) -> tuple[Any, list[str]]:
    """These trials have ended. Returns the names of trials whose commits are deleted, too."""
    deleted: list[Any] = []
    ended: Any = CommitCleanup(deleted.append)
    for trial in trials:
        ended.trial_ended(trial)
    return ended, deleted


def test_nothing_is_deleted_before_the_storage_has_the_end_of_its_trial() -> None:
    """The driver may die before. Seen: on a full disk, a restored run began at 0."""
    ended, deleted = cleanup("a")
    refused, stored = ended.state_written(), ended.state_written()
    ended.trial_ended("b")
    refused(False)
    ended.delete_stored()
    assert deleted == []
    stored(True)
    ended.delete_stored()
    ended.delete_stored()
    assert deleted == ["a"]


@pytest.mark.parametrize("stored", [True, False])
def test_what_ended_lately_keeps_its_commits_when_its_end_is_never_stored(stored: bool) -> None:
    ended, deleted = cleanup("a")
    if stored:
        ended.run_ended()
    ended.delete_stored()
    assert deleted == ["a"] * stored


def test_a_storage_that_fails_ends_no_job(caplog: pytest.LogCaptureFixture) -> None:
    def fails(trial: Any) -> None:
        raise OSError("directory not empty")

    ended: Any = CommitCleanup(fails)
    ended.trial_ended("a")
    ended.run_ended()
    ended.delete_stored()
    assert "stay where they are: directory not empty" in caplog.text
