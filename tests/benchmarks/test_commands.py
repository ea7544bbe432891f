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
def test_the_arbiter_in_motion_and_idle():
    keys = BASE | {"first", "last", "changes", "ticks", "trouble"}
    moving = _run("benchmarks.arbiter", "--lease-changes", "30", "--gpus", "4", keys=keys, kind="emulated")
    assert moving["changes"] >= 30 and not moving["trouble"]
    still = _run("benchmarks.arbiter", "--idle", "--gpus", "4", keys=BASE | {"arbiter_mb", "empty_mb"}, kind="emulated")
    assert len(still["arbiter_mb"]) == 2 and min(still["arbiter_mb"]) > 10
    assert still["ticks"] > 0 < still["exchanges"]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.serve
def test_stages():
    figures = _run("benchmarks.stages", keys=BASE | {"loads", "points", "loadavg"})
    for row in figures["loads"].values():
        assert 0 <= row["real"] <= 1 and 0 < row["simulated"] <= 1 and len(row["cut"]["stages_ms"]) == 2


@pytest.mark.slow
def test_iteration():
    figures = _run("benchmarks.iteration", keys=BASE | {"sizes", "ratio"})
    for sides in figures["sizes"].values():
        for parts in sides.values():
            assert parts["whole"] == pytest.approx(sum(us for part, us in parts.items() if part != "whole"))
            assert all(us > 0 for us in parts.values())


@pytest.mark.slow
def test_imports():
    figures = _run("benchmarks.imports", keys=BASE | {"seconds", "forked"})
    seconds = figures["seconds"]
    assert 0 < figures["forked"] < seconds["whole"]
    assert seconds.pop("whole") == pytest.approx(sum(seconds.values()))
    assert all(each > 0 for each in seconds.values())


@pytest.mark.ray
@pytest.mark.parametrize("backend", ["torch", pytest.param("horovod", marks=pytest.mark.horovod)])
def test_resize(backend):
    figures = _run("benchmarks.resize", "--backend", backend)
    others = {"stock"} if backend == "torch" else {"stock", "elastic_ray"}
    assert figures["sides"].keys() == {"fluid", *others}
    assert figures["ratios"] == {name: min(figures["by_kind"][name].values()) for name in others}
    assert figures["ratio"] == min(figures["ratios"].values())
    for side in figures["sides"].values():
        assert side["grow"] > 0
        assert side["shrink"] > 0


@pytest.mark.ray
def test_twin():
    keys = BASE | {"algorithms", "worst_error", "mean_error", "measured_on"}
    figures = _run("benchmarks.twin", "--devices", "emulated:4", "--algorithm", "grid", keys=keys, kind="emulated")
    (found,) = figures["algorithms"].values()
    assert found["predicted"] > 0 and found["ratio"] == found["predicted"] / found["measured"]


@pytest.mark.ray
def test_overheads():
    keys = BASE | {"compared", "worst_error", "artificial", "lost_by_measuring"}
    figures = _run("benchmarks.overheads", "--devices", "emulated:4", keys=keys, kind="emulated")
    assert figures["compared"], "nothing was packed or grown: nothing was compared"
    assert [one["packing"] for one in figures["artificial"].values()] == [2, 2, 1, 1]


@pytest.mark.slow
def test_two_models():
    keys = BASE | {"sides", "ratio", "rows", "alike"}
    figures = _run("benchmarks.two_models", "--seeds", "1", keys=keys, kind="twin")
    assert figures["alike"] == 0.0
    for row in figures["rows"]:
        assert row["ratio"] == row["least"] == row["largest"] == row["as_if_alike"] / row["like_first"]


@pytest.mark.slow
def test_streams():
    figures = _run("benchmarks.streams", "--devices", "4", keys=BASE | {"seeds", "searches", "batches"}, kind="twin")
    searches, batches = figures["searches"], figures["batches"]
    assert batches.keys() == {"grid", "hyperband", "hyperband, 143 x 81", "pbt"} and len(searches) == 6
    whole = [job["4"] for job in batches.values()]
    bare = [job[what] for job in whole for what in ("no_start_up", "packing_known")]
    for found in (*(case["4"] for case in searches.values()), *whole, *bare):
        assert found["seconds"] > 0 and found["bound_ratio"] >= 1 - 1e-9
    assert all(case["4"]["one_each"]["bound_ratio"] >= 1 - 1e-9 for case in searches.values())


def test_driver():
    keys = BASE | {"trials", "engine", "shell", "slowest_events_per_second", "longest_ms"}
    figures = _run("benchmarks.driver", "--only", "plain-sync", "start", keys=keys, kind="twin")
    assert figures["engine"].keys() == {"plain-sync-100"} and figures["shell"].keys() == {"start"}
    assert figures["engine"]["plain-sync-100"]["events"] == 500
    assert figures["longest_ms"] == figures["engine"]["plain-sync-100"]["longest_ms"]


def test_lanes(tmp_path):
    path = tmp_path / "jobs.csv"
    path.write_text(CSV)
    figures = _run("benchmarks.lanes", "--trace", str(path), kind="twin")
    assert figures["sides"].keys() == {"FIFO", "SRTF", "PACK", "FAIR"}
    fifo, srtf = figures["sides"]["FIFO"]["mean_jct"], figures["sides"]["SRTF"]["mean_jct"]
    assert figures["ratio"] == figures["ratios"]["mean_jct"] == pytest.approx(fifo / srtf, rel=0.01)
    assert figures["as_recorded"].keys() == figures["ratios"].keys()


@pytest.mark.faults
@pytest.mark.parametrize(
    ("name", "sides"),
    [("gate", {"gate", "socket"}), ("pack", {"fifo", "time_slicing", "own_lanes", "lanes"})],
)
def test_benchmarks_of_real_processes(name, sides):
    figures = _run(f"benchmarks.{name}")
    assert figures["sides"].keys() == sides
    assert figures["ratio"] in figures["ratios"].values()


@pytest.mark.ray
def test_memory_of_shared_data():
    figures = _run("benchmarks.shared_data", keys=BASE | {"sides", "ratio", "bytes", "trials"})
    assert figures["sides"].keys() == {"fluid", "stock_parameters"}
    assert figures["sides"]["fluid"]["loads"] == 1


@pytest.mark.ray
def test_processes_of_three_kinds():
    figures = _run("benchmarks.processes")
    assert figures["sides"].keys() == {"used", "forked", "plain"}
    assert len({side["best"] for side in figures["sides"].values()}) == 1
