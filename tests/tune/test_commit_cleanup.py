"""When the commits of trials that ended for good are deleted."""

from __future__ import annotations

from typing import Any

import pytest

from fluidtune.tune.commit_cleanup import SAVE_EVERY_S, CommitCleanup


class Storage:
    """Remembers what was done, in order."""

    def __init__(self, fails: bool = False):
        self.done: list[str] = []
        self.now = 100.0
        self.full = False
        self._fails = fails

    def save(self) -> None:
        if self.full:
            raise OSError("disk quota exceeded")
        self.done.append("save")

    def delete(self, trial: Any) -> None:
        self.done.append(f"delete {trial}")
        if self._fails:
            raise OSError("directory not empty")


def cleanup(storage: Storage) -> Any:
    """Trials whose names begin with "plain" have no commits."""
    return CommitCleanup(storage.save, lambda trial: not trial.startswith("plain"), storage.delete, lambda: storage.now)


def test_commits_are_kept_while_a_worker_unloads_a_trial() -> None:
    storage = Storage()
    ended = cleanup(storage)
    ended.trial_ended("a")
    ended.save_and_delete(unloading=True)
    assert storage.done == ["save"]
    ended.save_and_delete(unloading=False)
    assert storage.done == ["save", "delete a"]


def test_nothing_is_deleted_before_its_end_is_saved() -> None:
    storage = Storage()
    ended = cleanup(storage)
    ended.trial_ended("a")
    ended.save_and_delete(unloading=False)
    ended.trial_ended("b")
    storage.now += SAVE_EVERY_S / 2
    ended.save_and_delete(unloading=False)
    assert storage.done == ["save", "delete a"]
    storage.now += SAVE_EVERY_S
    ended.save_and_delete(unloading=False)
    assert storage.done[2:] == ["save", "delete b"]


@pytest.mark.parametrize("saved", [True, False])
def test_what_ended_lately_keeps_its_commits_when_its_end_is_never_saved(saved: bool) -> None:
    storage = Storage()
    ended = cleanup(storage)
    ended.trial_ended("a")
    ended.save_and_delete(unloading=False)
    ended.trial_ended("b")
    ended.run_ended(saved)
    storage.now += 2 * SAVE_EVERY_S
    ended.save_and_delete(unloading=True)
    ended.close()
    assert storage.done == ["save", "delete a"] + ["save", "delete b"] * saved


def test_commits_stay_until_the_storage_has_what_tune_has_saved(caplog: pytest.LogCaptureFixture) -> None:
    """The driver may die before the storage can be written again. Seen: on a full disk, a restored run began at 0."""
    storage = Storage()
    storage.full = True
    ended = cleanup(storage)
    ended.trial_ended("a")
    for _ in range(3):
        ended.save_and_delete(unloading=False)
        storage.now += 2 * SAVE_EVERY_S
    assert storage.done == [] and caplog.text.count("disk quota exceeded") == 1
    storage.full = False
    ended.save_and_delete(unloading=False)
    assert storage.done == ["save", "delete a"]
    storage.full = True
    ended.trial_ended("b")
    ended.run_ended(saved=True)
    ended.close()
    assert storage.done == ["save", "delete a"]


def test_trials_without_commits_cost_no_save_at_the_end() -> None:
    storage = Storage()
    ended = cleanup(storage)
    ended.trial_ended("plain")
    ended.run_ended(saved=True)
    ended.close()
    assert storage.done == []


def test_a_storage_that_fails_ends_no_job(caplog: pytest.LogCaptureFixture) -> None:
    storage = Storage(fails=True)
    ended = cleanup(storage)
    ended.trial_ended("a")
    ended.run_ended(saved=True)
    ended.close()
    ended.close()
    assert storage.done == ["save", "delete a"]
    assert "stay where they are: directory not empty" in caplog.text
