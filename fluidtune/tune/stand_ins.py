"""FluidTune's ``ray.tune.run`` and ``ray.tune.Tuner`` stand in for Ray's from the script's own import of Ray on.

Nothing else of the script or of Ray is changed. Before that import this file is all there is, and it is light.
"""

from __future__ import annotations

import _thread
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any

    from fluidtune.tune.executor import FluidExecutor

#: Ray, and our packages that import it.
FOLLOWED = {"ray", "fluidtune", "themis_bridge"}


class AtTheImportOfRay:
    """A finder that finds no module: it has FluidTune stand in after an outermost import of Ray's modules or ours.

    ``ray.train`` may import ``ray.tune`` when it is half imported itself, and FluidTune imports both. So may FluidTune.

    ``executor``: see `stand_in`.
    """

    def __init__(self, executor: FluidExecutor | None) -> None:
        self._executor = executor
        #: The threads that import one of these modules.
        self._importing: set[int] = set()
        self._begun = False

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in FOLLOWED or _thread.get_ident() in self._importing:
            return None
        others = (each for each in sys.meta_path if each is not self and hasattr(each, "find_spec"))
        spec: Any = next(filter(None, (each.find_spec(name, path, target) for each in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = lambda module: self._execute(module, spec.loader)
        return spec

    def _execute(self, module: Any, loader: Any) -> None:
        del loader.exec_module
        self._importing.add(_thread.get_ident())
        try:
            loader.exec_module(module)
            above, _, last = module.__name__.rpartition(".")
            if above:
                setattr(sys.modules[above], last, module)  # as Python does next
            if not self._begun and "ray" in sys.modules:
                self._begun = True
                around_init(self._executor)
            if self in sys.meta_path and hasattr(sys.modules.get("ray.tune"), "Tuner"):
                sys.meta_path.remove(self)  # type: ignore[arg-type]
                stand_in(self._executor)
        finally:
            self._importing.discard(_thread.get_ident())


def stand_in(executor: FluidExecutor | None) -> None:
    """From now on ``ray.tune.run`` and ``ray.tune.Tuner`` are FluidTune's.

    ``executor``: the settings of calls that name none; None: those that the script, or a restored run, has.
    """
    from fluidtune.ray_compat.entry_points import replace
    from fluidtune.tune import api

    api.of_the_command = executor
    replace(api.run, api.Tuner)


def around_init(executor: FluidExecutor | None) -> None:
    """From now on ``ray.init`` has the processes of trials prepared while it starts a Ray node."""
    import functools

    import ray

    from fluidtune import hash_seed
    from fluidtune.memory_trim import one_heap

    hash_seed.provide()
    one_heap()
    init = ray.init

    @functools.wraps(init)
    def starting(address: str | None = None, **kwargs: Any) -> Any:
        if address not in (None, "local") or ray.is_initialized():
            return init(address, **kwargs)
        from fluidtune.ray_compat.cluster_address import refuse_unjoinable
        from fluidtune.tune import api

        if address is None:
            refuse_unjoinable(kwargs.get("_temp_dir"))
        with api.ray_starts(executor or api.FluidExecutor(), kwargs.get("runtime_env") or {}):
            return init(address, **kwargs)

    ray.init = starting
