"""Tune's algorithms and stoppers keep their state where we read it. Needs no running Ray."""

from __future__ import annotations

import inspect
from pathlib import Path

from ray.tune.experiment import Trial
from ray.tune.schedulers import (
    ASHAScheduler,
    AsyncHyperBandScheduler,
    FIFOScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
)

from fluidtune.ray_compat import schedulers
from tests.ray_compat.algorithm_states import halve


def pbt(synch: bool = False) -> PopulationBasedTraining:
    mutations = {"x": [1]}
    return PopulationBasedTraining(
        "training_iteration", perturbation_interval=4, hyperparam_mutations=mutations, synch=synch
    )


def test_a_mode_is_where_we_read_it() -> None:
    assert schedulers.mode(ASHAScheduler(metric="loss", mode="min")) == "min"
    assert schedulers.mode(HyperBandScheduler(metric="score", mode="max")) == "max"
    assert schedulers.mode(MedianStoppingRule(metric="loss", mode="min")) == "min"
    assert schedulers.mode(FIFOScheduler()) is schedulers.mode(pbt()) is None


def test_only_population_based_training_asks_for_checkpoints() -> None:
    folder = Path(inspect.getsourcefile(AsyncHyperBandScheduler) or "").parent
    asking = {file.name for file in folder.glob("*.py") if "_schedule_trial_save" in file.read_text()}
    assert asking == {"pbt.py"}
    for make in (ASHAScheduler, FIFOScheduler, HyperBandScheduler, HyperBandForBOHB, MedianStoppingRule):
        assert not schedulers.waits_for_checkpoints(make())
    assert schedulers.waits_for_checkpoints(pbt())

    class Own(FIFOScheduler):
        pass

    assert schedulers.waits_for_checkpoints(Own()), "nobody knows what it does"


def test_the_trials_that_hyperband_promotes_are_paused_ones_that_a_halving_kept() -> None:
    base = HyperBandScheduler(max_t=9, reduction_factor=3, metric="score", mode="max")
    trials = [Trial("__fake", stub=True) for _ in range(17)]
    for trial in trials:
        base.on_trial_add(None, trial)
    kept = halve(base, 2, trials[8:])
    third = list(schedulers.brackets(base))[2]
    assert (third.halvings_left, third.rung_end, len(kept)) == (1, 3, 3)
    assert third.promoted() == []
    kept[0].set_status(Trial.PAUSED)
    assert third.promoted() == []
    base._hyperbands[0][2].trials_to_unpause.add(kept[0])
    assert third.promoted() == [kept[0]] and third.left_over() == []
