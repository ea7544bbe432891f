"""Collects less garbage while a worker process imports FluidTune's worker, Ray Tune, and its first trial's modules.

Importing torch, pandas and Ray makes about a million objects that stay. By default Python's collector visits them
again and again, which costs a second or more. `worker` imports this module before all others, because Ray Tune brings
pandas and pyarrow, two thirds of what a new process computes before its first trial (`python -m benchmarks.imports`).
It holds until that trial's modules are imported (`Worker.load`, `Worker.join`). A driver's collector is left alone.
"""

from __future__ import annotations

import gc

import ray

#: The collector's thresholds (`gc.set_threshold`) while modules are imported. About a hundred times
#: fewer collections than by default take little time, and still bound a script's own garbage.
_IMPORTING = (100_000, 50, 1000)
#: The thresholds to restore; None while they are in force.
_usual: tuple[int, int, int] | None = None


def importing() -> None:
    """Collect seldom from now on: mostly modules will be imported. Ended by `imported`."""
    global _usual
    if _usual is None:
        _usual = gc.get_threshold()
        gc.set_threshold(*_IMPORTING)


def imported() -> None:
    """Collect as usual from now on, and never look at the present objects again. Does nothing without `importing`."""
    global _usual
    if _usual is not None:
        gc.freeze()
        gc.set_threshold(*_usual)
        _usual = None


def usual_thresholds() -> tuple[int, int, int]:
    """The collector's thresholds that hold while no modules are imported."""
    return _usual or gc.get_threshold()


if ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None:
    importing()
