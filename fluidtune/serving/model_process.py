"""The process of a device: it holds the models that it is told to, and runs one batch at a time."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray
from ray import cloudpickle

from fluidtune.cluster.forks.plain_process import NeedsPlainProcess
from fluidtune.cluster.sharing.beside import Turn
from fluidtune.cluster.sharing.gpu_probe import cuda_failure
from fluidtune.errors import FluidTuneError
from fluidtune.ray_compat.accelerators import VISIBLE_GPUS, adopt_environment
from fluidtune.serving.loaded_model import LoadedModel, Outcome, Packed, Samples, failed, in_a_line
from fluidtune.serving.model_layers import as_function
from fluidtune.serving.winners import Winner, mark_of
from symphony_serve.errors import ServeError

#: This module.
MODEL_PROCESS = __name__
#: Bytes of a GPU that a process takes before it has a tensor there. Judgement: CUDA's context with torch's kernels.
CONTEXT = 500 << 20


@dataclass(frozen=True)
class Loading:
    """How a process comes to the models.

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

    def functions(self) -> dict[bytes, Callable[..., Any]]:
        """Each ``load`` of the trials, in the process that calls it. Raises ServeError if it cannot be imported."""
        sys.path += [path for path in self.paths if path not in sys.path]
        return {one: function_of(one) for one in {trial.load or self.load for trial in self.trials}}


class Held(NamedTuple):
    """A model that was loaded into a process that runs: its samples, and the bytes that the process grew by."""

    samples: Samples
    bytes: int


class Place(NamedTuple):
    """Where a process is, and the memory of its machine and of its GPU, in bytes; of the GPU 0 without one.

    gpus: what CUDA lets it see. used, gpu_used: by this process. free, gpu_free: for others.
    """

    node: str
    gpus: str
    used: int
    free: int
    gpu_used: int
    gpu_free: int


@NeedsPlainProcess.handed_on_by
class ModelProcess:
    """Loads the models at its start. It is a Ray actor without restarts: the front starts another one.

    Raises ServeError if a model cannot be loaded, or cannot answer its own samples.
    """

    def __init__(self, loading: Loading):
        adopt_environment(loading.environment)
        functions = loading.functions()
        models = {trial.name: loaded(functions[trial.load or loading.load], trial) for trial in loading.trials}
        self._models = {name: LoadedModel(name, as_function(model)) for name, model in models.items()}
        self._turn = Turn("service", served=True) if loading.beside else None
        #: By name, what has become of models that were loaded since.
        self._told: dict[str, Held | BaseException] = {}

    def ready(self) -> tuple[int, dict[str, Samples]]:
        """This process' id, and the samples of each model."""
        return os.getpid(), {name: model.samples for name, model in self._models.items()}

    def hold(self, trial: Winner) -> None:
        """Begin to load one more model, beside the batches. `held` says what has become of it."""
        threading.Thread(target=self._hold, args=(trial,), name="serve-load", daemon=True).start()

    def _hold(self, trial: Winner) -> None:
        before = _memory()
        try:
            model = LoadedModel(trial.name, as_function(loaded(function_of(trial.load), trial)))
        except BaseException as error:
            self._told[trial.name] = error
            return
        self._models[trial.name] = model
        self._told[trial.name] = Held(model.samples, _grown(before, _memory()))

    def held(self, name: str) -> Held | None:
        """What has become of the model; None: it loads. Raises ServeError if it cannot be loaded."""
        told = self._told.pop(name, None)
        if isinstance(told, BaseException):
            raise told
        return told

    def drop(self, name: str) -> None:
        """Let go of the model and of its memory."""
        self._models.pop(name, None)
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        # What was freed goes back to the machine; only glibc has this.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)

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
        torch, gpu_used, gpu_free = sys.modules.get("torch"), 0, 0
        if torch is not None and torch.cuda.is_initialized():
            gpu_free, gpu_used = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved() + CONTEXT
        node = ray.get_runtime_context().get_node_id()
        return Place(node, os.environ.get(VISIBLE_GPUS, ""), used, free, gpu_used, gpu_free)

    def run(self, name: str, inputs: list[Packed]) -> tuple[list[Outcome], float]:
        """The batch's outcomes, and the seconds that it has waited for its turn.

        If the model fails with the batch, each input is tried alone, as it came.
        """
        with self._taken() as waited:
            return self._run(self._models[name], inputs), waited

    def _run(self, model: LoadedModel, inputs: list[Packed]) -> list[Outcome]:
        try:
            return model.attempt(inputs)
        except Exception as error:
            end_without_gpu()
            return [failed(error)] if len(inputs) == 1 else [self._run(model, [one])[0] for one in inputs]

    def measure(self, name: str, inputs: list[Packed]) -> tuple[list[Outcome], float]:
        """As `run`, but what fails raises: a batch that is too large for the memory is not to be measured."""
        with self._taken() as waited:
            return self._models[name].attempt(inputs), waited

    @contextlib.contextmanager
    def _taken(self) -> Iterator[float]:
        """The device, with the seconds that it was waited for."""
        with self._turn.taken() if self._turn else contextlib.nullcontext(0.0) as waited:
            yield waited


def _memory() -> tuple[int, int]:
    """Bytes of the GPU and of memory that this process has, without what nobody holds any more."""
    gc.collect()
    torch = sys.modules.get("torch")
    gpu = torch.cuda.memory_allocated() if torch is not None and torch.cuda.is_initialized() else 0
    return gpu, psutil.Process().memory_info().rss


def _grown(before: tuple[int, int], after: tuple[int, int]) -> int:
    """Bytes of a model that was loaded between two `_memory`: those of the GPU, if it has any there."""
    return after[0] - before[0] if after[0] > before[0] else max(0, after[1] - before[1])


def function_of(load: bytes) -> Callable[..., Any]:
    """A pickled ``load``. Raises ServeError if its module is not to be found."""
    try:
        return cloudpickle.loads(load)
    except ImportError as error:
        said = f"load cannot be imported on {platform.node()} ({error})"
        raise ServeError(f"{said}; put its module where every node finds it, for example into PYTHONPATH") from None


def end_without_gpu() -> None:
    """End this process if a kernel has failed: CUDA cannot be used in it any more. The front starts another one."""
    why = cuda_failure()
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
    except BaseException as error:  # A process may have other models, which are to stay.
        said = f"the checkpoint of trial {trial.name} does not load: {in_a_line(error)}"
        raise ServeError(f"{said}; check load and {trial.checkpoint.path}") from error
    if not callable(as_function(model)):
        said = f"load returned {type(model).__name__} for trial {trial.name}"
        raise ServeError(f"{said}, expected a function from a list of inputs to as many outputs")
    return model
