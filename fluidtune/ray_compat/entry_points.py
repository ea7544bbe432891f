"""``ray.tune.run`` and ``ray.tune.Tuner``: the originals, their replacement, and what a Tuner keeps private."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

import ray.tune
from ray.tune import TuneConfig

#: Ray's own, whatever stands in their places at the moment.
RAY_RUN = ray.tune.run
RAY_TUNER = ray.tune.Tuner

#: The modules from which a script may import the two. `ray.tune.tune` and `ray.tune.tuner` are modules whose names
#: resemble those of what they define.
_MODULES = ("ray.tune", "ray.tune.tune", "ray.tune.tuner")


#: A `TuneConfig` with this attribute says itself whether ``reuse_actors`` was given.
_NOTED = "_fluidtune_noted"


def said_reuse(config: TuneConfig) -> bool | None:
    """Return the script's ``reuse_actors``; None: the script does not say.

    A configuration that was made before this module was imported, or saved without it, has Ray's default if it has
    False.
    """
    said = config.reuse_actors
    return said if said or getattr(config, _NOTED, False) else None


def _note_what_is_said() -> None:
    """Make None the default of ``reuse_actors``, so that a script that says False can be told from one that does not.

    Ray asks only whether the value is true.
    """
    make = TuneConfig.__init__
    if hasattr(make, _NOTED):
        return
    parameters = list(inspect.signature(make).parameters)

    @functools.wraps(make)
    def noting(self: TuneConfig, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if "reuse_actors" not in kwargs and len(args) < parameters.index("reuse_actors"):
            self.reuse_actors = None  # type: ignore[assignment]
        setattr(self, _NOTED, True)

    setattr(noting, _NOTED, True)
    TuneConfig.__init__ = noting  # type: ignore[method-assign]
    inspect.unwrap(RAY_RUN).__kwdefaults__["reuse_actors"] = None  # type: ignore[attr-defined]


_note_what_is_said()


def tune_config(tuner: Any) -> TuneConfig | None:
    """Return the `TuneConfig` of a Tuner, new or restored; None: Ray Client has put the Tuner on the cluster."""
    local = getattr(tuner, "_local_tuner", None)
    return None if local is None else local._tune_config


def replace(run: Any, tuner: Any) -> None:
    """From now on ``ray.tune.run`` and ``ray.tune.Tuner`` are the given ones, wherever Ray has them."""
    for place in _MODULES:
        module = importlib.import_module(place)
        for name, ours in (("run", run), ("Tuner", tuner)):
            if hasattr(module, name):
                setattr(module, name, ours)
