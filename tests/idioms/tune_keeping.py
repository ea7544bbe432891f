"""Searches as the guides of Ray Tune have them: what is kept, told, restored and written. See `tune_searching`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pyarrow.fs
from ray import tune
from ray.tune import Callback, CheckpointConfig, FailureConfig, RunConfig, TuneConfig

from tests.idioms.tune_parts import Counting, files, quadratic, run_config, saving, seen


def callback_with_state(side: Any, folder: Path) -> Any:
    """Callbacks guide: a class with all hooks, whose calls are counted; the order within each trial."""
    calls: dict[str, list[str]] = {}

    class Noting(Callback):
        def setup(self, **info: Any) -> None:
            calls.setdefault("setup", []).extend(sorted(set(info) & {"stop", "num_samples", "total_num_samples"}))

        def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
            calls.setdefault("steps", [])[:] = ["some"]

        def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
            calls.setdefault("end", []).append(str(len(trials)))

        def get_state(self) -> Any:
            return {"calls": len(calls)}

        def set_state(self, state: Any) -> None:
            calls["restored"] = ["yes"]

    def note(name: str) -> None:
        def hook(self: Any, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            extra = f"={info['result']['training_iteration']}" if "result" in info else ""
            calls.setdefault(str(trial.config["x"]), []).append(name + extra)

        setattr(Noting, name, hook)

    for name in ("on_trial_start", "on_trial_result", "on_trial_complete", "on_trial_error", "on_trial_save"):
        note(name)
    space = {"x": tune.grid_search([1, 2]), "steps": 3}
    config = run_config(folder, "callback", callbacks=[Noting()])
    side.Tuner(saving, param_space=space, run_config=config).fit()
    # Ray calls on_checkpoint with the path; the order of saving and reporting is part of what one sees.
    return calls


def analysis_of_results(side: Any, folder: Path) -> Any:
    """Guide on analysing results: ResultGrid, data frames, best result in three scopes, a failed trial."""

    def some_fail(config: dict[str, Any]) -> None:
        quadratic(config)
        if config["x"] == 4:
            raise ValueError("this one fails")

    results = side.Tuner(
        some_fail,
        param_space={"x": tune.grid_search([1, 2, 4])},
        tune_config=TuneConfig(metric="loss", mode="min"),
        run_config=run_config(folder, "analysis"),
    ).fit()
    frame = results.get_dataframe(filter_metric="loss", filter_mode="min")
    scopes = {scope: results.get_best_result(scope=scope).config["x"] for scope in ("last", "all", "avg", "last-5-avg")}
    columns = sorted(name for name in frame.columns if not name.startswith("timers"))
    loaded = tune.ExperimentAnalysis(str(folder / "analysis"), default_metric="loss", default_mode="min")
    return {
        "length": len(results),
        "errors": [results.num_errors, results.num_terminated],
        "scopes": scopes,
        "columns": columns,
        "minima": sorted(frame["loss"].tolist()),
        "loaded": [loaded.best_config, sorted(len(f) for f in loaded.trial_dataframes.values())],
        "repr": [type(error).__name__ for error in results.errors],
    }


def resumed_after_errors(side: Any, folder: Path) -> Any:
    """Fault tolerance guide: restore with resume_errored, and once more with restart_errored."""
    found = []
    for which in ("resume_errored", "restart_errored"):
        markers = folder / f"{which}-markers"
        markers.mkdir()
        space = {"x": tune.grid_search([1, 2, 3]), "fails_at": 2, "marker": str(markers / "m")}
        name = f"errors_{which}"
        tuner = side.Tuner(
            saving,
            param_space=space,
            tune_config=TuneConfig(max_concurrent_trials=1),
            run_config=run_config(folder, name),
        )
        found.append(seen(tuner.fit()))
        again = side.Tuner.restore(str(folder / name), trainable=saving, param_space=space, **{which: True})
        found.append(seen(again.fit()))
    return found


def restored_with_a_changed_function(side: Any, folder: Path) -> Any:
    """FAQ: a finished experiment whose function is mended, restored with it."""

    def broken(config: dict[str, Any]) -> None:
        raise ValueError("a typo")

    broken.__name__ = mended_name = "training"

    def mended(config: dict[str, Any]) -> None:
        quadratic(config)

    mended.__name__ = mended_name
    space = {"x": tune.grid_search([1, 2])}
    first = side.Tuner(broken, param_space=space, run_config=run_config(folder, "changed")).fit()
    again = side.Tuner.restore(str(folder / "changed"), trainable=mended, resume_errored=True)
    return [seen(first), seen(again.fit())]


def kept_checkpoints(side: Any, folder: Path) -> Any:
    """Checkpoint guide: the two best by a score, of a function, and what the trial's folder holds."""
    tuned = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min")
    config = run_config(folder, "kept", checkpoint_config=tuned)
    results = side.Tuner(saving, param_space={"x": tune.grid_search([1, 2])}, run_config=config).fit()
    steps = []
    for each in results:
        for checkpoint, metrics in each.best_checkpoints:
            with checkpoint.as_directory() as inside:
                state = json.loads(Path(inside, "state.json").read_text())
            steps.append([each.config["x"], metrics["step"], state["step"], Path(checkpoint.path).name])
    return [seen(results), sorted(steps), files(folder / "kept")]


