"""Adapters: how an algorithm's own state becomes groups and budgets. No Ray runs here."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.experiment import Trial
from ray.tune.schedulers import (
    ASHAScheduler,
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
from fluidtune.tune.groups import Adapter, Membership, adapter_for
from fluidtune.tune.groups.budgets import iteration_at, stop_iteration, stopper_iteration
from tests.ray_compat.algorithm_states import halve, set_population


class Like(SimpleNamespace):
    """What adapters read of a Trial."""

    __hash__ = object.__hash__


def trial(stop: Any = None, **last: Any) -> Any:
    return Like(stopping_criterion=stop or {}, last_result=last, trial_id="t")


def test_a_budget_in_another_unit_is_read_off_what_the_trial_did():
    assert iteration_at(trial(), "training_iteration", 9) == 9
    assert iteration_at(trial(training_iteration=4, epochs=8), "epochs", 27) == 14
    assert iteration_at(trial(training_iteration=2, time_total_s=5.0), "time_total_s", 60) == 24
    assert iteration_at(trial(training_iteration=3, epochs=3), "epochs", 3) == 3


@pytest.mark.parametrize("counted", [None, 0, -1.0, math.nan, "many"])
def test_what_cannot_be_counted_is_unknown(counted: Any):
    assert iteration_at(trial(training_iteration=4, epochs=counted), "epochs", 27) is None
    assert iteration_at(trial(), "epochs", 27) is None
    assert iteration_at(trial(training_iteration=4, epochs=8), "epochs", math.inf) is None


def test_the_first_of_several_stop_criteria_counts_and_thresholds_do_not():
    stop = {"training_iteration": 50, "time_total_s": 30.0, "accuracy": 0.9}
    assert stop_iteration(trial(stop)) == 50
    assert stop_iteration(trial(stop, training_iteration=2, time_total_s=2.0, accuracy=0.4)) == 30
    assert stop_iteration(trial({"accuracy": 0.9}, training_iteration=2, accuracy=0.4)) is None
    assert stop_iteration(trial({"epochs": 10}, training_iteration=2, epochs=4), "epochs") == 5


def test_stopper_objects_say_what_they_know():
    assert stopper_iteration(MaximumIterationStopper(7)) == 7
    assert stopper_iteration(CombinedStopper(TimeoutStopper(5), MaximumIterationStopper(7))) == 7
    assert stopper_iteration(TrialPlateauStopper("loss")) is None


def test_every_algorithm_has_its_adapter_and_a_stranger_is_a_stream():
    mutations: dict[str, Any] = {"lr": [0.1, 0.2]}
    pbt = PopulationBasedTraining("training_iteration", perturbation_interval=3, hyperparam_mutations=mutations)
    names = {
        type(adapter_for(base)).__name__
        for base in (
            FIFOScheduler(),
            HyperBandScheduler(),
            HyperBandForBOHB(),
            ASHAScheduler(),
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
def test_pb2_is_a_pbt():
    assert type(adapter_for(PB2(hyperparam_bounds={"lr": [0.1, 0.2]}))).__name__ == "PBTAdapter"


def test_hyperband_s_rungs_are_known_ahead():
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
    assert adapter_for(in_seconds).membership(trials[0]).rungs == (), "nobody knows how many iterations a second is"


def test_pbt_is_a_group_an_interval_when_it_is_synchronous():
    def member(synch: bool, after: float = 3) -> Membership:
        base = PopulationBasedTraining(
            "training_iteration", perturbation_interval=3, hyperparam_mutations={"lr": [1]}, synch=synch
        )
        set_population(base, after, dict.fromkeys("abcd", 0))
        return adapter_for(base).membership(trial({"training_iteration": 10}))

    assert member(True) == Membership("interval1", True, 3, rungs=((4, 7),))
    assert member(True, 6) == Membership("interval2", True, 6, rungs=((4, 4),))
    assert member(True, 12) == Membership("interval4", True, 10)
    assert member(False) == Membership("population", True, 10)


def test_after_a_perturbation_the_whole_population_goes_on_at_once():
    def promoted(synch: bool) -> list[int]:
        base = PopulationBasedTraining(
            "training_iteration", perturbation_interval=3, hyperparam_mutations={"lr": [1]}, synch=synch
        )
        statuses = ("PAUSED", "PAUSED", "PAUSED", "RUNNING", "TERMINATED")
        trials = [Like(number=number, status=status) for number, status in enumerate(statuses)]
        set_population(base, 6, dict(zip(trials, (3, 3, 6, 3, 3), strict=True)))
        return [one.number for one in adapter_for(base).promoted()]

    # The third waits for the others, which are not there yet.
    assert promoted(True) == [0, 1]
    assert promoted(False) == []


def test_asha_in_another_unit_and_with_a_stop_criterion():
    adapter = adapter_for(ASHAScheduler(time_attr="epochs", max_t=40))
    assert adapter.membership(trial()) == Membership("stream", False, None)
    assert adapter.membership(trial(training_iteration=2, epochs=4)).target == 20
    assert adapter.membership(trial({"training_iteration": 9}, training_iteration=2, epochs=4)).target == 9


def test_an_author_announces_groups_of_his_own():
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
def test_an_announcement_that_cannot_be_is_refused(wrong: dict[str, Any]):
    with pytest.raises(FluidTuneError, match="is not a number of iterations"):
        fluidtune.announce("g", [], **wrong)
    with pytest.raises(FluidTuneError, match="is not a"):
        fluidtune.announce("g", ["trial"])  # type: ignore[list-item]
