"""Which commit belongs to which configuration, and what a trial goes on with from it."""

from __future__ import annotations

import json
import logging
import pickle
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from pyarrow.fs import LocalFileSystem
from ray.tune.utils.serialization import TuneFunctionDecoder, TuneFunctionEncoder

from fluidtune.cluster.hosting.commit_stores import (
    StorageAway,
    commit_path,
    fingerprint,
    insist,
    kept_commit,
    leader_commit_store,
)
from fluidtune.cluster.hosting.result_replay import ReportedResults
from fluidtune.elastic import Commit, CommitStore
from tests.contracts.processes import python


def after_a_restore(config: dict[str, object]) -> dict[str, object]:
    """The configuration as Tune's experiment state gives it back."""
    try:
        decoder = TuneFunctionDecoder(allow_cloudpickle=True)
    except TypeError:  # older versions of Ray always allow it
        decoder = TuneFunctionDecoder()
    return decoder.decode(json.dumps(config, cls=TuneFunctionEncoder))


MARK = """
import pickle, sys
from fluidtune.cluster.hosting.commit_stores import fingerprint
print(fingerprint(pickle.load(open(sys.argv[1], "rb"))))
"""


def test_a_fingerprint_is_the_same_in_each_process_and_outlives_the_driver(tmp_path: Path) -> None:
    """Seen: a trial with a tensor or a set in its parameters began anew after each move, without a word."""
    name = "".join(["re", "lu"])  # one object, that comes back as two
    config: dict[Any, Any] = {
        "betas": (0.9, 0.999),
        "first": name,
        "second": name,
        "layers": {10: 1, 9: 2},
        "scale": numpy.float32(0.5),
        "choice": numpy.int64(3),
        "__trial_info__": "not the user's",
        "weights": torch.tensor([[0.1, 0.2]]).t(),
        "half": torch.tensor(2.5, dtype=torch.bfloat16),
        "sparse": torch.eye(3).to_sparse(),
        "loss": torch.nn.CrossEntropyLoss(weight=torch.ones(3)),
        "model": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.3)),
        "words": {"alpha", "beta", "gamma"},
        "deep": [{"names": frozenset("abc")}],
        0: "a key that is no text",
    }
    (tmp_path / "config").write_bytes(pickle.dumps(config))
    found = {fingerprint(config), fingerprint(after_a_restore(config) | {0: config[0]})}
    found |= {fingerprint({**config, "__trial_info__": None}), fingerprint(dict(reversed(config.items())))}
    for seed in "12":
        found.add(python("-c", MARK, str(tmp_path / "config"), PYTHONHASHSEED=seed).strip())
    assert len(found) == 1
    for name, other in [
        ("weights", torch.tensor([[0.1], [0.3]])),
        ("loss", torch.nn.CrossEntropyLoss(weight=torch.zeros(3))),
        ("model", torch.nn.Sequential(config["model"][0], torch.nn.Dropout(0.4))),
        ("words", {"alpha"}),
    ]:
        assert fingerprint({**config, name: other}) not in found


def test_a_commit_leaves_the_trials_parameters_out_and_tune_gets_them_with_a_missed_result():
    trainable = SimpleNamespace(iteration=1, _time_total=0.0, _timesteps_total=None, _episodes_total=None)
    trainable.config = {"act": lambda x: x}
    before, after = ReportedResults(0, "mark"), ReportedResults(0, "mark")
    before.trainable = after.trainable = trainable
    before.keep_result({"loss": 0.1, "config": trainable.config})
    note = before.note()
    assert note.results == [(1, {"loss": 0.1})]
    after.resume = Commit("trial", "mark", 0, 1, 1, {}, note)
    after.begin()
    assert after.next_missed() == {"loss": 0.1, "config": trainable.config} and after.next_missed() is None


class Failing(LocalFileSystem):
    """A local file system of which calls fail, before they do anything.

    ``fails``: how many of the next ones. ``only``: of this name; None: of any.
    """

    fails, only = 0, None

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)

        def call(*args: Any, **named: Any) -> Any:
            if self.fails and self.only in (None, name):
                self.fails -= 1
                raise OSError("away")
            return found(*args, **named)

        return call if callable(found) and name[0] != "_" else found


