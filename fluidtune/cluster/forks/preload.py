"""What a fork server imports: packages of a short list, as far as the driver has imported them.

A package is on the list if its import leaves what forks can share: no thread, no child process, no CUDA, no open file,
and no draw that two forks would have in common. tests/cluster/forks/test_listed.py holds that for each of them, by its
newest release. Every other package a child imports itself, as a new process does.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from types import ModuleType

from fluidtune.code_origin import is_installed
from fluidtune.device_kinds import KINDS
from fluidtune.ray_compat import worker_program

#: How the names of environment variables begin that compiled code reads when it is loaded: OpenMP's, MKL's and
#: OpenBLAS' documented ones, and the allocators'. CUDA and NCCL read theirs at first use.
NATIVE = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NUMEXPR_", "TBB_"),
    *("MALLOC_", "JE_", "JEMALLOC_", "MIMALLOC_", "ARROW_"),
)
#: The list: package -> how the names of the variables begin that it reads at its import.
LISTED: dict[str, tuple[str, ...]] = {
    "numpy": ("NPY_", "NUMPY_", *NATIVE),
    "scipy": ("SCIPY_",),
    "pandas": ("PANDAS_",),
    "sklearn": ("SKLEARN_", "SCIPY_", "JOBLIB_", "LOKY_"),
    "matplotlib": ("MPL", "MATPLOTLIBRC", "PILLOW_"),
    "torch": ("TORCH", "PYTORCH_", "ATEN_", "AOT", "FX_", *NATIVE),
    "torchvision": ("PYTORCH_", "PILLOW_"),
    "ray": ("RAY_",),
    "lightning": ("HF_", "KERAS_BACKEND", "USE_TORCH_XLA", "MLFLOW_TRACKING_URI", "POSSIBLE_USER_WARNINGS"),
    "pytorch_lightning": ("HF_", "KERAS_BACKEND", "USE_TORCH_XLA", "MLFLOW_TRACKING_URI", "POSSIBLE_USER_WARNINGS"),
    "transformers": ("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "USE_T", "DISABLE_TELEMETRY", "DO_NOT_TRACK"),
    "accelerate": ("HF_", "HUGGINGFACE_", "ACCELERATE_", "USE_TORCH_XLA"),
    "keras": ("KERAS_",),
    "xgboost": ("XGBOOST_", *NATIVE),
    "lightgbm": ("LIGHTGBM_", *NATIVE),
    "optuna": ("OPTUNA_",),
    "tensorboard": (),
    "tensorboardX": ("CRC32C_",),
    "mlflow": ("MLFLOW_",),
    "sqlalchemy": (),
    "alembic": (),
}
#: What a server sets while it imports, so that no device is started.
QUIET = {kind.quiet: "1" for kind in KINDS.values() if kind.quiet is not None}
#: Variables that may differ all the same: Ray reads these later, and torch its switches at each look.
MAY_DIFFER = {*QUIET, *worker_program.READ_LATER}
#: What every worker of FluidTune's imports.
_OF_WORKERS = (worker_program.MODULE, "fluidtune.cluster.hosting.worker")
#: Packages that import Ray.
_WITH_RAY = {"ray", "fluidtune"}
#: What torch imports when it is first used, and a driver therefore has not: its compiler, when the first optimizer is
#: made; and what a trial that commits or grows imports.
_WITH_TORCH = (
    "torch._dynamo",
    "fluidtune.elastic.session",
    "fluidtune.elastic.divided.follower",
    "fluidtune.elastic.divided.module_calls",
)


def listed_modules(modules: Mapping[str, ModuleType]) -> list[str]:
    """The names among these of modules of listed packages, in their order, where the package is an installed one."""
    found = []
    for name, module in list(modules.items()):
        listed = name.partition(".")[0] in LISTED and is_installed(module)
        if listed and object.__getattribute__(module, "__dict__").get("__name__") == name:  # a lazy one is not loaded
            found.append(name)
    return found


def modules_of_trials() -> tuple[list[str], list[str]]:
    """What the trials of this driver will import: what the driver has imported of the list, and the worker.

    What needs no Ray comes first, as far as its name says so.
    """
    found = listed_modules(sys.modules)
    return _in_order([*_OF_WORKERS, *found, *(_WITH_TORCH if "torch" in found else ())])


def modules_of_program(modules: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """What a server imports for a program of Ray's, in two parts as in `modules_of_trials`. None: what this one has."""
    return _in_order([worker_program.MODULE, *(listed_modules(sys.modules) if modules is None else modules)])


def _in_order(names: list[str]) -> tuple[list[str], list[str]]:
    first = [name for name in names if name.partition(".")[0] not in _WITH_RAY]
    return first, [name for name in names if name.partition(".")[0] in _WITH_RAY]


def fill(names: Sequence[str]) -> dict[str, str]:
    """Import the modules in this order. Returns which of them could not be imported, with the reason."""
    failed: dict[str, str] = {}
    with ExitStack() as meanwhile:
        if any(name.partition(".")[0] in _WITH_RAY for name in names):
            from fluidtune.ray_compat.random_ids import undrawn

            meanwhile.enter_context(undrawn())
        for name in names:
            try:
                importlib.import_module(name)
            except BaseException as error:  # an import may even end the process
                failed[name] = f"{type(error).__name__}: {error}"
    return failed


def reads() -> tuple[str, ...]:
    """How the names of variables begin that the listed packages have read which this process has imported."""
    return tuple({each for package, found in LISTED.items() if package in sys.modules for each in found})


def unfit() -> str | None:
    """Why no fork of this process is what a new one would be; None: none is known. It backs what tests hold."""
    threads = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
    if threads:
        return f"an import has started a thread ({', '.join(threads)})"
    with suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return "an import has started a process"
    started = next((kind.noun for kind in KINDS.values() if kind.started()), None)
    return None if started is None else f"an import has started a {started}"
