"""The trainable of an emulated tuning job: it computes nothing and reports an invented learning curve.

The curve depends only on the configuration and the iteration, so a configuration has the same curve on every side.
Curves cross, so that the best trial changes from rung to rung. Checkpoints are real.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ray import tune


def accuracy(config: dict[str, Any], iteration: float) -> float:
    """The accuracy, 0 to 1, of a configuration after ``iteration`` iterations.

    The constants make learning rates near 0.01 best, and let wide networks learn slowly and end no better.
    """
    distance = math.log10(config["lr"]) + 2.0
    top = 0.95 - 0.12 * distance**2 - 0.5 * (config["momentum"] - 0.85) ** 2
    speed = 2.0 + 6.0 * config["width"] / 48 + 3.0 * (1 + math.sin(37.0 * config["momentum"]))
    return max(0.0, top) * (1.0 - math.exp(-iteration / speed))


class EmulatedTask(tune.Trainable):
    """A class trainable that does not end by itself."""

    def setup(self, config: dict[str, Any]) -> None:
        self.learned = 0

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        # Only stock Tune with `reuse_actors` calls this.
        self.config = new_config
        self.learned = 0
        return True

    def step(self) -> dict[str, Any]:
        self.learned += 1
        return {"accuracy": accuracy(self.config, self.learned), "epochs": self.learned}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "learned.json").write_text(json.dumps(self.learned))

    def load_checkpoint(self, checkpoint_dir: Any) -> None:
        self.learned = json.loads(Path(checkpoint_dir, "learned.json").read_text())


def emulated_space() -> dict[str, Any]:
    """The search space of the job."""
    return {
        "lr": tune.loguniform(1e-4, 1.0),
        "momentum": tune.uniform(0.5, 0.99),
        "width": tune.choice([16, 32, 48]),
    }
