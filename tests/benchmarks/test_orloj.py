"""Orloj on one worker of the twin: the published columns as far as they can be reached, and the baselines."""

import pytest

from benchmarks.orloj import WANTED, WORKLOADS, Runs
from benchmarks.orloj_cases import load, modal
from benchmarks.orloj_worker import SIDES

#: One seed instead of the five of the command.
RUNS = Runs(1, 4000)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(WANTED))
def test_columns(name: str) -> None:
    assert RUNS.shown(name, WORKLOADS[name], SIDES["orloj"]) == pytest.approx(WANTED[name], abs=0.03)


def rate(side: str, multiple: float) -> float:
    case = modal(2)
    return SIDES[side](case, load(case, multiple, 1, 4000), case.profile(1)).run().good / 4000


@pytest.mark.slow
def test_no_sound_baseline_is_ahead_where_the_slo_is_tight() -> None:
    ours = rate("orloj", 1.5)
    for other in ("edf", "fifo", "window", "nexus", "clipper", "clockwork", "clockwork_1"):
        assert ours > rate(other, 1.5), other
