"""`fluidtune run SCRIPT`: run an unmodified Ray Tune script under FluidTune.

The script runs as ``python SCRIPT`` would run it, after ``ray.tune.run`` and ``ray.tune.Tuner`` have been replaced by
FluidTune's. Nothing else of the script or of Ray is changed.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fluidtune.errors import FluidTuneError
from fluidtune.ray_compat.entry_points import around_init, replaced
from fluidtune.tune import api
from fluidtune.tune.executor import FluidExecutor


@contextmanager
def standing_in(executor: FluidExecutor) -> Iterator[list[str]]:
    """While this is open, ``ray.tune.run`` and ``ray.tune.Tuner`` are FluidTune's. Yields the names called so far."""
    called: list[str] = []
    # Without settings on the command line, the script's own executor or a restored one is used.
    given = executor if executor != FluidExecutor() else None

    def run(*args: Any, **kwargs: Any) -> Any:
        called.append("ray.tune.run")
        kwargs.setdefault("executor", given)
        return api.run(*args, **kwargs)

    class Tuner(api.Tuner):
        def __init__(self, *args: Any, **kwargs: Any):
            kwargs.setdefault("executor", given)
            super().__init__(*args, **kwargs)

        @classmethod
        def restore(cls, path: str, trainable: Any, **kwargs: Any) -> Any:
            kwargs.setdefault("executor", given)
            return super().restore(path, trainable, **kwargs)

        def fit(self) -> Any:
            called.append("ray.tune.Tuner")
            return super().fit()

    with replaced(run, Tuner), around_init(lambda runtime_env: api.ray_starts(executor, runtime_env)):
        yield called


def run_script(script: str, args: Sequence[str], executor: FluidExecutor) -> None:
    """Run the script as ``__main__`` with its arguments.

    Raises:
        FluidTuneError: there is no such script, or it called neither ``ray.tune.run`` nor ``ray.tune.Tuner.fit``.
        Whatever the script raises.
    """
    path = Path(script)
    if not path.is_file():
        raise FluidTuneError(f"there is no script {script!r}; give the path of a Python file")
    argv, search = sys.argv, list(sys.path)
    sys.argv = [str(path), *args]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with standing_in(executor) as called:
            try:
                runpy.run_path(str(path), run_name="__main__")
            except SystemExit as leaving:
                # Many scripts end with `sys.exit(main())`. One that did so without a run gets the message below.
                if leaving.code not in (None, 0) or called:
                    raise
    finally:
        sys.argv, sys.path[:] = argv, search
    if not called:
        raise FluidTuneError(
            f"{script} ended without calling ray.tune.run or ray.tune.Tuner(...).fit(), so there was nothing "
            "for FluidTune to execute; is the call behind a condition or an argument?"
        )