def class_checkpoints(side: Any, folder: Path) -> Any:
    """Checkpoint guide: every second iteration of a class, and at its end."""
    each = CheckpointConfig(checkpoint_frequency=2, checkpoint_at_end=True, num_to_keep=3)
    config = run_config(folder, "class_checkpoints", checkpoint_config=each, stop={"training_iteration": 7})
    results = side.Tuner(Counting, param_space={"x": tune.grid_search([1, 2])}, run_config=config).fit()
    return [seen(results, "count"), files(folder / "class_checkpoints")]


def memory_filesystem(side: Any, folder: Path) -> Any:
    """Storage guide: a filesystem of pyarrow that is handed in, here a folder as its root."""
    root = folder / "fs-root"
    root.mkdir()
    filesystem = pyarrow.fs.SubTreeFileSystem(str(root), pyarrow.fs.LocalFileSystem())
    config = RunConfig(name="remote", storage_path="bucket", storage_filesystem=filesystem, verbose=0)
    results = side.Tuner(saving, param_space={"x": tune.grid_search([1, 2]), "steps": 3}, run_config=config).fit()
    return [seen(results), files(root / "bucket" / "remote")]


def synced_artifacts(side: Any, folder: Path) -> Any:
    """Storage guide: artifacts synced to a remote filesystem, which has a trial's own files in the end."""
    from ray.tune import SyncConfig

    root = folder / "artifact-root"
    root.mkdir()
    filesystem = pyarrow.fs.SubTreeFileSystem(str(root), pyarrow.fs.LocalFileSystem())
    config = RunConfig(
        name="synced",
        storage_path="bucket",
        storage_filesystem=filesystem,
        sync_config=SyncConfig(sync_artifacts=True, sync_artifacts_on_checkpoint=True),
        verbose=0,
    )
    results = side.Tuner(saving, param_space={"x": tune.grid_search([1, 2]), "steps": 3}, run_config=config).fit()
    return [seen(results), files(root / "bucket" / "synced")]


def retried_trials(side: Any, folder: Path) -> Any:
    """Fault tolerance guide: max_failures with checkpoints, and a function without any."""
    markers = folder / "retried-markers"
    markers.mkdir()

    def without(config: dict[str, Any]) -> None:
        marker = markers / f"plain-{config['x']}"
        for step in range(4):
            tune.report({"loss": step, "first": not marker.exists()})
            if step == 2 and not marker.exists():
                marker.touch()
                raise RuntimeError("once")

    failure = FailureConfig(max_failures=2)
    space = {
        "x": tune.grid_search([1, 2]),
        "fails_at": 3,
        "marker": tune.sample_from(lambda spec: str(markers / f"m{spec.config.x}")),
    }
    one = side.Tuner(saving, param_space=space, run_config=run_config(folder, "retried", failure_config=failure)).fit()
    space = {"x": tune.grid_search([1, 2])}
    two = side.Tuner(without, param_space=space, run_config=run_config(folder, "plain", failure_config=failure)).fit()
    return [seen(one), [[line[0], line[1]] for line in seen(two, "first")]]


