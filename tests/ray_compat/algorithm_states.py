"""Puts Tune's algorithms into states that a run would bring them to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, HyperBandScheduler, PopulationBasedTraining


def halve(hyperband: HyperBandScheduler, index: int, trials: Sequence[Trial]) -> list[Trial]:
    """Let these trials of a bracket of the first band end their rung equally well. Returns those that are kept."""
    bracket = hyperband._hyperbands[0][index]
    for trial in trials:
        bracket._live_trials[trial] = {"training_iteration": 1, "score": 1.0}
    good, _ = bracket.successive_halving("score", 1.0)
    return good


def set_population(pbt: PopulationBasedTraining, next_perturbation: float, trained: Mapping[Any, float]) -> None:
    """Give PBT a population; ``trained``: trial -> where it was perturbed last, in PBT's time attribute."""
    pbt._next_perturbation_sync = next_perturbation
    pbt._trial_state = {trial: SimpleNamespace(last_train_time=at) for trial, at in trained.items()}


def scores_of(asha: ASHAScheduler) -> dict[str, dict[str, float]]:
    """The scores in the rungs of ASHA's one bracket: by the iteration of the rung, by the trial's id."""
    (bracket,) = asha._brackets
    return {str(milestone): dict(recorded) for milestone, recorded in bracket._rungs}
