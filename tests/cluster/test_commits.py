"""Which commit belongs to which configuration, and commits that an older version has written."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy
import pytest
import torch
from pyarrow.fs import LocalFileSystem
from ray.tune.utils.serialization import TuneFunctionDecoder, TuneFunctionEncoder

from fluidtune.cluster.hosting.commit_stores import commit_path, commit_stores, fingerprint
from fluidtune.cluster.hosting.result_replay import CommitNote, ReportedResults
from fluidtune.elastic import Commit, CommitStore


def after_a_restore(config: dict[str, object]) -> dict[str, object]:
    """The configuration as Tune's experiment state gives it back."""
    try:
        decoder = TuneFunctionDecoder(allow_cloudpickle=True)
    except TypeError:  # older versions of Ray always allow it
        decoder = TuneFunctionDecoder()
    return decoder.decode(json.dumps(config, cls=TuneFunctionEncoder))


def test_a_fingerprint_outlives_the_driver() -> None:
    name = "".join(["re", "lu"])  # one object, that comes back as two
    config = {
        "betas": (0.9, 0.999),
        "first": name,
        "second": name,
        "layers": {10: 1, 9: 2},
        "scale": numpy.float32(0.5),
        "choice": numpy.int64(3),
        "__trial_info__": "not the user's",
    }
    assert fingerprint(config) == fingerprint(after_a_restore(config))
    assert fingerprint(config) == fingerprint({**config, "__trial_info__": None})
    assert fingerprint(config) == fingerprint(dict(reversed(config.items())))


MARK = """
import pickle, sys
from fluidtune.cluster.hosting.commit_stores import fingerprint
print(fingerprint(pickle.load(open(sys.argv[1], "rb"))))
"""


def test_a_fingerprint_is_the_same_in_each_process(tmp_path: Path) -> None:
    """docs/bugs.md, 634"""
    config = {
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
    for seed in "12":
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", MARK, str(tmp_path / "config")]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
        found.add(done.stdout.strip())
    assert len(found) == 1, done.stderr
    for name, other in [
        ("weights", torch.tensor([[0.1], [0.3]])),
        ("loss", torch.nn.CrossEntropyLoss(weight=torch.zeros(3))),
        ("model", torch.nn.Sequential(config["model"][0], torch.nn.Dropout(0.4))),
        ("words", {"alpha"}),
    ]:
        assert fingerprint({**config, name: other}) not in found


def test_another_configuration_has_another_fingerprint() -> None:
    prints = [fingerprint(config) for config in ({"x": 1}, {"x": 2}, {"x": numpy.float32(1)}, {"y": 1}, {"x": [1]})]
    assert len(set(prints)) == len(prints)


@pytest.mark.parametrize(
    ("module", "name"), [("fluidtune.cluster.reports", "Note"), ("fluidtune.cluster.result_replay", "CommitNote")]
)
def test_a_commit_of_the_version_that_called_its_note_otherwise_is_gone_on_from(
    module: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = ModuleType(module)
    made = make_dataclass(name, ["iteration", "time_total", "results"], frozen=True)
    made.__module__ = module
    setattr(old, name, made)
    storage = SimpleNamespace(trial_fs_path=str(tmp_path), storage_filesystem=LocalFileSystem())
    with monkeypatch.context() as then:
        then.setitem(sys.modules, module, old)
        note = made(3, 1.5, [(3, {"loss": 0.1})])
        writer = CommitStore(commit_path(storage))
        assert writer.offer(lambda: Commit("trial", "mark", 0, 3, 3, {}, note)) and writer.flush()
    assert module.encode() in Path(commit_path(storage), "commit-0").read_bytes()
    found = ReportedResults(2, "mark").choose_commit(commit_stores(storage))
    assert found is not None and found.note == CommitNote(3, 1.5, [(3, {"loss": 0.1})])


@pytest.mark.parametrize("own", ["today", 12.5, None])
def test_a_commit_keeps_results_whose_timestamp_is_the_trials_own(own):
    reports = ReportedResults(0, "mark")
    reports.trainable = SimpleNamespace(iteration=1, _time_total=0.0, training_iteration=1)
    reports.keep_result({"loss": 0.1, "timestamp": own})
    assert reports.note().results == [(1, {"loss": 0.1, "timestamp": own})]
