"""Searches as the guides of Ray Tune have them: how trials are chosen, stopped and given their resources.

A search is called with ``side``, which has Ray Tune's two entry points (``side.Tuner`` and ``side.run``), and a folder.
It returns what a user can see in the end: values that JSON can hold, and that do not depend on which trial was faster.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune import TuneConfig
from ray.tune.search import BasicVariantGenerator, ConcurrencyLimiter, Repeater
from ray.tune.stopper import (
    CombinedStopper,
    FunctionStopper,
    MaximumIterationStopper,
    Stopper,
)

from tests.idioms.tune_parts import Counting, Halving, quadratic, run_config, seen


def combined_stoppers(side: Any, folder: Path) -> Any:
    """Stopping guide: a function, a maximum and a class of one's own, combined."""

    class Total(Stopper):
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
            self.calls += 1
            return result["step"] >= 5

        def stop_all(self) -> bool:
            return False

    own = Total()
    stop = CombinedStopper(FunctionStopper(lambda _, r: r["loss"] < 0.4), MaximumIterationStopper(4), own)
    space = {"x": tune.grid_search([2, 3]), "steps": 9}
    return seen(side.Tuner(quadratic, param_space=space, run_config=run_config(folder, "combined", stop=stop)).fit())


def limited_searcher(side: Any, folder: Path) -> Any:
    """ConcurrencyLimiter in batches around a searcher: what the searcher is told."""
    searcher = Halving("loss", "min")
    tuner = side.Tuner(
        quadratic,
        tune_config=TuneConfig(search_alg=ConcurrencyLimiter(searcher, 2, batch=True), num_samples=4),
        run_config=run_config(folder, "limited"),
    )
    return [seen(tuner.fit()), sorted(searcher.told)]


def repeated_trials(side: Any, folder: Path) -> Any:
    """Repeater: three runs of each suggestion, whose mean the searcher is told, with the index of each."""

    def indexed(config: dict[str, Any]) -> None:
        tune.report({"loss": config["x"] + config["__trial_index__"], "index": config["__trial_index__"]})

    searcher = Halving("loss", "min")
    tuner = side.Tuner(
        indexed,
        tune_config=TuneConfig(search_alg=Repeater(searcher, repeat=3), num_samples=6, max_concurrent_trials=3),
        run_config=run_config(folder, "repeated"),
    )
    return [seen(tuner.fit(), "index"), sorted(line for line in searcher.told if line[0] == "complete")]


def conditional_space(side: Any, folder: Path) -> Any:
    """Search space guide: nested and conditional parameters, sample_from, grid in grid, constants, lists."""
    space = {
        "kind": tune.grid_search(["deep", "wide"]),
        "x": tune.sample_from(lambda spec: 7 if spec.config.kind == "deep" else 9),
        "layers": tune.sample_from(lambda spec: [spec.config.x] * 2),
        "nested": {
            "rate": tune.loguniform(1e-4, 1e-1),
            "q": tune.qrandint(0, 100, 10),
            "more": [tune.uniform(0, 1), 5],
        },
        "steps": 2,
    }

    def tells(config: dict[str, Any]) -> None:
        tune.report({"loss": config["x"], "told": json.dumps(config, sort_keys=True)})

    tuner = side.Tuner(
        tells,
        param_space=space,
        tune_config=TuneConfig(num_samples=2, search_alg=BasicVariantGenerator(random_state=4)),
        run_config=run_config(folder, "conditional"),
    )
    return seen(tuner.fit(), "told")


def mixed_resources(side: Any, folder: Path) -> Any:
    """Resources guide: a function of the config says how many cores: fractions, whole ones, two bundles."""

    def asks(config: dict[str, Any]) -> None:
        needed = tune.get_context().get_trial_resources()
        tune.report(
            {"loss": config["x"], "cores": needed.required_resources.get("CPU"), "bundles": len(needed.bundles)}
        )

    sized = tune.with_resources(
        asks,
        lambda config: (
            tune.PlacementGroupFactory([{"CPU": 1}, {"CPU": 1}]) if config["x"] == 3 else {"cpu": config["x"] / 2}
        ),
    )
    tuner = side.Tuner(sized, param_space={"x": tune.grid_search([1, 2, 3, 4])}, run_config=run_config(folder, "sized"))
    return seen(tuner.fit(), "cores", "bundles")


