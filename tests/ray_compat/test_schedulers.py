"""Tune's algorithms and stoppers keep their state where we read it. Needs no running Ray."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray.train._internal.session import _FutureTrainingResult
from ray.tune.experiment import Trial
from ray.tune.schedulers import (
    ASHAScheduler,
    AsyncHyperBandScheduler,
    FIFOScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    PopulationBasedTrainingReplay,
)

from fluidtune.ray_compat import schedulers
from fluidtune.ray_compat.scheduler_pickle import pickled, unpickled
from fluidtune.tune.groups import adapter_for


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
        assert not adapter_for(make()).waits_for_checkpoints

    class Own(FIFOScheduler):
        """Nobody knows what it does."""

    for base in (pbt(), Own(), PopulationBasedTrainingReplay.__new__(PopulationBasedTrainingReplay)):
        assert adapter_for(base).waits_for_checkpoints


def test_a_checkpoint_that_was_being_saved_is_its_trials_newest_one_after_a_restore() -> None:
    class Later:
        checkpoint = "the newest"

    base, trial, later = pbt(), Trial("stub", stub=True, trial_id="t"), Later()
    future: Any = None
    base._trial_state = {trial: SimpleNamespace(last_checkpoint=_FutureTrainingResult(future))}
    attributes, more = unpickled(pickled(base, [trial, base]), base, {"t": later}.__getitem__)
    assert more == [later, base]
    assert attributes["_trial_state"][later].last_checkpoint == "the newest"
