"""One ``PYTHONHASHSEED`` for all workers of a job, so that the order of a set of strings is the same in all of them.

Without it each process hashes strings in its own way, and a vocabulary made from ``set(words)`` has other ids when its
trial goes on in another process. Python reads the variable when a process starts, so it has to be in the environment
that Ray gives its workers. Two ways lead there:

- A cluster that is started by this process inherits this process' environment. So FluidTune sets the variable when it
  is imported (`provide`), unless it is set or Ray is running already. This costs nothing.
- Otherwise the workers get it by a ``runtime_env`` (`runtime_env`). Such a worker cannot be one of the processes that
  Ray keeps ready, and starts through one more process: measured on two cores, 0.9 s instead of 0.5 s, once a worker.

A value of the user's holds, in the environment of this process or in the ``runtime_env`` of the job. Tune saves the
value with the run: a restored one goes on with it (`go_on_with`), because its commits have vocabularies made with it.
It is drawn for each run, as processes that hash what strangers send may inherit it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

VARIABLE = "PYTHONHASHSEED"
#: The value that FluidTune has set, in the environment that child processes inherit: another one is the user's.
OURS = "FLUIDTUNE_DREW_PYTHONHASHSEED"
#: The values that this process has set.
drawn: list[str] = []


def provide() -> None:
    """Set the variable in this process, for clusters that it will start; called when FluidTune is imported."""
    ray = sys.modules.get("ray")
    in_a_worker = "RAY_RAYLET_PID" in os.environ  # Ray sets it for the processes that it starts
    if VARIABLE not in os.environ and not in_a_worker and (ray is None or not ray.is_initialized()):
        _draw()


def take_back() -> None:
    """Undo `provide`: the script of `fluidtune run` is to find the environment as it was given."""
    if drawn and os.environ.get(VARIABLE) == drawn[-1]:
        del os.environ[VARIABLE], os.environ[OURS]


def go_on_with(value: str) -> None:
    """Let workers from now on have the value of an earlier driver's run, unless the user has given one."""
    ours = os.environ.get(VARIABLE) == os.environ.get(OURS) or not _is_set()
    if ours and value.isdecimal() and int(value) < 2**32:
        _set(value)


def of_workers(job: Mapping[str, Any]) -> str:
    """The value that the job's workers have, drawn if there was none. ``job``: the job's own ``runtime_env``."""
    said = job.get("env_vars", {}).get(VARIABLE)
    if said is None and not _is_set():
        _draw()
    return str(said or os.environ[VARIABLE])


def runtime_env(nodes: int, job: Mapping[str, Any], also: Mapping[str, str]) -> dict[str, Any] | None:
    """The ``runtime_env`` for the job's workers; None: they have the variables without it.

    ``nodes``: the number of the cluster's nodes. ``job``: the job's own ``runtime_env``. ``also``: other variables that
    they must have when they start.
    """
    wanted = {**also, **({} if VARIABLE in job.get("env_vars", {}) else {VARIABLE: of_workers(job)})}
    return {"env_vars": wanted} if wanted and _nodes_with(wanted) < nodes else None


def _is_set() -> bool:
    return os.environ.get(VARIABLE, "random") != "random"


def _draw() -> None:
    _set(str(int.from_bytes(os.urandom(4), "little")))


def _set(value: str) -> None:
    drawn.append(value)
    os.environ[VARIABLE] = os.environ[OURS] = value


def _nodes_with(wanted: Mapping[str, str]) -> int:
    """How many of the nodes that this process has started have given these variables to their workers."""
    from contextlib import suppress  # here, because every import of FluidTune comes by

    import psutil

    found = 0
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if child.name() == "raylet" and wanted.items() <= child.environ().items():
                found += 1
    return found