def population(side: Any, folder: Path) -> Any:
    """PBT guide in its simplest form: a synchronous population of two, whose explored value is fixed."""
    from ray.tune.schedulers import PopulationBasedTraining

    def trained(config: dict[str, Any]) -> None:
        value, begin = 0.0, 0
        checkpoint = tune.get_checkpoint()
        if checkpoint:
            with checkpoint.as_directory() as inside:
                value, begin = json.loads(Path(inside, "state.json").read_text())
        for step in range(begin + 1, 9):
            value += config["rate"]
            folder = Path("saved")
            folder.mkdir(exist_ok=True)
            Path(folder, "state.json").write_text(json.dumps([value, step]))
            tune.report({"score": value, "step": step}, checkpoint=tune.Checkpoint.from_directory(str(folder)))

    scheduler = PopulationBasedTraining(
        perturbation_interval=2,
        hyperparam_mutations={"rate": [0.5, 1.0]},
        quantile_fraction=0.5,
        resample_probability=0.0,
        custom_explore_fn=lambda config: {**config, "rate": 1.0},
        synch=True,
        metric="score",
        mode="max",
    )
    tuner = side.Tuner(
        trained,
        param_space={"rate": tune.grid_search([0.5, 1.0])},
        tune_config=TuneConfig(scheduler=scheduler, num_samples=1),
        run_config=run_config(folder, "population", stop={"step": 8}),
    )
    return seen(tuner.fit(), "score", "step")


def changed_resources(side: Any, folder: Path) -> Any:
    """ResourceChangingScheduler of the guide: a class gets the second core when the other trial has ended."""
    from ray.tune.schedulers import ASHAScheduler, ResourceChangingScheduler

    class Sized(Counting):
        def step(self) -> dict[str, Any]:
            return {**super().step(), "cores": self.trial_resources.required_resources["CPU"]}

    scheduler = ResourceChangingScheduler(ASHAScheduler(max_t=16))
    tuner = side.Tuner(
        tune.with_resources(Sized, {"cpu": 1}),
        param_space={"x": tune.grid_search([1])},
        tune_config=TuneConfig(scheduler=scheduler, metric="loss", mode="min"),
        run_config=run_config(folder, "resources", stop={"training_iteration": 6}),
    )
    return seen(tuner.fit(), "count", "cores")


def time_budget(side: Any, folder: Path) -> Any:
    """A time budget that has long passed when the first trial reports: all trials are ended, none has failed."""
    import time

    def endless(config: dict[str, Any]) -> None:
        while True:
            time.sleep(0.2)
            tune.report({"loss": 1})

    tuner = side.Tuner(
        endless,
        param_space={"x": tune.grid_search([1, 2, 3])},
        tune_config=TuneConfig(time_budget_s=4),
        run_config=run_config(folder, "budget"),
    )
    results = tuner.fit()
    return [len(results), results.num_errors, results.num_terminated]


def returned_values(side: Any, folder: Path) -> Any:
    """Function API guide: values that are returned or yielded instead of reported."""

    def returns(config: dict[str, Any]) -> Any:
        return {"loss": config["x"] * 2.0}

    def returns_number(config: dict[str, Any]) -> Any:
        return config["x"] * 3.0

    def yields(config: dict[str, Any]) -> Any:
        for step in range(3):
            yield {"loss": config["x"] + step}

    found = []
    for each in (returns, returns_number, yields):
        space = {"x": tune.grid_search([1, 2])}
        tuner = side.Tuner(each, param_space=space, run_config=run_config(folder, each.__name__))
        try:
            found.append(seen(tuner.fit(), "_metric"))
        except Exception as error:
            found.append([type(error).__name__, str(error).splitlines()[-1][:100]])
    return found


SEARCHES = (
    combined_stoppers,
    limited_searcher,
    repeated_trials,
    conditional_space,
    mixed_resources,
    population,
    changed_resources,
    time_budget,
    returned_values,
)
