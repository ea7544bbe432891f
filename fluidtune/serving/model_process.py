"""The process of a model, or of one of its stages: it loads the model, and runs one batch at a time.

The processes of a model in stages form a chain: each keeps the layers of its stage. What one returns is what Ray hands
to the next one: the front has references only. A whole model is a chain of one. All times are seconds.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import platform
import sys
import time
import traceback
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
from fluidtune.serving.loaded_model import (
    LoadedModel,
    Outcome,
    Packed,
    Samples,
    called,
    failed,
    in_a_line,
    outcome_of,
    outputs_of,
)
from fluidtune.serving.model_layers import Layer, Layers, Stage, as_function, carried, layers_of, writable
from fluidtune.serving.winners import Winner, mark_of
from salus_share.memory import CONTEXT
from symphony_serve.errors import ServeError
from symphony_serve.placement.stages import cut_layers

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


class Started(NamedTuple):
    """What the processes of a chain that are ready have said so far: their ids, the samples, and how the model is cut.

    No stages: the model is whole, or the first process measures the layers, and cuts. bytes: by which the first process
    grew; of a chain this is the whole model, before each process keeps its layers.
    """

    pids: tuple[int, ...] = ()
    samples: Samples = Samples([], [])
    stages: tuple[Stage, ...] = ()
    bytes: int = 0


class Passed(NamedTuple):
    """A batch on its way. value: for the next stage; after the last one, the outcomes. inputs: how many there are.

    seconds: of the stages that it has passed. failed: what the model has raised, as an outcome. waited: seconds for the
    turn of the last stage; those of a chain take no turns.
    """

    value: Any
    inputs: int
    seconds: tuple[float, ...] = ()
    failed: Outcome | None = None
    waited: float = 0.0


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

    It runs stage ``number`` of ``count``, each with ``room`` bytes of weights at most; of one stage, the whole model.
    Raises ServeError if the model cannot be loaded, cannot be cut, or cannot answer its own samples.
    """

    def __init__(self, loading: Loading, number: int = 0, count: int = 1, room: float = math.inf):
        adopt_environment(loading.environment)
        (trial,) = loading.trials
        self._name, self._number, self._count, self._room = trial.name, number, count, room
        function, before = loading.function(), _memory()
        model = loaded(function, trial)
        self._layers = _layers(model, trial.name, count) if count > 1 else None
        if not number:
            self._model = LoadedModel(trial.name, self._layers or as_function(model))
        self._bytes = _grown(before, _memory())
        #: Takes the device, and says for how many seconds that was waited for.
        self._taken = Turn("service", served=True).taken if loading.beside else lambda: contextlib.nullcontext(0.0)

    def ready(self, before: Started) -> Started:
        """It has loaded the model, and keeps the layers of its stage.

        The first process finds out which layers each stage has, unless it is told. Raises ServeError if the stages have
        no room.
        """
        if not self._number:
            before = before._replace(samples=self._model.samples, bytes=self._bytes)
        if self._layers is not None:
            if not before.stages:
                before = before._replace(stages=self._cut(self._layers))
            self._layers.keep(before.stages[self._number])
        return before._replace(pids=(*before.pids, os.getpid()))

    def _cut(self, layers: Layers) -> tuple[Stage, ...]:
        found: list[Layer] = layers.measured(self._model.batch([Packed.of(self._model.samples.inputs[0])]))
        seconds, weights = [one.seconds for one in found], [one.weights for one in found]
        return tuple(
            Stage(
                part.start,
                part.stop,
                sum(seconds[part.start : part.stop]),
                sum(weights[part.start : part.stop]),
                found[part.stop - 1].activations,
            )
            for part in cut_layers(seconds, self._count, weights, self._room)
        )

    def alive(self, before: Any) -> None:
        """The process answers, so it can answer others."""

    def place(self, before: Any) -> Place:
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

    def run(self, batch: Passed) -> Passed:
        """The batch after this stage. If a whole model fails with the batch, each input is tried alone, as it came."""
        with self._taken() as waited:
            tried = self._tried(batch)
            if tried.failed is not None and self._count == 1 and batch.inputs > 1:
                alone = [self._tried(Passed([one], 1)) for one in batch.value]
                tried = Passed([one.failed or one.value[0] for one in alone], batch.inputs)
        return tried._replace(waited=waited)

    def run_first(self, batch: Passed) -> tuple[Passed, None]:
        """As `run`, in the first of several stages. What is returned besides says that the next batch can come."""
        return self.run(batch), None

    def measure(self, batch: Passed) -> Passed:
        """As `run`, but nothing is tried again: a batch that is too large for the memory is not to be measured."""
        with self._taken() as waited:
            return self._tried(batch, tells=True)._replace(waited=waited)

    def _tried(self, batch: Passed, tells: bool = False) -> Passed:
        """The batch after this stage. What the model raises is passed on to the end. tells: and its lines printed."""
        if batch.failed is not None:
            return batch
        began = time.monotonic()
        try:
            value = self._model.attempt(batch.value) if self._layers is None else self._in_stage(batch)
        except Exception as error:
            end_without_gpu()
            if tells:
                traceback.print_exc()
            where = f" in stage {self._number}" if self._count > 1 else ""
            return batch._replace(value=None, failed=failed(error, where))
        return batch._replace(value=value, seconds=(*batch.seconds, time.monotonic() - began))

    def _in_stage(self, batch: Passed) -> Any:
        if self._number < self._count - 1:
            return called(self._after, batch.value)
        return [outcome_of(one) for one in outputs_of(self._name, self._after, batch.value, batch.inputs)]

    def _after(self, value: Any) -> Any:
        """What this stage makes of what has come to it."""
        assert self._layers is not None
        value = writable(value) if self._number else self._layers.begin(self._model.batch(value))
        return carried(self._layers.run(value))


def _layers(model: Any, name: str, count: int) -> Layers:
    """The layers of the model of this trial. Raises ServeError if it has none, or fewer than ``count``."""
    layers = layers_of(model)
    if layers is None:
        said = f"load returned {type(model).__name__} for trial {name}, which has no layers to cut"
        raise ServeError(f"{said}; return a torch.nn.Sequential, or give it an attribute stages: a list of functions")
    if (there := len(layers.functions)) < count:
        said = f"the model of trial {name} has {there} layers, and {count} stages are to be made of it"
        raise ServeError(f"{said}; ask for at most {there}")
    return layers


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
