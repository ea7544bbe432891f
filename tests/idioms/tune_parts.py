"""What the searches of `tune_searching` and `tune_keeping` share: trainables, a searcher, what one sees in the end."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy
from ray import tune
from ray.tune import RunConfig
from ray.tune.search import Searcher


def quadratic(config: dict[str, Any]) -> None:
    for step in range(config.get("steps", 6)):
        tune.report({"loss": (config["x"] - 3) ** 2 + 1 / (step + 1), "step": step})


def saving(config: dict[str, Any]) -> None:
    """The guide's function with checkpoints: it goes on where its checkpoint is."""
    begin = 0
    checkpoint = tune.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            begin = json.loads(Path(folder, "state.json").read_text())["step"] + 1
    for step in range(begin, config.get("steps", 6)):
        folder = Path("made-by-the-script", str(step))
        folder.mkdir(parents=True, exist_ok=True)
        Path(folder, "state.json").write_text(json.dumps({"step": step}))
        fails = config.get("fails_at") == step and not Path(config["marker"]).exists()
        tune.report({"loss": config["x"] + step, "step": step}, checkpoint=tune.Checkpoint.from_directory(str(folder)))
        if fails:
            Path(config["marker"]).touch()
            raise RuntimeError(f"planned, at step {step}")


class Counting(tune.Trainable):
    """A class with all hooks, and with state that is saved."""

    def setup(self, config: dict[str, Any], data: Any = None) -> None:
        self.x, self.count = config["x"], 0
        self.total = 0.0 if data is None else float(numpy.asarray(data).sum())

    def step(self) -> dict[str, Any]:
        self.count += 1
        done = self.count >= self.config.get("steps", 100)
        return {"loss": self.x / self.count, "count": self.count, "total": self.total, "done": done}

    def save_checkpoint(self, folder: str) -> None:
        Path(folder, "state.pkl").write_bytes(pickle.dumps(self.count))

    def load_checkpoint(self, folder: str) -> None:
        self.count = pickle.loads(Path(folder, "state.pkl").read_bytes())


def run_config(folder: Path, name: str, **settings: Any) -> RunConfig:
    return RunConfig(name=name, storage_path=str(folder), verbose=0, **settings)


def seen(results: Any, *keys: str) -> list[Any]:
    """The last result of each trial, in the order of its config, and the number of lines that it has reported."""
    lines = []
    for each in results:
        frame = each.metrics_dataframe
        metrics = each.metrics or {}
        config = {
            key: value for key, value in (each.config or {}).items() if isinstance(value, (int, float, str, list))
        }
        config.pop("marker", None)
        error = None if each.error is None else str(each.error).strip().splitlines()[-1]
        kept = {key: metrics.get(key) for key in ("loss", "training_iteration", *keys)}
        kept["checkpoint"] = each.checkpoint is not None
        kept["best_checkpoints"] = len(each.best_checkpoints or [])
        lines.append([config, kept, 0 if frame is None else len(frame), error])
    return sorted(lines, key=lambda line: json.dumps(line, sort_keys=True, default=str))


class Halving(Searcher):
    """A searcher as the guide on own searchers has it, with state that is saved."""

    def __init__(self, metric: str | None = None, mode: str | None = None) -> None:
        super().__init__(metric, mode)
        self.value, self.told, self.live = 16.0, [], {}  # type: ignore[var-annotated]

    def set_search_properties(self, metric: Any, mode: Any, config: Any, **spec: Any) -> bool:
        self._metric, self._mode = metric, mode
        return True

    def suggest(self, trial_id: str) -> Any:
        self.live[trial_id] = self.value
        value, self.value = self.value, self.value / 2
        return {"x": value, "steps": 2}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        self.told.append(["result", self.live[trial_id], result["training_iteration"]])

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        self.told.append(["complete", self.live.pop(trial_id), error, None if result is None else result["loss"]])

    def save(self, checkpoint_path: str) -> None:
        Path(checkpoint_path).write_text(json.dumps([self.value, self.told]))

    def restore(self, checkpoint_path: str) -> None:
        self.value, self.told = json.loads(Path(checkpoint_path).read_text())


def files(folder: Path) -> list[str]:
    """The names of the files of an experiment's trials without what is random in them; FluidTune's log left out."""
    names = []
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        if path.is_file() and len(parts) > 1 and not parts[-1].startswith("events.out"):
            names.append("/".join(parts[1:]))
    return sorted(names)


class Choice:
    """An object that a search space chooses from."""

    def __init__(self, value: int) -> None:
        self.value = value
