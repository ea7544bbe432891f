"""A side that does not end: it is ended, named, and costs the others nothing."""

import json
import sys

import pytest

from benchmarks import commits
from benchmarks.common import NotEnded
from benchmarks.side_limit import SideLimit, repeat


def side(name, values, order, limits):
    left = iter(values)

    def run(limit):
        order.append(name)
        limits.append(limit)
        value = next(left)
        if value is None:
            raise NotEnded(f"{name} took more than {limit:.0f} s")
        return {"seconds": value}

    return run


def test_a_side_that_did_not_end_has_no_figures_and_is_not_run_again(capsys):
    order, limits = [], []
    sides = {"x": side("x", [5.0, 1.0], order, limits), "y": side("y", [2.0, None, 8.0], order, limits)}
    limit = SideLimit(4.0)
    found = repeat(sides, 3 - 1, limit)
    assert order == ["x", "y"] * 2 and found.keys() == {"x"} and limit.not_ended.keys() == {"y"}
    assert "y was ended: y took more than 4 s" in capsys.readouterr().err
    assert limit.run("y", sides["y"]) is None and order == ["x", "y"] * 2
    limit.require("x")
    with pytest.raises(SystemExit, match="y, which the other sides are compared with, did not end within"):
        limit.require("y")


def figures_of(command, monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["benchmark", "--json", *arguments])
    command.main()
    return json.loads(capsys.readouterr().out)


def job(seconds, **more):
    return {"seconds": seconds, "fit_seconds": seconds, "launch_seconds": seconds, "best": 0.5, "iterations": 9} | more


def test_a_job_of_commits_that_does_not_end_costs_the_other_jobs_nothing(monkeypatch, capsys):
    def run(folder, devices, profile, of, limit):
        assert limit == 5.0
        if "asha" in of and folder.name == "before":
            raise NotEnded("asha took more than 5 s")
        return job(4.0 if folder.name == "before" else 2.0, bound_ratio=1.5)

    monkeypatch.setattr(commits, "run", run)
    monkeypatch.setattr(commits, "checkout", lambda commit, folder: None)
    monkeypatch.setattr(commits, "described", lambda *commit: "here")
    arguments = ["--before", "then", "--job", "asha", "hyperband", "--pairs", "2", "--limit", "5"]
    found = figures_of(commits, monkeypatch, capsys, *arguments)
    assert found["not_ended"].keys() == {"asha"} and found["not_ended"]["asha"].keys() == {"before"}
    assert found["ratios"] == {"hyperband": 2.0} and found["medians"].keys() == {"hyperband"}
    assert found["jobs"]["asha"] == {"before": [], "here": []} and len(found["jobs"]["hyperband"]["here"]) == 2
