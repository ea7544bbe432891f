"""FluidTune: an execution engine for Ray Tune.

`run` and `Tuner` take the parameters of Ray Tune's and let FluidTune execute the trials. `FluidExecutor` holds the
settings. `FluidScheduler` brings the executor into a stock ``ray.tune.Tuner``. With `announce` the author of an
algorithm names its TrialGroups. A training loop calls `fluidtune.elastic` to be resized while it trains. `serve` lets
the best trials of a finished run answer requests, and `Client` asks them. `forked` has Ray fork the processes of
any program. `shared` loads a data set once a node.

The rooms, from pure to shell: `planning` (widths), `engine` (what each trial does next), `profiles` and `twin` (the
engine on a virtual clock), `tune` and `ray_compat` (the edge to Ray Tune), `cluster` (devices and workers), `elastic`
(the training loop's side), `report` (event log, figures, pictures), `serving`. Start reading in docs/architecture.md.

Does not decide which job holds which device (`themis_bridge`), nor whose iteration runs on a shared one
(`salus_share`).
"""

from __future__ import annotations

from fluidtune import hash_seed

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "BadInput",
    "Client",
    "FluidExecutor",
    "FluidScheduler",
    "FluidTuneError",
    "ServiceError",
    "Tuner",
    "__version__",
    "announce",
    "elastic",
    "forked",
    "run",
    "serve",
    "shared",
]

hash_seed.provide()  # before a cluster is started

#: Public name -> the module that defines it. Type checkers read __init__.pyi.
_HOMES = {
    "AsyncClient": "fluidtune.client",
    "BadInput": "fluidtune.errors",
    "Client": "fluidtune.client",
    "FluidExecutor": "fluidtune.tune.executor",
    "FluidScheduler": "fluidtune.tune.scheduler",
    "FluidTuneError": "fluidtune.errors",
    "ServiceError": "fluidtune.client",
    "Tuner": "fluidtune.tune.api",
    "announce": "fluidtune.tune.groups",
    "forked": "fluidtune.cluster.forks.forked",
    "run": "fluidtune.tune.api",
    "serve": "fluidtune.serving.service",
    "shared": "fluidtune.cluster.data.shared_data",
}


def __getattr__(name: str) -> object:
    # Each name is imported when it is first used: planning and report need no Ray, and an elastic loop needs no Tune.
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "elastic":
        return importlib.import_module("fluidtune.elastic")
    raise AttributeError(f"module 'fluidtune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
