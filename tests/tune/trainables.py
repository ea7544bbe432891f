"""Trainables whose iterations take a few milliseconds. The metric depends on the trial and the iteration only."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune import Checkpoint, Trainable


def score(x: float, iteration: int) -> float:
    """Learning curves that cross: another trial is the best one at another iteration."""
    return 100.0 * (1 - 2.718281828 ** (-iteration / (2 + 3 * (x % 5)))) * (1 + (x * 7 % 11) / 10)


def began_at() -> int:
    """The iteration of the checkpoint that the trial goes on from; 0 without one."""
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as directory:
        return int(json.loads(Path(directory, "at.json").read_text()))


def report_saved(iteration: int, metrics: dict[str, Any]) -> None:
    """Report the iteration with its checkpoint."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "at.json").write_text(json.dumps(iteration))
        tune.report({"at": iteration, **metrics}, checkpoint=Checkpoint.from_directory(directory))


def with_checkpoints(config: dict[str, Any]) -> None:
    start = began_at()
    for iteration in range(start + 1, config.get("n", 81) + 1):
        time.sleep(config.get("pause", 0.005))
        report_saved(iteration, {"score": score(config["x"], iteration), "began": start, "pid": os.getpid()})


def without_checkpoints(config: dict[str, Any]) -> None:
    for iteration in range(1, config.get("n", 81) + 1):
        time.sleep(config.get("pause", 0.005))
        tune.report({"score": score(config["x"], iteration), "at": iteration, "pid": os.getpid()})


def raising(config: dict[str, Any]) -> None:
    """Fails at iteration ``bad_at`` while the file ``marker`` has fewer than ``failures`` characters."""
    for iteration in range(began_at() + 1, config.get("n", 5) + 1):
        marker = config.get("marker")
        if marker and iteration == config.get("bad_at", 3):
            done = os.path.getsize(marker) if os.path.exists(marker) else 0
            if done < config["failures"]:
                with open(marker, "a") as file:
                    file.write("x")
                raise RuntimeError("as ordered")
        report_saved(iteration, {"score": score(config["x"], iteration)})


class Stepper(Trainable):
    """A class trainable with checkpoints."""

    def setup(self, config: dict[str, Any]) -> None:
        self.x = config["x"]
        self.n = config.get("n")
        self.at = 0

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        # It is called only with `reuse_actors=True`.
        self.setup(new_config)
        return True

    def step(self) -> dict[str, Any]:
        time.sleep(0.005)
        self.at += 1
        result = {"score": score(self.x, self.at), "at": self.at, "pid": os.getpid()}
        if self.n is not None and self.at >= self.n:
            result["done"] = True
        return result

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        with open(os.path.join(checkpoint_dir, "at.json"), "w") as file:
            json.dump(self.at, file)

    def load_checkpoint(self, checkpoint_dir: Any) -> None:
        with open(os.path.join(checkpoint_dir, "at.json")) as file:
            self.at = json.load(file)
