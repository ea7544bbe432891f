"""Searches with Ray Tune's callbacks for XGBoost and LightGBM: reports, checkpoints, and trials that go on from them.

They need xgboost and lightgbm, which the suite does not: ``python -m tests.idioms.searches_both_ways --more``. See
`tune_searching` for what a search is.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy
from ray import tune
from ray.tune import CheckpointConfig, FailureConfig, TuneConfig
from ray.tune.schedulers import HyperBandScheduler

from tests.idioms.library_scripts import table
from tests.idioms.tune_parts import files, run_config, seen

ROUNDS = 6
#: What the booster of a trial is told.
XGBOOST = {"objective": "binary:logistic", "eval_metric": ["logloss", "error"], "seed": 1, "nthread": 1}
LIGHTGBM = {
    "objective": "binary",
    "metric": ["binary_logloss", "binary_error"],
    "seed": 1,
    "verbosity": -1,
    "num_threads": 1,
    "deterministic": True,
}


class Once:
    """A callback of both libraries that fails after a round, but only the first time."""

    def __init__(self, marker: str, last: int) -> None:
        self.marker, self.last = Path(marker), last
        self.order = 30

    def __call__(self, env: Any) -> None:
        self.check(env.iteration)

    def check(self, iteration: int) -> None:
        if iteration == self.last and not self.marker.exists():
            self.marker.touch()
            raise RuntimeError(f"planned, in round {iteration}")


def with_xgboost(config: dict[str, Any]) -> None:
    """Guide "Tuning XGBoost hyperparameters": `xgboost.train` with Tune's callback; it goes on from a checkpoint."""
    import xgboost
    from ray.tune.integration.xgboost import TuneReportCheckpointCallback

    class Failing(xgboost.callback.TrainingCallback):
        def after_iteration(self, model: Any, epoch: int, log: Any) -> bool:
            Once(config["marker"], 3).check(epoch)
            return False

    x, y = table(config["seed"])
    train, evaluate = xgboost.DMatrix(x[:90], y[:90]), xgboost.DMatrix(x[90:], y[90:])
    begun = tune.get_checkpoint()
    model = TuneReportCheckpointCallback.get_model(begun) if begun else None
    reporting = TuneReportCheckpointCallback({"loss": "eval-logloss"}, frequency=config.get("frequency", 2))
    xgboost.train(
        {**XGBOOST, "max_depth": config["depth"]},
        train,
        num_boost_round=ROUNDS - (model.num_boosted_rounds() if model else 0),
        evals=[(evaluate, "eval")],
        verbose_eval=False,
        xgb_model=model,
        callbacks=[reporting, *([Failing()] if "marker" in config else [])],
    )


def with_lightgbm(config: dict[str, Any]) -> None:
    """Guide "Tuning LightGBM": `lightgbm.train` with Tune's callback; it goes on from a checkpoint."""
    import lightgbm
    from ray.tune.integration.lightgbm import TuneReportCheckpointCallback

    x, y = table(config["seed"])
    train = lightgbm.Dataset(x[:90], y[:90])
    begun = tune.get_checkpoint()
    model = TuneReportCheckpointCallback.get_model(begun) if begun else None
    reporting = TuneReportCheckpointCallback({"loss": "eval-binary_logloss"}, frequency=config.get("frequency", 2))
    lightgbm.train(
        {**LIGHTGBM, "max_depth": config["depth"]},
        train,
        num_boost_round=ROUNDS - (model.current_iteration() if model else 0),
        valid_sets=[lightgbm.Dataset(x[90:], y[90:], reference=train)],
        valid_names=["eval"],
        init_model=model,
        callbacks=[reporting, *([Once(config["marker"], 3)] if "marker" in config else [])],
    )


def crossed_xgboost(config: dict[str, Any]) -> None:
    """`xgboost.cv`, whose mean over the folds is reported, without checkpoints."""
    import xgboost
    from ray.tune.integration.xgboost import TuneReportCheckpointCallback

    def means(results: dict[str, Any]) -> dict[str, float]:
        return {"loss": float(numpy.mean(results["test-logloss"]))}

    reporting = TuneReportCheckpointCallback(results_postprocessing_fn=means, checkpoint_at_end=False)
    data = xgboost.DMatrix(*table(config["seed"]))
    xgboost.cv({**XGBOOST, "max_depth": config["depth"]}, data, ROUNDS, nfold=3, callbacks=[reporting])


def crossed_lightgbm(config: dict[str, Any]) -> None:
    """`lightgbm.cv` with all metrics."""
    import lightgbm
    from ray.tune.integration.lightgbm import TuneReportCheckpointCallback

    def chosen(results: dict[str, Any]) -> dict[str, float]:
        return {"loss": next(results[key] for key in sorted(results) if key.endswith("binary_logloss-mean"))}

    reporting = TuneReportCheckpointCallback(results_postprocessing_fn=chosen, checkpoint_at_end=False)
    data = lightgbm.Dataset(*table(config["seed"]))
    lightgbm.cv({**LIGHTGBM, "max_depth": config["depth"]}, data, ROUNDS, nfold=3, callbacks=[reporting])


