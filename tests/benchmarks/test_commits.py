"""Pairs of an earlier commit and the present one: who runs when, and what is compared."""

import json
import sys

import pytest

from benchmarks import commits
from benchmarks.common import ROOT


def test_pairs_run_in_turn_and_medians_are_compared(monkeypatch, capsys):
    seconds = {"before": iter([4.0, 9.0, 5.0]), "here": iter([2.0, 2.5, 8.0])}
    ran = []

    def run(folder, devices, profile, job, limit):
        side = "here" if folder == ROOT else folder.name
        ran.append(side)
        assert devices == "cpu:3" and job[:4] == ["--algorithm", "asha", "--trainable", "small"]
        found = {"seconds": next(seconds[side]), "fit_seconds": 2.0, "iterations": 10 if side == "before" else 30}
        return found | ({"bound_ratio": 1.5} if side == "here" else {})

    monkeypatch.setattr(commits, "run", run)
    monkeypatch.setattr(commits, "checkout", lambda commit, folder: None)
    monkeypatch.setattr(commits, "described", lambda *commit: commit[0] if commit else "now")
    arguments = ["commits", "--before", "then", "--job", "small_asha", "--pairs", "3", "--devices", "cpu:3", "--json"]
    monkeypatch.setattr(sys, "argv", arguments)
    commits.main()
    found = json.loads(capsys.readouterr().out)
    assert ran == ["before", "here", "here", "before", "before", "here"]
    assert found["commits"] == {"before": "then", "here": "now"}
    assert found["medians"] == {"small_asha": {"before": 5.0, "here": 2.5}} and found["ratios"] == {"small_asha": 2.0}
    assert [run["seconds"] for run in found["jobs"]["small_asha"]["before"]] == [4.0, 9.0, 5.0]
    assert found["rates"] == {"small_asha": {"before": 5.0, "here": 15.0}}
    assert found["bound_ratios"] == {"small_asha": 1.5}


@pytest.mark.parametrize(("devices", "job"), [("cpu:2", "pbt"), ("emulated:8", "small")])
def test_a_job_that_these_devices_do_not_have_is_refused(devices, job, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["commits", "--before", "HEAD", "--devices", devices, "--job", job])
    with pytest.raises(SystemExit):
        commits.main()
    assert f"--job {job}: on {devices} the jobs are " in capsys.readouterr().err


def test_a_job_that_fails_says_why(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(RuntimeError, match=r"(?s)ended with status 1.*No module named 'benchmarks'"):
        commits.run(tmp_path, "cpu:1", tmp_path / "profile.json", [], 60.0)


def test_a_commit_that_git_does_not_know_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"--before no-such-commit: .*; give a commit of this repository"):
        commits.checkout("no-such-commit", tmp_path / "before")
    assert not list(tmp_path.iterdir())
