"""Salus' benchmarks: the policies on traces, the traces themselves, and the script for a GPU."""

import json
import subprocess
import sys
from concurrent.futures import Future
from statistics import mean
from threading import Semaphore

import pytest

from benchmarks.common import ROOT
from benchmarks.lanes import fair_shares, gains, run
from benchmarks.salus_jobs import all_ready, together
from benchmarks.salus_trace import CAPACITY, as_recorded, generated, recorded, trace

CSV = """job,runtime_s,peak_memory_mb,iterations
net_25_1min,60,2000,600
net_25_5min,300,2000,3000
big_1min,66,12000,60
"""


def test_the_policies_on_a_hundred_jobs():
    found = gains(run(trace(generated(1), 1, coarse_s=10.0)))
    assert found["mean_jct"] >= 3
    assert found["makespan"] >= 1


def test_three_equal_jobs_get_equal_shares_of_a_constant_total():
    for span in fair_shares():
        assert span == pytest.approx([1 / len(span)] * len(span), rel=0.05)


def test_traces_are_seeded_and_have_the_published_work(tmp_path):
    assert trace(generated(1), 1) == trace(generated(1), 1) != trace(generated(1), 2)
    jobs = trace(generated(3), 3)
    assert sum(job.alone for job in jobs) / 60 == pytest.approx(303.4, rel=0.02)
    assert all(job.need.persistent + job.need.ephemeral <= CAPACITY for job in jobs)
    path = tmp_path / "jobs.csv"
    path.write_text(CSV)
    assert {kind.name: round(kind.seconds, 3) for kind in recorded(path)} == {"net_25": 0.1, "big": 1.1}
    assert sorted(round(job.alone) for job in as_recorded(path, 1)) == [60, 66, 300]
    assert mean(job.arrival for job in as_recorded(path, 1)) > 0
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="expected job"):
        recorded(path)


def fails_early(begin):
    raise ZeroDivisionError("before it could begin")


def test_an_error_before_the_start_is_raised():
    with pytest.raises(ZeroDivisionError, match="could begin"):
        together(fails_early, [()])
    failed, waits = Future(), Future()
    failed.set_exception(MemoryError())
    with pytest.raises(MemoryError):
        all_ready(Semaphore(1), [waits, failed])


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
