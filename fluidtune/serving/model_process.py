"""The process of a model: it loads the model, and runs one batch at a time."""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray
from ray import cloudpickle

from fluidtune.cluster.forks.plain_process import NeedsPlainProcess
from fluidtune.cluster.sharing.beside import Turn
from fluidtune.cluster.sharing.gpu_probe import failure_of_device
from fluidtune.device_kinds import started
from fluidtune.errors import FluidTuneError
from fluidtune.ray_compat.accelerators import adopt_environment
from fluidtune.serving.loaded_model import LoadedModel, Outcome, Packed, Samples, failed, in_a_line
from fluidtune.serving.model_layers import as_function
from fluidtune.serving.winners import Winner, mark_of
from salus_share.memory import CONTEXT
from symphony_serve.errors import ServeError

MODEL_PROCESS = __name__


@dataclass(frozen=True)
class Loading:
    """How processes come to the models, each to one.

    load: a pickled ``load(checkpoint_directory, config)``, for trials without one of their own. paths: of the process
    that pickled it, to import from. beside: the process takes turns with trials. environment: variables that it sets
    first.
    """

    load: bytes
    paths: tuple[str, ...]
    trials: tuple[Winner, ...]
    beside: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, load: Callable[..., Any], trials: Sequence[Winner], beside: bool = False) -> Loading:
        """Raises FluidTuneError if ``load`` cannot be sent to another process."""
        try:
            pickled = cloudpickle.dumps(load)
        except Exception as error:
            raise FluidTuneError(f"load={load!r} cannot be sent to another process ({error}); define it in a module")
        return cls(pickled, tuple(sys.path), tuple(trials), beside)

    def each(self) -> dict[str, Loading]:
        """How a process comes to each of the models, by name."""
        return {trial.name: replace(self, trials=(trial,)) for trial in self.trials}

    def function(self) -> Callable[..., Any]:
        """The ``load`` of the one trial, in the process that calls it. Raises ServeError if it cannot be imported."""
        sys.path += [path for path in self.paths if path not in sys.path]
        try:
            return cloudpickle.loads(self.trials[0].load or self.load)
        except ImportError as error:
            said = f"load cannot be imported on {platform.node()} ({error})"
            raise ServeError(f"{said}; put its module where every node finds it, for example into PYTHONPATH") from None


class Ready(NamedTuple):
    """What a process says when it has loaded its model: its id, the samples, and the bytes by which it grew."""

    pid: int
    samples: Samples
    bytes: int


class Place(NamedTuple):
    """Where a process is, and the memory of its machine and of its GPU, in bytes; of the GPU 0 without one.

    used, gpu_used: by this process. free, gpu_free: for others.
    """

    node: str
    used: int
    free: int
    gpu_used: int
    gpu_free: int


@NeedsPlainProcess.handed_on_by
class ModelProcess:
    """Loads the model at its start. It is a Ray actor without restarts: the front starts another one.

    Raises ServeError if the model cannot be loaded, or cannot answer its own samples.
    """

    def __init__(self, loading: Loading):
        adopt_environment(loading.environment)
        (trial,) = loading.trials
        function, before = loading.function(), _memory()
        self._model = LoadedModel(trial.name, as_function(loaded(function, trial)))
        self._bytes = _grown(before, _memory())
        #: Takes the device, and says for how many seconds that was waited for.
        self._taken = Turn("service", served=True).taken if loading.beside else lambda: contextlib.nullcontext(0.0)

    def ready(self) -> Ready:
        """It has loaded the model."""
        return Ready(os.getpid(), self._model.samples, self._bytes)

    def alive(self) -> None:
        """The process answers, so it can answer others."""

    def place(self) -> Place:
        """Where it is, and what memory there is."""
        used, free = psutil.Process().memory_info().rss, psutil.virtual_memory().available
        # A container has its own limit; files that it has cached can be let go.
        with contextlib.suppress(OSError, ValueError, IndexError):
            limit, taken = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
            cached = Path("/sys/fs/cgroup/memory.stat").read_text().split("inactive_file ", 1)[1].split()[0]
            free = min(free, limit - taken + int(cached))
        gpu_used, gpu_free = 0, 0
        for gpu in started().values():
            gpu_free, gpu_used = gpu.mem_get_info()[0], gpu.memory_reserved() + CONTEXT
        node = ray.get_runtime_context().get_node_id()
        return Place(node, used, free, gpu_used, gpu_free)

    def run(self, inputs: list[Packed]) -> tuple[list[Outcome], float]:
        """The batch's outcomes, and the seconds that it has waited for its turn.

        If the model fails with the batch, each input is tried alone, as it came.
        """
        with self._taken() as waited:
            return self._run(inputs), waited

    def _run(self, inputs: list[Packed]) -> list[Outcome]:
        try:
            return self._model.attempt(inputs)
        except Exception as error:
            end_without_gpu()
            return [failed(error)] if len(inputs) == 1 else [self._run([one])[0] for one in inputs]

    def measure(self, inputs: list[Packed]) -> tuple[list[Outcome], float]:
        """As `run`, but what fails raises: a batch that is too large for the memory is not to be measured."""
        with self._taken() as waited:
            return self._model.attempt(inputs), waited


def _memory() -> tuple[int, int]:
    """Bytes of the GPU and of memory that this process has, without what nobody holds any more."""
    gc.collect()
    return sum(each.memory_allocated() for each in started().values()), psutil.Process().memory_info().rss


def _grown(before: tuple[int, int], after: tuple[int, int]) -> int:
    """Bytes that a model takes: those of the GPU, if it has any there, with those of the process there."""
    return after[0] - before[0] + CONTEXT if after[0] > before[0] else max(0, after[1] - before[1])


def end_without_gpu() -> None:
    """End this process if a kernel has failed: CUDA cannot be used in it any more. The front starts another one."""
    why = failure_of_device()
    if why is not None:
        print(f"fluidtune: the process of the models ends, because CUDA cannot be used any more: {why}", flush=True)
        os._exit(1)


def loaded(load: Callable[..., Any], trial: Winner) -> Any:
    """What ``load`` returns for the trial. Raises ServeError if it fails, or returns nothing that can be called."""
    try:
        with trial.checkpoint.as_directory() as directory:
            if trial.mark and mark_of(directory) != trial.mark:
                said = f"the files of model {trial.name} have changed since it was placed"
                raise ServeError(f"{said}; stop the service and start it anew, with {trial.checkpoint.path} as it is")
            model = load(directory, dict(trial.config))
    except ServeError:
        raise
    except NeedsPlainProcess:
        raise
    except BaseException as error:
        said = f"the checkpoint of trial {trial.name} does not load: {in_a_line(error)}"
        raise ServeError(f"{said}; check load and {trial.checkpoint.path}") from error
    if not callable(as_function(model)):
        said = f"load returned {type(model).__name__} for trial {trial.name}"
        raise ServeError(f"{said}, expected a function from a list of inputs to as many outputs")
    return model
