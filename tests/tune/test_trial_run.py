"""What the driver keeps of its trials: what Tune has seen of each, and how many are pending. No Ray runs here."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from fluidtune.trials import TrialStateMachine
from fluidtune.trials.messages import Outside
from fluidtune.tune.trial_run import RunTable, keep_number, keep_progress, newest_checkpoint, results_seen
from tests.tune.tried_manager import tunes_trial


def life_of(trial: SimpleNamespace) -> TrialStateMachine:
    newest = partial(newest_checkpoint, trial)  # type: ignore[arg-type]
    outside = Outside(False, True, False, False, newest, lambda leader, devices: False, lambda: False)
    return TrialStateMachine("a", outside, "plain", results_seen(trial))  # type: ignore[arg-type]


def hear(trial: SimpleNamespace, life: TrialStateMachine, iteration: int, number: int) -> None:
    """Tune hears a result."""
    progress = life.seen.note_result(iteration, number)
    trial.last_result = {"training_iteration": number}
    keep_progress(trial, progress)  # type: ignore[arg-type]


def test_results_are_counted_whatever_number_the_user_gives_them() -> None:
    trial = tunes_trial()
    first = life_of(trial)
    for iteration in (1, 2, 3):
        hear(trial, first, iteration, 100 * iteration)
    resumed = life_of(trial)
    seen = resumed.seen
    assert (seen.delivered, seen.results, seen.number) == (3, 3, 300)
    assert seen.own_numbers and not seen.retried
    assert resumed.iterations_to(1000.0) == 7
    trial.latest_checkpoint_result = SimpleNamespace(metrics={"training_iteration": 300})
    assert resumed.at_own_checkpoint()


def test_a_failure_makes_the_next_run_a_retry_until_it_reports() -> None:
    trial = tunes_trial(last_result={"training_iteration": 4})
    seen = life_of(trial).seen
    assert (seen.delivered, seen.results, seen.own_numbers) == (4, 4, False), "stock Tune began it"
    hear(trial, life_of(trial), 5, 5)
    trial.num_failures = 1
    retry = life_of(trial)
    assert retry.seen.retried and retry.iterations_to(7.0) == 7
    hear(trial, retry, 1, 1)
    seen = life_of(trial).seen
    assert (seen.delivered, seen.results, seen.retried) == (1, 6, False)


def test_a_result_that_tune_has_not_heard_is_not_kept() -> None:
    """Tune may save the experiment in between, and the driver may die then."""
    trial = tunes_trial()
    life = life_of(trial)
    hear(trial, life, 1, 1)
    life.seen.note_result(2, 2)
    assert life_of(trial).seen.delivered == 1


@pytest.mark.parametrize(
    ("counted", "path", "then"),
    [
        (2, "/x/t/checkpoint_000003", 2),  # Tune counts one more when it registers it
        (2, "/x/t/checkpoint_000005", 4),
        (7, "/x/t/checkpoint_000005", 7),
        (2, "s3://b/t/cloned_checkpoint", 2),
    ],
)
def test_tune_counts_on_from_the_number_of_a_checkpoint(counted: int, path: str, then: int) -> None:
    """A later process would write over it. Seen: the last results of a restored trial were missing."""
    trial = SimpleNamespace(storage=SimpleNamespace(current_checkpoint_index=counted))
    keep_number(trial, SimpleNamespace(checkpoint=SimpleNamespace(path=path)))  # type: ignore[arg-type]
    assert trial.storage.current_checkpoint_index == then


@pytest.mark.parametrize("seed", range(20))
def test_pending_trials_are_counted_without_looking_at_those_that_wait(seed: int) -> None:
    # Tune asks for the number before each trial that it adds, and before each step
    draw = random.Random(seed)
    table = RunTable()
    runs: list[Any] = []
    for step in range(300):
        what = draw.randrange(5)
        run = draw.choice(runs) if runs else None
        if what < 2 or run is None:
            life = SimpleNamespace(place="queued", seen=SimpleNamespace(delivered=draw.choice([0, 3])))
            run = SimpleNamespace(tracked=object(), id=str(step), life=life)
            runs.append(run)
            table.add_run(run)
        elif what == 2:
            table.begin_run(run)
        elif what == 3 and run in table.begun():
            run.life.place = "queued" if run.life.place == "live" else "live"
            run.life.seen.delivered += draw.randrange(2)
        elif what == 4 and draw.random() < 0.3:
            runs.remove(run)
            for _ in range(draw.randint(1, 2)):  # a trial that failed is also let go of by Tune
                table.drop_run(run)
        assert list(table.values()) == runs == list(table.by_trial.values())
        lives = [run.life for run in runs]
        assert table.count_pending() == sum(not one.seen.delivered and one.place != "live" for one in lives)
    assert len(table.begun()) < len(runs)
