"""How many deaths of its workers a trial survives. No Ray runs here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fluidtune.tune.trial_run import MAX_DEATHS, MAX_MISSES, TrialRun


@pytest.fixture
def run() -> TrialRun:
    trial = SimpleNamespace(last_result=None, trial_id="a")
    return TrialRun(ticket=None, trial=trial, kwargs={}, trainable_ref=None)  # type: ignore[arg-type]


def test_a_trial_whose_workers_die_and_die_is_to_blame(run: TrialRun) -> None:
    assert [run.count_death(started=True, device_there=True) for _ in range(MAX_DEATHS)] == [False, False, True]


@pytest.mark.parametrize(("started", "device_there"), [(True, False), (False, True), (False, False)])
def test_a_node_that_dies_again_and_again_is_not_the_trials_fault(
    run: TrialRun, started: bool, device_there: bool
) -> None:
    too_often = [run.count_death(started=started, device_there=device_there) for _ in range(MAX_MISSES)]
    assert too_often == [False] * (MAX_MISSES - 1) + [True]
