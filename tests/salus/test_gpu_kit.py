"""What `benchmarks.gpu` asks of a GPU: how much, and what counts as held. Its page: tests/benchmarks/test_gpu.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import Outcome, judge_salus
from benchmarks.gpu.probes import PROBES
from benchmarks.gpu.salus import Plan, latencies
from salus_share.gate import Gate

pytestmark = pytest.mark.slow


def held(part: str, figures: dict) -> bool | None:
    (claim,) = judge_salus(Outcome(0, 1.0, "", {"rehearsal": False, part: figures}))
    return claim.held


@pytest.mark.parametrize(
    ("admitted", "out_of_memory", "well"),
    [(1000, 0, True), (1000, 1, False), (400, 0, None), (400, 1, False), (0, 0, False)],
)
def test_a_thousand_admissions_are_asked_for(admitted: int, out_of_memory: int, well: bool | None) -> None:
    assert held("admissions", {"admitted": admitted, "out_of_memory": out_of_memory}) is well


@pytest.mark.parametrize(("models", "requests", "well"), [(42, 100, True), (41, 100, False), (42, 0, False)])
def test_models_are_counted(models: int, requests: int, well: bool) -> None:
    assert held("resident", {"models": models, "requests": requests, "milliseconds": 1.0}) is well


def test_models_that_were_admitted_are_counted_when_their_requests_begin(monkeypatch) -> None:
    found: list[int] = []

    def resident(begin, directory, seconds, device):
        gates = [Gate(Path(directory), str(at), "PACK") for at in range(3)]
        gates[2].leave()
        begin()
        for gate in gates[:2]:
            gate.leave()
        return [0.1, 0.2]

    def together(work, rows):
        found.append(work(lambda: None, *rows[0]) if work.__name__ == "counted" else [0.1, 0.2])
        return 0.0, found[-1:]

    monkeypatch.setattr("benchmarks.gpu.salus.resident", resident)
    monkeypatch.setattr("benchmarks.gpu.salus.together", together)
    assert latencies(Plan("cpu", 100, 2, True))["models"] == 2


RIGHT = {
    "context": {"by_process_mb": None, "by_gpu_mb": 500, "taken_for_mb": 600},
    "unload": {"left_behind": None, "benchmark": False, "allocated": 0, "reserved": 1 << 20},
    "pair": {"ends": ["DistBackendError: NCCL error: Duplicate GPU detected"] * 2},
    "visible": {"nvml": "GPU-ab", "by_uuid": ["1", "ab"], "by_number": ["1", "ab"]},
    "full": {"cublas": "known", "cudnn": "worked"},
    "loader": {"sum": 523776.0},
    "clock": {"launched_s": 0.1, "done_s": 1.0},
    "mps_killed": {"had": True, "beside": {"mean_times_2048": 1.0}, "after": ["computes", {"mean_times_2048": 1.0}]},
}
WRONG = {
    "context": {"by_process_mb": 700},
    "unload": {"allocated": 1 << 30},
    "pair": {"ends": ["DistBackendError: NCCL error: Duplicate GPU detected", "no answer in 20 s"]},
    "visible": {"by_number": ["1", "cd"]},
    "full": {"cudnn": "RuntimeError: odd"},
    "loader": {"sum": 0.0},
    "clock": {"launched_s": 1.0},
    "mps_killed": {"beside": {"raised": "CUDA error", "fault": True}},
}


@pytest.mark.parametrize("name", PROBES)
def test_what_counts_as_the_expected_answer(name: str) -> None:
    right = PROBES[name].right
    assert right(RIGHT[name]) is True and right(RIGHT[name] | WRONG[name]) is False
