"""``--quick --json`` of each benchmark that runs Ray yields one JSON object with the keys of design.md."""

import json
import math
import subprocess
import sys

import pytest

from benchmarks.common import ROOT

COMMON = {"benchmark", "machine", "devices", "kind", "sides", "ratio", "ratios"}
THREE = {"fluid", "stock", "stock_reuse"}


def _run(*command):
    done = subprocess.run(
        [sys.executable, "-m", *command, "--quick", "--json"], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("\n") == 1, done.stdout
    figures = json.loads(done.stdout)
    assert figures.keys() >= COMMON
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in figures["ratios"].values())
    assert figures["kind"] == "real"
    return figures


@pytest.mark.ray
@pytest.mark.parametrize("trainable", ["elastic", "short"])
def test_tune_vs_fluid(trainable):
    figures = _run("benchmarks.tune_vs_fluid", "--trainable", trainable)
    sides = figures["sides"]
    assert sides.keys() == THREE
    assert figures["ratio"] == figures["ratios"]["stock"]
    assert figures["ratio"] == sides["stock"]["seconds"] / sides["fluid"]["seconds"]
    for side in sides.values():
        assert side["errors"] == 0
        assert side["trials"] == sides["stock"]["trials"]
        assert side["iterations"] == sides["stock"]["iterations"]
        assert side["best"] == pytest.approx(sides["stock"]["best"], abs=0.01)


@pytest.mark.ray
def test_launch():
    figures = _run("benchmarks.launch")
    assert figures["sides"].keys() == THREE
    assert figures["ratio"] == figures["ratios"]["stock"]
    for side in figures["sides"].values():
        assert side["launch_seconds"] >= figures["first_iteration_seconds"]


@pytest.mark.ray
def test_resize():
    figures = _run("benchmarks.resize")
    assert figures["sides"].keys() == {"fluid", "stock"}
    assert figures["ratio"] == min(figures["by_kind"]["stock"].values())
    for side in figures["sides"].values():
        assert side["grow"] > 0
        assert side["shrink"] > 0
