"""Salus' benchmarks: the policies on the virtual clock, by hand and on traces, and the script for a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.common import ROOT
from benchmarks.lanes import gains, run
from benchmarks.salus_trace import generated, trace

CSV = """job,runtime_s,peak_memory_mb,iterations
net_25_1min,60,2000,600
net_25_5min,300,2000,3000
big_1min,66,12000,60
"""


def test_the_policies_on_a_hundred_jobs():
    found = gains(run(trace(generated(1), 1, coarse_s=10.0)))
    assert found["mean_jct"] >= 3
    assert found["makespan"] >= 1


def test_without_a_gpu_the_script_says_so():
    command = [sys.executable, "-m", "benchmarks.gpu.salus", "--quick", "--only", "overhead"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 or "no GPU here" in done.stderr


@pytest.mark.slow
def test_the_script_for_a_gpu_needs_no_ray_and_can_be_rehearsed():
    # The machine with the GPU has no Ray.
    script = """
import sys
sys.modules["ray"] = None
sys.argv = ["salus", "--rehearse", "--json", "--only", "overhead"]
from benchmarks.gpu import salus
salus.main()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout)
    assert figures["rehearsal"] and figures["overhead"].keys() == {"gate", "worker", "worker_mean"}
