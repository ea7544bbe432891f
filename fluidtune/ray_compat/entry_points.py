"""``ray.tune.run`` and ``ray.tune.Tuner``: the originals, their replacement, and what a Tuner keeps private."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import ray
import ray.tune
from ray.tune import TuneConfig

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


@contextmanager
def replaced(run: Any, tuner: type) -> Iterator[None]:
    """While this is open, ``ray.tune.run`` and ``ray.tune.Tuner`` are the given ones, wherever Ray has them."""
    done = []
    for place in _MODULES:
        module = importlib.import_module(place)
        for name, ours, original in (("run", run, RAY_RUN), ("Tuner", tuner, RAY_TUNER)):
            if getattr(module, name, None) is original:
                done.append((module, name, original))
                setattr(module, name, ours)
    try:
        yield
    finally:
        for module, name, original in done:
            setattr(module, name, original)


@contextmanager
def around_init(starts: Callable[[Mapping[str, Any]], AbstractContextManager[None]]) -> Iterator[None]:
    """While this is open, ``ray.init`` runs in ``starts`` of the job's ``runtime_env`` where it starts a Ray node."""
    init = ray.init

    @functools.wraps(init)
    def starting(address: str | None = None, **kwargs: Any) -> Any:
        if address not in (None, "local") or ray.is_initialized():
            return init(address, **kwargs)
        with starts(kwargs.get("runtime_env") or {}):
            return init(address, **kwargs)

    ray.init = starting
    try:
        yield
    finally:
        ray.init = init
