"""Trainables whose iterations take a few milliseconds. The metric depends on the trial and the iteration only."""

from __future__ import annotations

import json
import os
import tempfile
import time
from typing import Any

from ray import tune
from ray.tune import Checkpoint, Trainable


def score(x: float, iteration: int) -> float:
    """Learning curves that cross: another trial is the best one at another iteration."""
    return 100.0 * (1 - 2.718281828 ** (-iteration / (2 + 3 * (x % 5)))) * (1 + (x * 7 % 11) / 10)


def with_checkpoints(config: dict[str, Any]) -> None:
    start = 0
    checkpoint = tune.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory, open(os.path.join(directory, "at.json")) as file:
            start = json.load(file)
    for iteration in range(start + 1, config.get("n", 81) + 1):
        time.sleep(config.get("pause", 0.005))
        with tempfile.TemporaryDirectory() as directory:
            with open(os.path.join(directory, "at.json"), "w") as file:
                json.dump(iteration, file)
            tune.report(
                {"score": score(config["x"], iteration), "at": iteration, "began": start, "pid": os.getpid()},
                checkpoint=Checkpoint.from_directory(directory),
            )


def without_checkpoints(config: dict[str, Any]) -> None:
    for iteration in range(1, config.get("n", 81) + 1):
        time.sleep(config.get("pause", 0.005))
        tune.report({"score": score(config["x"], iteration), "at": iteration, "pid": os.getpid()})


def raising(config: dict[str, Any]) -> None:
    """Fails at iteration ``bad_at`` while the file ``marker`` has fewer than ``failures`` characters."""
    start = 0
    checkpoint = tune.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory, open(os.path.join(directory, "at.json")) as file:
            start = json.load(file)
    for iteration in range(start + 1, config.get("n", 5) + 1):
        marker = config.get("marker")
        if marker and iteration == config.get("bad_at", 3):
            done = os.path.getsize(marker) if os.path.exists(marker) else 0
            if done < config["failures"]:
                with open(marker, "a") as file:
                    file.write("x")
                raise RuntimeError("as ordered")
        with tempfile.TemporaryDirectory() as directory:
            with open(os.path.join(directory, "at.json"), "w") as file:
                json.dump(iteration, file)
            tune.report(
                {"score": score(config["x"], iteration), "at": iteration},
                checkpoint=Checkpoint.from_directory(directory),
            )


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