def fail_fast(side: Any, folder: Path) -> Any:
    """Fault tolerance guide: fail_fast, and fail_fast="raise"."""

    def fails(config: dict[str, Any]) -> None:
        if config["x"] == 1:
            raise ValueError("this one")
        quadratic(config)

    found: list[Any] = []
    for setting in (True, "raise"):
        config = run_config(folder, f"fast_{setting}", failure_config=FailureConfig(fail_fast=setting))
        tuner = side.Tuner(
            fails,
            param_space={"x": tune.grid_search([0, 1, 2, 3])},
            tune_config=TuneConfig(max_concurrent_trials=1),
            run_config=config,
        )
        try:
            found.append(seen(tuner.fit()))
        except Exception as error:
            found.append([type(error).__name__, str(error).strip().splitlines()[-1]])
    return found


def names_of_trials(side: Any, folder: Path) -> Any:
    """trial_name_creator, trial_dirname_creator; what the context tells the function."""

    def asks(config: dict[str, Any]) -> None:
        context = tune.get_context()
        tune.report(
            {
                "loss": config["x"],
                "name": context.get_trial_name(),
                "folder": Path(context.get_trial_dir()).name,
                "here": Path.cwd().name,
                "experiment": context.get_experiment_name(),
                "resources": context.get_trial_resources().required_resources.get("CPU"),
            }
        )

    tuner = side.Tuner(
        asks,
        param_space={"x": tune.grid_search([1, 2])},
        tune_config=TuneConfig(
            trial_name_creator=lambda trial: f"name-{trial.config['x']}",
            trial_dirname_creator=lambda trial: f"folder-{trial.config['x']}",
        ),
        run_config=run_config(folder, "names"),
    )
    return seen(tuner.fit(), "name", "folder", "here", "experiment", "resources")


def old_entry_point(side: Any, folder: Path) -> Any:
    """tune.run with the arguments of older guides: a registered name, stop, keep_checkpoints_num, analysis."""
    tune.register_trainable("counting-by-name", Counting)
    analysis = side.run(
        "counting-by-name",
        name="old",
        config={"x": tune.grid_search([4, 2])},
        stop={"count": 3},
        metric="loss",
        mode="min",
        storage_path=str(folder),
        checkpoint_config=CheckpointConfig(checkpoint_frequency=1),
        resources_per_trial={"cpu": 1},
        verbose=0,
    )
    best = analysis.best_trial
    return {
        "best": [analysis.best_config, analysis.best_result["loss"], best.status],
        "frame": sorted(analysis.results_df["loss"].tolist()),
        "stats": sorted(analysis.stats().get("status", {})) if hasattr(analysis, "stats") else None,
        "checkpoint": Path(analysis.best_checkpoint.path).name,
        "files": files(folder / "old"),
    }


def trial_info_in_files(side: Any, folder: Path) -> Any:
    """Output guide: what the loggers write for values of many types, nested ones, arrays and None."""

    def reports(config: dict[str, Any]) -> None:
        for step in range(2):
            tune.report(
                {
                    "loss": numpy.float32(1.5),
                    "nested": {"a": {"b": numpy.int64(step)}},
                    "array": numpy.arange(2),
                    "none": None,
                    "text": "line\nbreak",
                    "nan": float("nan"),
                    "flag": numpy.bool_(True),
                }
            )

    side.Tuner(reports, param_space={"x": 1, "nested": {"y": [1, 2]}}, run_config=run_config(folder, "files")).fit()
    trial = next(path for path in (folder / "files").iterdir() if path.is_dir())
    lines = [json.loads(line) for line in (trial / "result.json").read_text().splitlines()]
    kept = ("loss", "nested", "array", "none", "text", "nan", "flag", "training_iteration", "done", "config")
    header = (trial / "progress.csv").read_text().splitlines()[0].split(",")
    return [
        [{key: str(line.get(key)) for key in kept} for line in lines],
        sorted(header),
        sorted(lines[0]),
        json.loads((trial / "params.json").read_text()),
        files(folder / "files"),
    ]


SEARCHES = (
    callback_with_state,
    analysis_of_results,
    resumed_after_errors,
    restored_with_a_changed_function,
    kept_checkpoints,
    class_checkpoints,
    memory_filesystem,
    synced_artifacts,
    retried_trials,
    fail_fast,
    names_of_trials,
    old_entry_point,
    trial_info_in_files,
)
