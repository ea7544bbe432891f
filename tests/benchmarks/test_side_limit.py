"""A side that does not end: it is ended, named, and costs the others nothing."""

import json
import sys
from functools import partial

import pytest

from benchmarks import commits, launch, side_limit, tune_vs_fluid
from benchmarks.common import NotEnded
from benchmarks.side_limit import TIMES, SideLimit, repeat


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


def test_sides_run_in_turn_and_medians_are_taken():
    order, limits = [], []
    sides = {"x": side("x", [5.0, 1.0, 3.0], order, limits), "y": side("y", [2.0, 2.0, 8.0], order, limits)}
    found = repeat(sides, 3, SideLimit())
    assert order == ["x", "y"] * 3
    assert found["x"]["seconds"] == 3.0
    assert found["y"]["seconds"] == 2.0
    assert found["x"]["all"] == [{"seconds": 5.0}, {"seconds": 1.0}, {"seconds": 3.0}]


def test_a_side_may_take_so_many_times_what_the_first_one_took(monkeypatch):
    clock = iter([0.0, 7.0, 10.0, 14.0, 20.0, 99.0, 100.0, 101.0])
    monkeypatch.setattr(side_limit.time, "perf_counter", lambda: next(clock))
    limit, order, limits = SideLimit(first=50.0), [], []
    late, first, second = (side(name, [value], order, limits) for name, value in (("a", None), ("b", 4.0), ("c", 9.0)))
    assert limit.run("a", late) is None and limit.run("b", first) and limit.run("c", second)
    assert limits == [50.0, 50.0, TIMES * 4.0] and limit.not_ended == {"a": 7.0}
    assert SideLimit(3.0, first=50.0).seconds == 3.0


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


#: A script of a side with a Ray cluster and an actor. It writes down its session, in which all its processes are.


def figures_of(command, monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["benchmark", "--json", *arguments])
    command.main()
    return json.loads(capsys.readouterr().out)


def job(seconds, **more):
    return {"seconds": seconds, "fit_seconds": seconds, "launch_seconds": seconds, "best": 0.5, "iterations": 9} | more


@pytest.mark.parametrize("command", [tune_vs_fluid, launch])
def test_a_comparison_with_stock_goes_on_without_the_side_that_hangs(command, monkeypatch, capsys):
    order, given = [], []

    def run(name, seconds, limit):
        order.append(name)
        given.append(limit)
        if name == "stock_reuse":
            raise NotEnded("stock_reuse took more than 5 s")
        return job(seconds, bound_ratio=1.5)

    sides = {"fluid": 2.0, "stock": 6.0, "stock_reuse": 0.0}
    monkeypatch.setattr(command, "sides", lambda *_: {name: partial(run, name, of) for name, of in sides.items()})
    found = figures_of(command, monkeypatch, capsys, "--limit", "5", "--repeats", "2")
    assert order == ["fluid", "stock", "stock_reuse", "fluid", "stock"] and set(given) == {5.0}
    assert found["ratios"] == {"stock": 3.0} and found["ratio"] == 3.0
    assert found["not_ended"].keys() == {"stock_reuse"} and found["sides"].keys() == {"fluid", "stock"}


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