def classifier(config: dict[str, Any]) -> None:
    """The scikit-learn interface of XGBoost with Tune's callback, which keeps its model at the end only."""
    import xgboost
    from ray.tune.integration.xgboost import TuneReportCheckpointCallback

    x, y = table(config["seed"])
    reporting = TuneReportCheckpointCallback(["validation_0-logloss"])
    model = xgboost.XGBClassifier(n_estimators=ROUNDS, max_depth=config["depth"], n_jobs=1, callbacks=[reporting])
    model.fit(x[:90], y[:90], eval_set=[(x[90:], y[90:])], verbose=False)


def _models(results: Any, library: str) -> list[Any]:
    """What the stored model of each trial predicts, and how many rounds it has."""
    found = []
    for each in results:
        if each.checkpoint is None:
            continue
        x, _ = table(each.config["seed"])
        if library == "xgboost":
            import xgboost
            from ray.tune.integration.xgboost import TuneReportCheckpointCallback

            model = TuneReportCheckpointCallback.get_model(each.checkpoint)
            told, rounds = model.predict(xgboost.DMatrix(x)), model.num_boosted_rounds()
        else:
            from ray.tune.integration.lightgbm import TuneReportCheckpointCallback

            model = TuneReportCheckpointCallback.get_model(each.checkpoint)
            told, rounds = model.predict(x), model.current_iteration()
        kept = sorted(path.name for path in Path(each.path).iterdir() if path.name.startswith("checkpoint_"))
        found.append([each.config["depth"], each.config["seed"], rounds, float(numpy.sum(told)), kept])
    return sorted(found)


LIBRARIES = {"xgboost": with_xgboost, "lightgbm": with_lightgbm}
SPACE = {"depth": tune.grid_search([1, 2, 3]), "seed": tune.grid_search([1, 2])}


def _plain(library: str, side: Any, folder: Path) -> Any:
    config = run_config(folder, "plain")
    results = side.Tuner(LIBRARIES[library], param_space=SPACE, run_config=config).fit()
    return [seen(results), _models(results, library), files(folder / "plain")]


def _stopped(library: str, side: Any, folder: Path) -> Any:
    """Tune ends the trials in the middle of the training; the best two checkpoints are kept."""
    keep = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min")
    config = run_config(folder, "stopped", stop={"training_iteration": 4}, checkpoint_config=keep)
    space = {**SPACE, "frequency": 1}
    results = side.Tuner(LIBRARIES[library], param_space=space, run_config=config).fit()
    return [seen(results), _models(results, library), files(folder / "stopped")]


def _retried(library: str, side: Any, folder: Path) -> Any:
    """A trial fails once after its second checkpoint, and goes on from there."""
    config = run_config(folder, "retried", failure_config=FailureConfig(max_failures=1))
    space = {"depth": 2, "seed": 1, "frequency": 2, "marker": str(folder / "marker")}
    results = side.Tuner(LIBRARIES[library], param_space=space, run_config=config).fit()
    return [seen(results), _models(results, library), files(folder / "retried")]


def _restored(library: str, side: Any, folder: Path) -> Any:
    """A trial fails; a restored Tuner goes on with it from its checkpoint."""
    space = {"depth": tune.grid_search([2, 3]), "seed": 1, "frequency": 1, "marker": str(folder / "marker")}
    first = side.Tuner(
        LIBRARIES[library],
        param_space=space,
        tune_config=TuneConfig(max_concurrent_trials=1),
        run_config=run_config(folder, "restored"),
    ).fit()
    again = side.Tuner.restore(
        str(folder / "restored"), LIBRARIES[library], resume_errored=True, param_space=space
    ).fit()
    return [seen(first), seen(again), _models(again, library), files(folder / "restored")]


def _paused(library: str, side: Any, folder: Path) -> Any:
    """HyperBand pauses the trials between its rungs; the better ones go on from their checkpoints."""
    results = side.Tuner(
        LIBRARIES[library],
        param_space={**SPACE, "frequency": 1},
        tune_config=TuneConfig(
            metric="loss", mode="min", scheduler=HyperBandScheduler(max_t=4, reduction_factor=2), reuse_actors=True
        ),
        run_config=run_config(folder, "paused"),
    ).fit()
    return [seen(results), _models(results, library)]


def _trained(trainable: Any, side: Any, folder: Path) -> Any:
    results = side.Tuner(trainable, param_space=SPACE, run_config=run_config(folder, "trained")).fit()
    return [seen(results, "validation_0-logloss"), files(folder / "trained")]


def _named(function: Any, subject: Any, name: str) -> Any:
    search = functools.partial(function, subject)
    search.__name__ = name  # type: ignore[attr-defined]
    return search


SEARCHES = (
    *(
        _named(function, library, f"{library}{function.__name__}")
        for library in LIBRARIES
        for function in (_plain, _stopped, _retried, _restored, _paused)
    ),
    *(_named(_trained, each, each.__name__) for each in (crossed_xgboost, crossed_lightgbm, classifier)),
)
