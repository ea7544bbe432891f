"""`benchmarks.fused`: the command, what it concludes, and its packed processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks import fused
from benchmarks.common import ROOT
from benchmarks.fused import MODELS, Packed, Run, Work, best_packing, in_threads, loop, options_of, packed, summary

SIDES = {"fused", "alone", "threads", "packed"}
WORK = Work("perceptron", 2)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_the_command() -> None:
    command = [sys.executable, "-m", "benchmarks.fused", "--quick", "--json", "--model", "perceptron", "convolution"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("\n") == 1
    figures = json.loads(done.stdout)
    assert (figures["benchmark"], figures["kind"], figures["devices"]) == ("fused", "real", f"cpu:{os.cpu_count()}")
    assert figures["sides"].keys() == SIDES and figures["ratios"].keys() == SIDES - {"fused"}
    assert figures["ratio"] == min(figures["ratios"].values()) > 0
    assert figures["reasons"] == {"perceptron": [], "convolution": []}
    for rows in figures["models"].values():
        assert rows.keys() == {"1", "8"}
        for row in rows.values():
            assert all(row[name] > 0 and row[f"{name}_wall"] > 0 for name in SIDES)
            assert row["worst_difference"] < 1e-4
    assert figures["best_packing"]["convolution"]["trials"] == 8


def test_cuda_is_refused_in_one_line_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["fused", "--device", "cuda", "--quick"])
    with pytest.raises(SystemExit, match="no CUDA device here") as refused:
        fused.main()
    assert "\n" not in str(refused.value)


def test_what_is_run() -> None:
    full, quick = options_of([]), options_of(["--quick"])
    assert (full.device, list(full.counts), full.iterations, full.model) == (
        "cpu",
        [1, 2, 4, 8, 16, 32],
        100,
        list(MODELS),
    )
    assert (list(quick.counts), quick.iterations) == ([1, 8], 10)
    few = options_of(["--quick", "--counts", "1", "16", "--iterations", "7"])
    assert (few.counts, few.iterations) == ([1, 16], 7)


def test_the_best_packing() -> None:
    rows = {
        "1": {"fused_wall": 10.0, "packed_wall": 20.0},
        "6": {"fused_wall": 30.0, "packed_wall": 99.0},
        "8": {"fused_wall": 40.0, "packed_wall": 50.0},
        "16": {"fused_wall": 150.0, "packed_wall": 40.0},
    }
    assert best_packing(rows) == {"trials": 16, "fused": 150.0, "packed": 50.0, "at_a_time": 8, "ratio": 3.0}


def test_the_ratios_are_the_smallest_ones() -> None:
    row = {name: 5.0 for side in SIDES for name in (side, f"{side}_wall")}
    first = row | {"ratio": 2.0, "threads_ratio": 1.0, "packed_ratio": 3.0, "alone": 4.0}
    second = row | {"ratio": 1.5, "threads_ratio": 1.25, "packed_ratio": 4.0}
    found = summary({"a": {"1": first}, "b": {"1": second}})
    assert found["ratios"] == {"alone": 1.5, "threads": 1.0, "packed": 3.0} and found["ratio"] == 1.0
    assert found["sides"]["alone"] == {"slowest": 4.0} and found["models"]["a"]["1"] is first


def test_threads_train_all() -> None:
    assert len(in_threads(WORK, 3).losses) == 3


@pytest.mark.slow
def test_packed_processes_train_one_trial_each_as_often_as_they_are_asked() -> None:
    alone = [loop(WORK, number) for number in range(2)]
    with packed(2, "cpu") as (processes, why):
        assert why == "on cores"
        for _ in range(2):
            run: Run = processes.run(WORK, 2)
            assert run.losses == pytest.approx(alone, rel=1e-5) and run.clock > 0 and run.computed > 0
        assert processes.run(WORK, 1).losses == pytest.approx(alone[:1], rel=1e-5)
        with pytest.raises(KeyError, match="none"):
            processes.run(Work("none", 2), 1)


@pytest.mark.slow
def test_a_process_is_missed_when_it_ends() -> None:
    processes = Packed(1, {"CUDA_MPS_PIPE_DIRECTORY": "/nowhere"})
    try:
        assert processes.run(WORK, 1).losses == pytest.approx([loop(WORK, 0)], rel=1e-5)
        processes.processes[0].kill()
        with pytest.raises(RuntimeError, match="has ended"):
            processes.run(WORK, 1)
    finally:
        processes.end()
