"""Collects less garbage while a worker process imports FluidTune's worker and, through it, Ray Tune.

`worker` imports this module before all others, because Ray Tune brings pandas and pyarrow, two thirds of what a new
process computes before the imports of its first trial (`python -m benchmarks.imports`). It holds until that trial's
modules are imported (`Worker.load`, `Worker.join`): see `fluidtune.startup`. A driver's collector is left alone.
"""

from __future__ import annotations

import ray

from fluidtune import startup

if ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None:
    startup.importing()
