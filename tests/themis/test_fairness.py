"""Finish-time fairness: the paper's example, and properties that hold for any app."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shared_cluster.ideal import phase_time
from themis_bridge import JobInfo, ThemisError, independent_finish_time
from themis_bridge.fairness import halving_phases, kinds_of
from themis_bridge.locality import Gpu, Phase, Slowdowns

RUNNING = [JobInfo(8, seconds, 8) for seconds in (80, 100, 100, 120)]
PHASES = halving_phases(RUNNING, [(2, 16), (1, 36)])


def test_table_3():
    independent = independent_finish_time(10_000, 16, 4 * 8, 4)
    assert independent == 2500
    times = [sum(phase_time(jobs, gpus) for jobs in PHASES) for gpus in (1, 2, 4, 8, 16)]
    assert [seconds / independent for seconds in times] == [4, 2, 1, 0.5, 0.34]


def test_single_job_is_equation_1():
    assert Phase(kinds_of([JobInfo(10, 6, 4)])).time([2, 2], 1.1) == pytest.approx(60 * 1.1 / 4)
    # Three apps share eight GPUs. One that can use four has less than it can use; one that can use two has all of it.
    assert independent_finish_time(100, 8, 4, 3) == pytest.approx(100 / (8 / 3))
    assert independent_finish_time(100, 8, 2, 3) == 100 / 2
    # Eq. 1, where the share is the smaller: T_cluster * N_avg.
    assert independent_finish_time(100, 8, 8, 3) == pytest.approx(100 / 8 * 3)


@pytest.mark.parametrize(
    "call",
    [
        lambda: JobInfo(1, math.nan),
        lambda: independent_finish_time(1, 1, 1, 0.5),
        lambda: halving_phases([], []),
    ],
)
def test_impossible_numbers_are_refused(call):
    with pytest.raises(ThemisError, match=r"expected|without"):
        call()


# --- placement


def test_guesses_give_way_to_measurements():
    slow = Slowdowns()
    assert slow.across == (1.1, 1.3)
    slow.measured([Gpu("0", "m"), Gpu("1", "n")], 0.9)
    assert slow.across == (1.8, 1.8), "what lies further apart is never better"
    slow.measured([Gpu("0", "m"), Gpu("1", "n", "other")], 1.5)
    assert slow.across == (1.8, 3.0)


JOBS = st.builds(JobInfo, st.integers(1, 50), st.sampled_from([0.5, 1.0, 7.0]), st.integers(1, 8))


@given(st.lists(JOBS, min_size=1, max_size=5), st.lists(st.integers(1, 8), min_size=1, max_size=6), st.integers(0, 5))
def test_another_gpu_never_hurts(jobs, counts, place):
    phase = Phase(kinds_of(jobs))
    more = list(counts)
    more[place % len(more)] += 1
    assert phase.time(more, 1.3) <= phase.time(counts, 1.3) * (1 + 1e-12)
    assert phase.time([*counts, 1], 1.3) <= phase.time(counts, 1.3) * (1 + 1e-12)
    assert phase.time(counts, 1.3) <= phase.time([], 1.3)
    assert phase.time(counts, 1.3) >= phase_time(jobs, sum(counts)) * (1 - 1e-12)
