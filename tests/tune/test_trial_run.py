"""What the driver counts of a trial: its workers' deaths, and the results that Tune has seen. No Ray runs here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fluidtune.trials import TrialLife
from fluidtune.trials.losses import MAX_DEATHS, MAX_MISSES
from fluidtune.tune.trial_run import TrialRun, results_seen
from fluidtune.tune.trial_surroundings import TrialSurroundings


@pytest.fixture
def run() -> TrialRun:
    return run_of(new_trial())


def new_trial() -> SimpleNamespace:
    nothing = {"last_result": None, "num_failures": 0, "latest_checkpoint_result": None}
    return SimpleNamespace(trial_id="a", run_metadata=SimpleNamespace(), **nothing)


def run_of(trial: SimpleNamespace) -> TrialRun:
    surroundings = TrialSurroundings(None, trial)  # type: ignore[arg-type]
    life = TrialLife("a", surroundings, False, "plain", results_seen(trial))  # type: ignore[arg-type]
    return TrialRun(tracked=None, trial=trial, kwargs={}, trainable_ref=None, life=life)  # type: ignore[arg-type]


def test_a_trial_whose_workers_die_and_die_is_to_blame(run: TrialRun) -> None:
    losses = run.life.losses
    assert [losses.count_death(started=True, device_there=True) for _ in range(MAX_DEATHS)] == [False, False, True]


@pytest.mark.parametrize(("started", "device_there"), [(True, False), (False, True), (False, False)])
def test_a_node_that_dies_again_and_again_is_not_the_trials_fault(
    run: TrialRun, started: bool, device_there: bool
) -> None:
    too_often = [run.life.losses.count_death(started=started, device_there=device_there) for _ in range(MAX_MISSES)]
    assert too_often == [False] * (MAX_MISSES - 1) + [True]


def hear(trial: SimpleNamespace, run: TrialRun, iteration: int, number: int) -> None:
    """Tune hears a result."""
    progress = run.life.seen.note_result(iteration, number)
    trial.last_result = {"training_iteration": number}
    run.keep_progress(progress)


def test_results_are_counted_whatever_number_the_user_gives_them() -> None:
    trial = new_trial()
    first = run_of(trial)
    for iteration in (1, 2, 3):
        hear(trial, first, iteration, 100 * iteration)
    resumed = run_of(trial)
    seen = resumed.life.seen
    assert (seen.delivered, seen.results, seen.number) == (3, 3, 300)
    assert seen.own_numbers and not seen.retried
    assert resumed.iterations_to(1000.0) == 7
    trial.latest_checkpoint_result = SimpleNamespace(metrics={"training_iteration": 300})
    assert resumed.life.at_own_checkpoint()


def test_a_result_that_tune_has_not_heard_is_not_kept() -> None:
    """Tune may save the experiment in between, and the driver may die then."""
    trial = new_trial()
    run = run_of(trial)
    hear(trial, run, 1, 1)
    run.life.seen.note_result(2, 2)
    assert run_of(trial).life.seen.delivered == 1


def test_a_failure_makes_the_next_run_a_retry_until_it_reports() -> None:
    trial = new_trial()
    hear(trial, run_of(trial), 1, 1)
    trial.num_failures = 1
    retry = run_of(trial)
    assert retry.life.seen.retried and retry.iterations_to(5.0) == 5
    hear(trial, retry, 1, 1)
    assert not retry.life.seen.retried and not run_of(trial).life.seen.retried
    assert run_of(trial).life.seen.results == 2


def test_an_experiment_that_stock_tune_began_is_counted_by_its_last_result() -> None:
    trial = new_trial()
    trial.last_result = {"training_iteration": 4}
    seen = run_of(trial).life.seen
    assert (seen.delivered, seen.results, seen.retried, seen.own_numbers) == (4, 4, False, False)
