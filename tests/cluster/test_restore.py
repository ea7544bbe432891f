"""Whether a worker goes on from a trial's checkpoint or from its commit. No Ray runs here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune import Trainable

from fluidtune.cluster.hosting.leader_host import LeaderHost
from fluidtune.cluster.hosting.messages import LoadSpec
from fluidtune.cluster.hosting.result_replay import CommitNote, ReportedResults
from fluidtune.elastic import BeginsAnew, Commit
from fluidtune.group_facts import GroupFacts
from fluidtune.ray_compat.trainable import RESULT_DUPLICATE, set_progress


class Hosting(LeaderHost):
    """Hosts trial_1, of which 13 iterations are reported; its commit is of iteration 12."""

    def __init__(self) -> None:
        self._began_at = None
        self.deleted: list[str] = []
        self.forgot = 0
        files = SimpleNamespace(delete_dir=self.deleted.append)
        storage = SimpleNamespace(trial_fs_path="/job/trial_1", storage_filesystem=files, current_checkpoint_index=-1)
        self.spec = LoadSpec("trial_1", {"storage": storage}, delivered=13)
        self.trainable: Any = Trainable.__new__(Trainable)
        self.trainable.restore = self.restored
        self.trainable.config = {}
        set_progress(self.trainable, 0, 0.0)
        self.session: Any = SimpleNamespace(forget_resume=self.forget)
        reports = self.reports = ReportedResults(13, "")
        reports.trainable = self.trainable
        reports.resume = Commit("trial_1", "", 0, 12, 12, {}, CommitNote(12, 1.0, []))

    def restored(self, checkpoint: Any) -> None:
        set_progress(self.trainable, 10, 0.0)

    def forget(self) -> None:
        self.forgot += 1


def at(path: str) -> Any:
    return SimpleNamespace(checkpoint=SimpleNamespace(path=path))


@pytest.mark.parametrize(
    ("path", "again"), [("/job/trial_1/checkpoint_10", False), ("/job/trial_2/checkpoint_10", True)]
)
def test_a_trial_goes_on_from_its_commit_if_that_is_newer(path: str, again: bool) -> None:
    worker = Hosting()
    assert worker.restore(at(path), again) == 13
    assert worker.trainable.iteration == 12
    assert not worker.forgot and not worker.deleted


@pytest.mark.parametrize("path", ["/job/trial_2/checkpoint_10", "/job/trial_10/checkpoint_10"])
def test_another_trials_checkpoint_is_a_new_beginning(path: str) -> None:
    worker = Hosting()
    assert worker.restore(at(path)) == 10
    assert worker.reports.reported == 10
    assert worker.forgot == 1 and worker.deleted == ["/job/trial_1/.fluid_commit"]


def test_the_commits_of_the_state_before_go_though_the_storage_fails_once() -> None:
    worker = Hosting()
    files = worker.spec.kwargs["storage"].storage_filesystem
    delete, failed = files.delete_dir, []

    def fail_once(path: str) -> None:
        if not failed:
            failed.append(path)
            raise OSError("away")
        delete(path)

    files.delete_dir = fail_once
    assert worker.restore(at("/job/trial_2/checkpoint_10")) == 10
    assert worker.deleted == ["/job/trial_1/.fluid_commit"]


@pytest.mark.parametrize("flags", [{"repeats": True}, {"own_numbers": True}], ids=str)
def test_iterations_after_the_checkpoint_are_reported(flags: dict[str, bool]) -> None:
    """In a retry as under stock Tune; and where the checkpoint's number is the user's, it cannot be compared."""
    worker = Hosting()
    reports = worker.reports = ReportedResults(13, "", **flags)
    reports.trainable = worker.trainable
    assert worker.restore(at("/job/trial_1/checkpoint_10")) == 10
    set_progress(worker.trainable, 11, 0.0)
    assert not reports.was_seen({})


def test_a_retry_from_the_start_reports_from_the_start() -> None:
    worker = Hosting()
    reports = worker.reports = ReportedResults(13, "", repeats=True)
    reports.trainable = worker.trainable
    reports.begin()
    set_progress(worker.trainable, 1, 0.0)
    assert not reports.was_seen({})


def test_a_function_that_does_not_come_to_the_loop_of_its_commit_has_not_ended() -> None:
    def ended() -> None:
        raise BeginsAnew("the commit is of another loop")

    worker = Hosting()
    worker.lane, worker.division, worker._has_checkpoint, worker._divided = None, None, False, False
    worker.session = SimpleNamespace(facts=GroupFacts, ended=ended)
    worker.trainable.train = lambda: {RESULT_DUPLICATE: True}
    assert worker.train().anew == "the commit is of another loop"


def test_a_leader_drops_the_results_that_the_storage_has() -> None:
    worker = Hosting()
    worker.session = SimpleNamespace(facts=GroupFacts)
    assert worker.reports is not None
    for iteration in (14, 15, 16):
        set_progress(worker.trainable, iteration, 0.0)
        worker.reports.keep_result({})
    worker.reports._missed = [(17, {})]
    worker._has_checkpoint = True
    assert worker.train(stored=15).iteration == 17
    assert [iteration for iteration, _ in worker.reports.note().results] == [16, 17]
