"""Searches as the guides of Ray Tune have them: what is kept, told, restored and written. See `tune_searching`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.fs
from ray import tune
from ray.tune import Callback, CheckpointConfig, FailureConfig, RunConfig, TuneConfig

from tests.idioms.tune_parts import files, quadratic, run_config, saving, seen


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


def memory_filesystem(side: Any, folder: Path) -> Any:
    """Storage guide: a filesystem of pyarrow that is handed in, here a folder as its root."""
    root = folder / "fs-root"
    root.mkdir()
    filesystem = pyarrow.fs.SubTreeFileSystem(str(root), pyarrow.fs.LocalFileSystem())
    config = RunConfig(name="remote", storage_path="bucket", storage_filesystem=filesystem, verbose=0)
    results = side.Tuner(saving, param_space={"x": tune.grid_search([1, 2]), "steps": 3}, run_config=config).fit()
    return [seen(results), files(root / "bucket" / "remote")]


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


SEARCHES = (
    callback_with_state,
    resumed_after_errors,
    kept_checkpoints,
    memory_filesystem,
    retried_trials,
    fail_fast,
    names_of_trials,
)