def committed(folder: Path, files: Any, note: Any = None, iteration: int = 3) -> SimpleNamespace:
    """A trial's storage with a commit."""
    storage = SimpleNamespace(trial_fs_path=str(folder), storage_filesystem=files)
    commits_of(leader_commit_store(storage), note, iteration)
    return storage


def commits_of(store: CommitStore, note: Any = None, iteration: int = 3) -> None:
    """The commits of an iteration, and of the one before it."""
    for number in (iteration - 1, iteration):
        made = Commit("trial", "mark", 0, number, number, {}, note, life="one")
        assert store.offer(lambda made=made: made, force=True) and store.flush()


def test_a_storage_that_fails_for_a_moment_is_asked_again(tmp_path):
    files = Failing()
    storage = committed(tmp_path, files)
    files.fails = 1
    found = kept_commit(storage)
    assert found is not None and found.iteration == 3
    files.fails = 3
    with pytest.raises(StorageAway, match="again and again: OSError: away"):
        insist(lambda: files.get_file_info(str(tmp_path)), (0.0, 0.0))
    store = leader_commit_store(storage)
    files.fails = 1
    store.discard()
    assert kept_commit(storage) is None


def test_a_storage_that_is_away_is_not_told_as_a_commit_that_cannot_be_read(tmp_path, monkeypatch, caplog):
    files = Failing()
    storage, files.fails = SimpleNamespace(trial_fs_path=str(tmp_path), storage_filesystem=files), 9
    monkeypatch.setattr(insist, "__defaults__", ((),))
    with caplog.at_level(logging.WARNING):
        assert kept_commit(storage, needed=False) is None
    assert f"{tmp_path} begins without a commit, should it have one: " in caplog.text


def test_a_commit_that_cannot_be_unpickled_is_passed_over_and_named(tmp_path, monkeypatch, caplog):
    """Its note is of a class that the script has no more. Seen: the trial failed."""
    gone = ModuleType("gone")
    gone.Note = type("Note", (), {"__module__": "gone"})  # type: ignore[attr-defined]
    with monkeypatch.context() as then:
        then.setitem(sys.modules, "gone", gone)
        storage = committed(tmp_path, LocalFileSystem(), gone.Note())
    with caplog.at_level(logging.WARNING):
        assert kept_commit(storage) is None
    [said] = [record.getMessage() for record in caplog.records]
    assert said == f"the commit in {commit_path(storage)} cannot be read, and is passed over: " + (
        "ModuleNotFoundError: No module named 'gone'"
    )


def unfinished(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.rglob("*.partial"))


@pytest.mark.parametrize("step", ["open_output_stream", "move"])
def test_nothing_is_left_of_a_commit_that_could_not_be_written(tmp_path, step):
    """Seen: each process that was killed while it wrote one left a file `commit-0.PID.tmp`."""
    files = Failing()
    files.only = step
    storage = SimpleNamespace(trial_fs_path=str(tmp_path), storage_filesystem=files)
    store = leader_commit_store(storage)
    files.fails = 1
    store.offer(lambda: Commit("trial", "mark", 0, 3, 3, {}))
    assert not store.flush() and unfinished(tmp_path) == []


def test_what_a_killed_process_has_left_of_a_commit_goes_with_the_next_one(tmp_path):
    folder = tmp_path / ".fluid_commit"
    folder.mkdir()
    for left in (".commit-0.partial", ".commit-7.0f.partial", "commit-0.17.tmp"):  # of versions before, too
        (folder / left).write_bytes(b"half of a comm")
    committed(tmp_path, LocalFileSystem())
    assert {each.name for each in folder.iterdir()} == {"commit-0", "commit-1"}


def test_a_process_that_was_given_up_and_its_successor_write_no_file_together(tmp_path):
    opened = []

    class Given(LocalFileSystem):
        def open_output_stream(self, path, *args, **how):
            opened.append(path)
            return super().open_output_stream(path, *args, **how)

    for _ in range(2):
        committed(tmp_path, Given(), iteration=3)
    assert len({*opened}) == 4
