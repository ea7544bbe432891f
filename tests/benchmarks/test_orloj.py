"""Orloj on one worker of the twin: the published columns as far as they can be reached, and the baselines."""

import pytest

from benchmarks.orloj import WANTED, WORKLOADS, Runs
from benchmarks.orloj_worker import SIDES

#: One seed instead of the five of the command.
RUNS = Runs(1, 4000)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(WANTED))
def test_columns(name: str) -> None:
    assert RUNS.shown(name, WORKLOADS[name], SIDES["orloj"]) == pytest.approx(WANTED[name], abs=0.03)
