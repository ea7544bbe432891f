"""``ray.tune.run`` and ``ray.tune.Tuner``: the originals, their replacement, and what a Tuner keeps private."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import ray.tune
from ray.tune import RunConfig, TuneConfig

#: Ray's own, whatever stands in their places at the moment.
RAY_RUN = ray.tune.run
RAY_TUNER = ray.tune.Tuner

#: The modules from which a script may import the two. `ray.tune.tune` and `ray.tune.tuner` are modules whose names
#: resemble those of what they define.
_MODULES = ("ray.tune", "ray.tune.tune", "ray.tune.tuner")


def tune_config(tuner: Any) -> TuneConfig | None:
    """Return the `TuneConfig` of a Tuner, new or restored; None: Ray Client has put the Tuner on the cluster."""
    local = getattr(tuner, "_local_tuner", None)
    return None if local is None else local._tune_config


def run_config(tuner: Any) -> RunConfig | None:
    """Return the `RunConfig` of a Tuner, as `tune_config`."""
    local = getattr(tuner, "_local_tuner", None)
    return None if local is None else local._run_config


def folder_of(config: RunConfig | None) -> Path | None:
    """Return the run's folder; None: it has none so far, or is at a URL or in a file system of the user's."""
    if config is None or config.name is None or config.storage_filesystem or "://" in str(config.storage_path):
        return None
    folder = Path(str(config.storage_path), config.name)
    return folder if folder.is_dir() else None


def replace(run: Any, tuner: Any) -> None:
    """From now on ``ray.tune.run`` and ``ray.tune.Tuner`` are the given ones, wherever Ray has them."""
    for place in _MODULES:
        module = importlib.import_module(place)
        for name, ours in (("run", run), ("Tuner", tuner)):
            if hasattr(module, name):
                setattr(module, name, ours)
