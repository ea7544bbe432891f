"""``--quick --json`` of a benchmark prints one JSON object.

Its keys are those of benchmarks/README.md.
"""

import json
import math
import subprocess
import sys

import pytest

from benchmarks.common import ROOT, kill_tree
from tests.benchmarks.test_salus import CSV

BASE = {"benchmark", "machine", "devices", "kind"}
COMMON = BASE | {"sides", "ratio", "ratios"}
THREE = {"fluid", "stock", "stock_reuse"}


def _run(*command, keys=COMMON, kind="real"):
    call = [sys.executable, "-m", *command, "--quick", "--json"]
    with subprocess.Popen(call, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, said = process.communicate(timeout=280)
        except BaseException:
            kill_tree(process)
            raise
    assert process.returncode == 0, said[-3000:]
    assert out.count("\n") == 1, out
    figures = json.loads(out)
    assert figures.keys() >= keys
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in figures.get("ratios", {}).values())
    assert figures["kind"] == kind
    return figures


@pytest.mark.ray
def test_tune_vs_fluid():
    figures = _run("benchmarks.tune_vs_fluid", "--trainable", "short")
    sides = figures["sides"]
    assert sides.keys() == THREE
    assert figures["ratio"] == min(figures["ratios"].values())
    assert figures["ratios"]["stock"] == sides["stock"]["seconds"] / sides["fluid"]["seconds"]
    assert figures["bound_ratio"] == sides["fluid"]["bound_ratio"] > 0
    for side in sides.values():
        assert 0 < side["ray_up_seconds"] < side["first_result_seconds"] < side["seconds"]
        assert side["workers"] >= 1
        assert min(side[f"{role}_cpu_seconds"] for role in ("driver", "workers", "ray")) > 0
        assert side["errors"] == 0
        assert side["trials"] == sides["stock"]["trials"]
        assert side["iterations"] == sides["stock"]["iterations"]
        assert side["best"] == pytest.approx(sides["stock"]["best"], abs=0.01)


@pytest.mark.ray
def test_the_arbiter_in_motion():
    keys = BASE | {"first", "last", "changes", "ticks", "trouble"}
    moving = _run("benchmarks.arbiter", "--lease-changes", "30", "--gpus", "4", keys=keys, kind="emulated")
    assert moving["changes"] >= 30 and not moving["trouble"]


@pytest.mark.slow
def test_divided():
    figures = _run("benchmarks.divided", keys=BASE | {"models", "ratio"})
    for model in figures["models"].values():
        assert min(model[side] for side in ("alone", "divided", "ddp", "data_parallel")) > 0
        assert model["speed"] == model["ddp"] / model["divided"]


def test_lanes(tmp_path):
    path = tmp_path / "jobs.csv"
    path.write_text(CSV)
    figures = _run("benchmarks.lanes", "--trace", str(path), kind="twin")
    assert figures["sides"].keys() == {"FIFO", "SRTF", "PACK", "FAIR"}
    fifo, srtf = figures["sides"]["FIFO"]["mean_jct"], figures["sides"]["SRTF"]["mean_jct"]
    assert figures["ratio"] == figures["ratios"]["mean_jct"] == pytest.approx(fifo / srtf, rel=0.01)
    assert figures["as_recorded"].keys() == figures["ratios"].keys()


@pytest.mark.faults
def test_a_benchmark_of_real_processes():
    figures = _run("benchmarks.gate")
    assert figures["sides"].keys() == {"gate", "socket"}
    assert figures["ratio"] in figures["ratios"].values()
