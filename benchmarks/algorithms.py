"""The tuning algorithms that are compared, each as a stock scheduler and searcher, seeded.

`syncbohb` is Ray's TuneBOHB if its packages (hpbandster and ConfigSpace) are installed, else Optuna's TPE under
HyperBand. `bohb`, the asynchronous form, is Optuna's TPE under ASHA. `means` says which one was used.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from ray import tune
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    PopulationBasedTraining,
)
from ray.tune.search import BasicVariantGenerator

ALGORITHMS = ("grid", "hyperband", "syncbohb", "bohb", "asha", "pbt")
#: The reduction factor of HyperBand and ASHA: the default of Ray's HyperBandScheduler.
ETA = 3


def has_bohb() -> bool:
    """Whether Ray's TuneBOHB can be used here."""
    return all(importlib.util.find_spec(name) for name in ("hpbandster", "ConfigSpace"))


def means(name: str) -> str:
    """The scheduler and searcher that a name stands for, in words."""
    return {
        "grid": "FIFO",
        "hyperband": "HyperBand",
        "syncbohb": "TuneBOHB under HyperBandForBOHB" if has_bohb() else "Optuna's TPE under HyperBand",
        "bohb": "Optuna's TPE under ASHA",
        "asha": "ASHA",
        "pbt": "PBT, synchronous, a perturbation every third of the budget",
    }[name]


def algorithm(name: str, epochs: int, space: dict[str, Any]) -> tuple[Any, Any]:
    """(scheduler, searcher) for trials of at most ``epochs`` iterations over ``space``."""
    random = BasicVariantGenerator(random_state=0)
    hyperband = {"max_t": epochs, "reduction_factor": ETA}
    if name == "hyperband":
        return HyperBandScheduler(**hyperband), random
    if name == "asha":
        return ASHAScheduler(max_t=epochs, grace_period=1, reduction_factor=ETA), random
    if name == "syncbohb" and has_bohb():
        from ray.tune.search.bohb import TuneBOHB

        return HyperBandForBOHB(**hyperband), TuneBOHB(seed=0)
    if name == "syncbohb":
        return HyperBandScheduler(**hyperband), _tpe()
    if name == "bohb":
        return ASHAScheduler(max_t=epochs, grace_period=1, reduction_factor=ETA), _tpe()
    if name == "pbt":
        # PBT copies a winner's weights, so it must not change the width of the network.
        domains = {
            key: value
            for key, value in space.items()
            if key != "width" and isinstance(value, tune.search.sample.Domain)
        }
        interval = max(1, epochs // 3)
        return PopulationBasedTraining(
            "training_iteration", perturbation_interval=interval, hyperparam_mutations=domains, synch=True
        ), random
    return FIFOScheduler(), random


def _tpe() -> Any:
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return OptunaSearch(sampler=optuna.samplers.TPESampler(seed=0))


def budget(name: str, epochs: int) -> dict[str, int] | None:
    """The stop criterion of trials that do not end by themselves; None: the scheduler ends them."""
    return {"training_iteration": epochs} if name in ("grid", "pbt") else None
