"""What an emulated tuning job trains: nothing, with a learning curve of configuration and iteration alone.

Curves cross, so that who is best changes from rung to rung; the same configuration has the same curve on every
side, so that decisions can be compared. Checkpoints are real.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ray import tune


def accuracy(config: dict[str, Any], iteration: float) -> float:
    """After so many iterations; between 0 and 1."""
    distance = math.log10(config["lr"]) + 2.0
    top = 0.95 - 0.12 * distance**2 - 0.5 * (config["momentum"] - 0.85) ** 2
    speed = 2.0 + 6.0 * config["width"] / 48 + 3.0 * (1 + math.sin(37.0 * config["momentum"]))
    return max(0.0, top) * (1.0 - math.exp(-iteration / speed))


class EmulatedTask(tune.Trainable):
    """A class trainable without an end of its own."""

    def setup(self, config: dict[str, Any]) -> None:
        self.learned = 0

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        # Only stock Tune with `reuse_actors` calls it.
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
    """What the job searches over."""
    return {
        "lr": tune.loguniform(1e-4, 1.0),
        "momentum": tune.uniform(0.5, 0.99),
        "width": tune.choice([16, 32, 48]),
    }
