"""The task of ``tune_vs_fluid --trainable small``: a trial that goes on from its checkpoint is the same trial."""

import shutil

import pytest
from ray.tune import Checkpoint

from benchmarks import small_task

CONFIG = {"lr": 0.1, "momentum": 0.9, "width": 32, "batch_size": 64, "epochs": 4, "seed": 0}


@pytest.mark.slow
def test_a_trial_goes_on_from_its_checkpoint(monkeypatch, tmp_path):
    reported, kept = [], []

    def report(metrics, checkpoint):
        reported.append(metrics["accuracy"])
        kept.append(shutil.copytree(checkpoint.path, tmp_path / str(len(kept))))

    monkeypatch.setattr(small_task.tune, "report", report)
    monkeypatch.setattr(small_task.tune, "get_checkpoint", lambda: None)
    small_task.train(CONFIG)
    alone = list(reported)
    assert len(alone) == 4 and alone[-1] > 0.8
    monkeypatch.setattr(small_task.tune, "get_checkpoint", lambda: Checkpoint(str(kept[1])))
    small_task.train(CONFIG)
    assert reported[4:] == alone[2:]
