"""Searches as the guides of Ray Tune have them: how trials are chosen, stopped and given their resources.

A search is called with ``side``, which has Ray Tune's two entry points (``side.Tuner`` and ``side.run``), and a folder.
It returns what a user can see in the end: values that JSON can hold, and that do not depend on which trial was faster.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
from ray import tune
from ray.tune import CheckpointConfig, TuneConfig
from ray.tune.search import BasicVariantGenerator, ConcurrencyLimiter, Repeater
from ray.tune.stopper import (
    CombinedStopper,
    ExperimentPlateauStopper,
    FunctionStopper,
    MaximumIterationStopper,
    Stopper,
    TrialPlateauStopper,
)

from tests.idioms.tune_parts import Choice, Counting, Halving, quadratic, run_config, seen


def plateau_of_a_trial(side: Any, folder: Path) -> Any:
    """Stopping guide: TrialPlateauStopper."""
    stop = TrialPlateauStopper("loss", std=0.5, num_results=3, grace_period=3)
    space = {"x": tune.grid_search([1, 2, 3]), "steps": 12}
    return seen(side.Tuner(quadratic, param_space=space, run_config=run_config(folder, "plateau", stop=stop)).fit())


def plateau_of_an_experiment(side: Any, folder: Path) -> Any:
    """Stopping guide: ExperimentPlateauStopper, one trial at a time."""
    stop = ExperimentPlateauStopper("loss", std=10, top=2, mode="min", patience=1)
    tuner = side.Tuner(
        quadratic,
        param_space={"x": tune.grid_search([1, 2, 3, 4]), "steps": 4},
        tune_config=TuneConfig(max_concurrent_trials=1),
        run_config=run_config(folder, "experiment_plateau", stop=stop),
    )
    return seen(tuner.fit())


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


def stop_by_dictionary(side: Any, folder: Path) -> Any:
    """Stopping guide: a dictionary of two criteria, for a class that never ends by itself."""
    stop = {"training_iteration": 5, "loss": 100}
    config = run_config(folder, "dictionary", stop=stop, checkpoint_config=CheckpointConfig(checkpoint_at_end=True))
    return seen(side.Tuner(Counting, param_space={"x": tune.grid_search([1, 2])}, run_config=config).fit())


def stop_by_a_metric_that_is_missing(side: Any, folder: Path) -> Any:
    """A criterion on a metric that nobody reports, and the environment does not allow it: the run's error."""
    try:
        tuner = side.Tuner(
            quadratic, param_space={"x": 1}, run_config=run_config(folder, "missing", stop={"no_such_metric": 1})
        )
        return seen(tuner.fit())
    except Exception as error:
        return [type(error).__name__, str(error).splitlines()[-1][:120]]


def more_samples_for_a_searcher(side: Any, folder: Path) -> Any:
    """Guide on restoring: search_alg.restore_from_dir, and a new experiment with more trials."""

    def search(previous: str | None, name: str) -> Any:
        searcher = Halving()
        if previous is not None:
            searcher.restore_from_dir(previous)
        tuner = side.Tuner(
            quadratic,
            param_space={"steps": 2},
            tune_config=TuneConfig(
                search_alg=searcher, num_samples=3, metric="loss", mode="min", max_concurrent_trials=1
            ),
            run_config=run_config(folder, name),
        )
        return seen(tuner.fit()), searcher.told

    first = search(None, "halving")
    return [first, search(str(folder / "halving"), "halving_more")]


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


def choice_of_objects(side: Any, folder: Path) -> Any:
    """tune.choice and grid_search over objects, classes, functions and lambdas."""
    objects = [Choice(1), Choice(2)]

    def uses(config: dict[str, Any]) -> None:
        tune.report({"loss": config["object"].value + config["make"](3), "same": config["object"] is config["object"]})

    space = {"object": tune.grid_search(objects), "make": tune.choice([lambda n: n * 2]), "type": tune.choice([dict])}
    results = side.Tuner(uses, param_space=space, run_config=run_config(folder, "objects")).fit()
    return [seen(results, "same"), sorted(each.config["object"].value for each in results)]


def points_to_evaluate(side: Any, folder: Path) -> Any:
    """BasicVariantGenerator with points to evaluate first, constant_grid_search and max_concurrent."""
    search = BasicVariantGenerator(points_to_evaluate=[{"x": 5, "y": 1}, {"y": 2}], max_concurrent=1, random_state=3)
    tuner = side.Tuner(
        quadratic,
        param_space={"x": tune.randint(0, 10), "y": tune.randint(0, 10), "steps": 1},
        tune_config=TuneConfig(num_samples=4, search_alg=search),
        run_config=run_config(folder, "points"),
    )
    return seen(tuner.fit())


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


def large_data(side: Any, folder: Path) -> Any:
    """Guide on with_parameters: 40 MB for each trial of a function and of a class."""
    data = numpy.ones(5_000_000)

    def reads(config: dict[str, Any], data: Any) -> None:
        tune.report({"loss": float(data.sum()) + config["x"], "writeable": bool(data.flags.writeable)})

    space = {"x": tune.grid_search([0, 1]), "steps": 2}
    one = side.Tuner(tune.with_parameters(reads, data=data), param_space=space, run_config=run_config(folder, "large"))
    two = side.Tuner(
        tune.with_parameters(Counting, data=data), param_space=space, run_config=run_config(folder, "large_class")
    )
    return [seen(one.fit(), "writeable"), seen(two.fit(), "total")]


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
    plateau_of_a_trial,
    plateau_of_an_experiment,
    combined_stoppers,
    stop_by_dictionary,
    stop_by_a_metric_that_is_missing,
    more_samples_for_a_searcher,
    limited_searcher,
    repeated_trials,
    conditional_space,
    choice_of_objects,
    points_to_evaluate,
    mixed_resources,
    population,
    changed_resources,
    time_budget,
    large_data,
    returned_values,
)
