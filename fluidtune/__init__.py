"""FluidTune: an execution engine for Ray Tune.

`run` and `Tuner` are Ray Tune's, executed by FluidTune; `FluidExecutor` holds the settings; `FluidScheduler`
brings the executor into a stock ``ray.tune.Tuner``; with `announce` an algorithm's author names its TrialGroups.
`fluidtune.elastic` is what a training loop calls to be resized while it trains, and imports no Ray.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

__all__ = ["FluidExecutor", "FluidScheduler", "FluidTuneError", "Tuner", "__version__", "announce", "elastic", "run"]

_HOMES = {
    "FluidExecutor": "fluidtune.tune.executor",
    "FluidScheduler": "fluidtune.tune.scheduler",
    "FluidTuneError": "fluidtune.errors",
    "Tuner": "fluidtune.tune.api",
    "announce": "fluidtune.tune.groups",
    "run": "fluidtune.tune.api",
}


def __getattr__(name: str) -> Any:
    # Loaded when asked for: planning and report need no Ray, an elastic loop needs no Tune.
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "elastic":
        return importlib.import_module("fluidtune.elastic")
    raise AttributeError(f"module 'fluidtune' has no attribute {name!r}")
