"""Adapters turn an algorithm's own state into groups and budgets. Needs no running Ray."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.tune.experiment import Trial
from ray.tune.schedulers import (
    ASHAScheduler,
    AsyncHyperBandScheduler,
    FIFOScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.schedulers.pb2 import PB2
from ray.tune.stopper import CombinedStopper, MaximumIterationStopper, TimeoutStopper, TrialPlateauStopper

import fluidtune
from fluidtune.errors import FluidTuneError
from fluidtune.ray_compat.schedulers import stopper_iteration
from fluidtune.tune.groups import Adapter, Membership, adapter_for
from fluidtune.tune.groups.budgets import iteration_at, stop_iteration
from tests.ray_compat.algorithm_states import halve, set_population


class Like(SimpleNamespace):
    """Has the attributes of a Trial that adapters read."""

    __hash__ = object.__hash__


def trial(stop: Any = None, **last: Any) -> Any:
    return Like(stopping_criterion=stop or {}, last_result=last, trial_id="t")


def test_a_budget_in_another_unit_is_converted_at_the_rate_of_the_last_result():
    assert iteration_at(trial(), "training_iteration", 9) == 9
    assert iteration_at(trial(training_iteration=4, epochs=8), "epochs", 27) == 14
    assert iteration_at(trial(training_iteration=2, time_total_s=5.0), "time_total_s", 60) == 24
    assert iteration_at(trial(training_iteration=3, epochs=3), "epochs", 3) == 3
    assert iteration_at(trial(training_iteration=2, done={"epochs": np.int64(4)}), "done/epochs", 10) == 5.0


@pytest.mark.parametrize("counted", [None, 0, -1.0, math.nan, "many"])
def test_a_value_that_is_no_positive_number_gives_no_budget(counted: Any):
    assert iteration_at(trial(training_iteration=4, epochs=counted), "epochs", 27) is None
    assert iteration_at(trial(), "epochs", 27) is None
    assert iteration_at(trial(training_iteration=4, epochs=8), "epochs", math.inf) is None


def test_the_earliest_stop_criterion_is_the_budget_and_thresholds_are_none():
    stop = {"training_iteration": 50, "time_total_s": 30.0, "accuracy": 0.9}
    assert stop_iteration(trial(stop)) == 50
    assert stop_iteration(trial(stop, training_iteration=2, time_total_s=2.0, accuracy=0.4)) == 30
    assert stop_iteration(trial({"accuracy": 0.9}, training_iteration=2, accuracy=0.4)) is None
    assert stop_iteration(trial({"epochs": 10}, training_iteration=2, epochs=4), "epochs") == 5


def test_the_iteration_of_a_stopper_object_is_known_where_it_counts_iterations():
    assert stopper_iteration(MaximumIterationStopper(7)) == 7
    assert stopper_iteration(CombinedStopper(TimeoutStopper(5), MaximumIterationStopper(7))) == 7
    assert stopper_iteration(TrialPlateauStopper("loss")) is None


def test_every_stock_algorithm_has_its_adapter_and_any_other_is_a_stream():
    mutations: dict[str, Any] = {"lr": [0.1, 0.2]}
    pbt = PopulationBasedTraining("training_iteration", perturbation_interval=3, hyperparam_mutations=mutations)
    names = {
        type(adapter_for(base)).__name__
        for base in (
            FIFOScheduler(),
            HyperBandScheduler(),
            HyperBandForBOHB(),
            ASHAScheduler(),
            AsyncHyperBandScheduler(),
            MedianStoppingRule(),
            pbt,
        )
    }
    assert names == {"FIFOAdapter", "HyperBandAdapter", "ASHAAdapter", "MedianStoppingAdapter", "PBTAdapter"}

    class Mine(HyperBandScheduler):
        pass

    assert type(adapter_for(Mine())) is Adapter
    assert adapter_for(Mine()).membership(trial({"training_iteration": 5})) == Membership("all", False, 5)


@pytest.mark.pb2
def test_pb2_has_the_adapter_of_pbt():
    assert type(adapter_for(PB2(hyperparam_bounds={"lr": [0.1, 0.2]}))).__name__ == "PBTAdapter"


def test_the_rungs_that_follow_in_hyperband_are_known_ahead():
    base = HyperBandScheduler(max_t=9, reduction_factor=3, metric="score", mode="max")
    adapter = adapter_for(base)
    trials = [Trial("__fake", stub=True) for _ in range(17)]
    for one in trials:
        base.on_trial_add(None, one)
    # Brackets of three that are never halved, five to halve once, nine to halve twice.
    assert adapter.membership(trials[0]) == Membership("band0/bracket0/rung0", True, 9, 0)
    assert adapter.membership(trials[3]) == Membership("band0/bracket1/rung1", True, 3, 6, ((2, 6),))
    assert adapter.membership(trials[8]) == Membership("band0/bracket2/rung2", True, 1, 8, ((3, 2), (1, 6)))
    kept = halve(base, 2, trials[8:])
    assert adapter.membership(kept[0]).rungs == ((1, 6),)
    in_seconds = HyperBandScheduler(time_attr="time_total_s", max_t=9, metric="score", mode="max")
    in_seconds.on_trial_add(None, trials[0])
    assert adapter_for(in_seconds).membership(trials[0]).rungs == (), "it is not known how many iterations a second has"


class Controller:
    """As Tune's controller for `HyperBandScheduler`: carries out what it decides, and calls it for each trial's end."""

    def __init__(self, base: Any, trials: list[Trial]) -> None:
        self.base = base
        for trial in trials:
            base.on_trial_add(self, trial)
            trial.set_status(Trial.RUNNING)

    def stop_trial(self, trial: Trial) -> None:
        self.base.on_trial_remove(self, trial)
        trial.set_status(Trial.TERMINATED)

    def report(self, trial: Trial, iteration: int, score: float) -> str:
        """Give the scheduler a result of the trial. A trial that is to be paused keeps saving, see `saved`."""
        trial.set_status(Trial.RUNNING)
        decision = self.base.on_trial_result(self, trial, {"training_iteration": iteration, "score": score})
        if decision == TrialScheduler.STOP:
            self.stop_trial(trial)
        return decision

    def saved(self, trial: Trial) -> None:
        trial.set_status(Trial.PAUSED)


def test_a_bracket_that_stock_hyperband_would_wait_for_for_ever_is_halved():
    # Seen: two trials stayed paused after the third one had failed: Tune's loop turned without end, on a whole core.
    base = HyperBandScheduler(max_t=9, reduction_factor=3, metric="score", mode="max")
    trials = [Trial("__fake", stub=True) for _ in range(17)]
    tune, last = Controller(base, trials), trials[8:]
    for score, one in enumerate(last):
        if tune.report(one, 1, score) == TrialScheduler.PAUSE:
            tune.saved(one)
    third, second, first = reversed(last[-3:])
    for one in (first, second):
        assert tune.report(one, 3, 1.0 if one is first else 2.0) == TrialScheduler.PAUSE
        tune.saved(one)
    for one in trials[:8]:
        one.set_status(Trial.TERMINATED)
    third.set_status(Trial.ERROR)
    base.on_trial_error(tune, third)
    assert base.choose_trial_to_run(tune) is None, "Ray has mended it"
    adapter_for(base).catch_up(tune)
    assert base.choose_trial_to_run(tune) is second and first.status == Trial.TERMINATED
    # One halving was missed, not two.
    adapter_for(base).catch_up(tune)
    assert base.choose_trial_to_run(tune) is second


def test_a_trial_that_stock_hyperband_leaves_paused_at_its_bracket_s_end_is_stopped():
    # Seen: a HyperBand job never ended.
    base = HyperBandScheduler(max_t=9, reduction_factor=3, metric="score", mode="max")
    first, last = trials = [Trial("__fake", stub=True) for _ in range(2)]
    tune = Controller(base, trials)
    assert tune.report(first, 9, 1.0) == TrialScheduler.PAUSE
    assert tune.report(last, 9, 2.0) == TrialScheduler.STOP
    tune.saved(first)
    assert base.choose_trial_to_run(tune) is None, "Ray has mended it"
    assert adapter_for(base).overlooked() == [first]


def population(synch: bool, due: float, trained: dict[Any, float]) -> Adapter:
    base = PopulationBasedTraining(
        "training_iteration", perturbation_interval=3, hyperparam_mutations={"lr": [1]}, synch=synch
    )
    set_population(base, due, trained)
    return adapter_for(base)


def test_synchronous_pbt_has_a_group_for_each_interval():
    def member(due: float) -> Membership:
        return population(True, due, dict.fromkeys("abcd", 0)).membership(trial({"training_iteration": 10}))

    assert member(3) == Membership("interval1", True, 3, rungs=((4, 7),))
    assert member(6) == Membership("interval2", True, 6, rungs=((4, 4),))
    assert member(12) == Membership("interval4", True, 10)


def test_the_trials_of_an_asynchronous_population_go_on_in_turn():
    adapter = population(False, 3, dict.fromkeys("abcd", 0))
    assert adapter.membership(trial({"training_iteration": 10})) == Membership("population", True, 10, turn=0)


def test_after_a_perturbation_the_whole_population_is_promoted_at_once():
    def promoted(synch: bool) -> list[int]:
        statuses = ("PAUSED", "PAUSED", "PAUSED", "RUNNING", "TERMINATED")
        trials = [Like(number=number, status=status) for number, status in enumerate(statuses)]
        adapter = population(synch, 6, dict(zip(trials, (3, 3, 6, 3, 3), strict=True)))
        return [one.number for one in adapter.promoted()]

    # The third trial has reached the next perturbation; it waits for the others.
    assert promoted(True) == [0, 1]
    assert promoted(False) == [0, 1, 2], "the engine orders them"


def test_asha_s_budget_in_another_unit_and_with_a_stop_criterion():
    adapter = adapter_for(ASHAScheduler(time_attr="epochs", max_t=40))
    assert adapter.membership(trial()) == Membership("stream", False, None)
    assert adapter.membership(trial(training_iteration=2, epochs=4)).target == 20
    assert adapter.membership(trial({"training_iteration": 9}, training_iteration=2, epochs=4)).target == 9


def test_the_author_of_an_algorithm_announces_its_groups():
    class Mine(TrialScheduler):
        pass

    one, two = (Trial("__fake", stub=True, stopping_criterion={"training_iteration": 7}) for _ in range(2))
    adapter = adapter_for(Mine())
    fluidtune.announce("generation0", [one], until=4, tail=2)
    assert adapter.membership(one) == Membership("generation0", True, 4, 2, ((1, 2),))
    assert adapter.membership(two) == Membership("all", False, 7)
    fluidtune.announce("generation1", [one, two], until=9, synchronous=False)
    assert adapter.membership(one) == adapter.membership(two) == Membership("generation1", False, 7)


@pytest.mark.parametrize("wrong", [{"until": -1}, {"until": math.nan}, {"tail": "long"}])
def test_an_impossible_announcement_is_refused(wrong: dict[str, Any]):
    with pytest.raises(FluidTuneError, match="is not a number of iterations"):
        fluidtune.announce("g", [], **wrong)
    with pytest.raises(FluidTuneError, match="is not a"):
        fluidtune.announce("g", ["trial"])  # type: ignore[list-item]
