"""What `benchmarks.gpu` asks of a GPU, and which answers count as expected. Its page: tests/benchmarks/test_gpu.py."""

from __future__ import annotations

import pytest

from benchmarks.gpu.probes import PROBES

pytestmark = pytest.mark.slow


RIGHT = {
    "context": {"by_process_mb": None, "by_gpu_mb": 500, "taken_for_mb": 600},
    "unload": {"left_behind": None, "benchmark": False, "allocated": 0, "reserved": 1 << 20},
    "pair": {"ends": ["DistBackendError: NCCL error: Duplicate GPU detected"] * 2},
    "visible": {"nvml": "GPU-ab", "by_uuid": ["1", "ab"], "by_number": ["1", "ab"]},
    "full": {"cublas": "known", "cudnn": "worked"},
    "loader": {"sum": 523776.0},
    "clock": {"launched_s": 0.1, "done_s": 1.0},
    "divided": {"divided_calls": 1, "loss_apart": 0.0},
    "lost_context": {"before": None, "after": "CUDA error"},
    "ray_parts": {"of_4": 4, "of_6": 6, "of_7": 7, "without_a_gpu": ["", 0]},
    "mps_memory": {"had": True, "nvml_mb": [500, 500], "became": [{"mean_times_2048": 1.0}] * 2},
    "mps_fault": {"had": True, "became": [{"fault": True}] * 2, "after": ["computes", {"mean_times_2048": 1.0}]},
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
    "divided": {"divided_calls": 0},
    "lost_context": {"before": "CUDA error"},
    "ray_parts": {"of_6": 5},
    "mps_memory": {"nvml_mb": [500, None]},
    "mps_fault": {"became": [{"fault": True}, {"mean_times_2048": 1.0}]},
    "mps_killed": {"beside": {"raised": "CUDA error", "fault": True}},
}


@pytest.mark.parametrize("name", PROBES)
def test_what_counts_as_the_expected_answer(name: str) -> None:
    right = PROBES[name].right
    assert right(RIGHT[name]) is True and right(RIGHT[name] | WRONG[name]) is False
