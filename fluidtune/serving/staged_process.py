"""The process of a stage: it loads the model, keeps the layers of its stage, and runs them on what comes to it.

The processes of a group form a chain. What one returns is what Ray hands to the next one: the front has references
only. All times are seconds.
"""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

from fluidtune.cluster.forks.plain_process import NeedsPlainProcess
from fluidtune.ray_compat.accelerators import adopt_environment
from fluidtune.serving.loaded_model import LoadedModel, Outcome, Packed, Samples, called, failed, outcome_of, outputs_of
from fluidtune.serving.model_layers import Layer, Stage, carried, layers_of, writable
from fluidtune.serving.model_process import Loading, end_without_gpu, loaded
from symphony_serve.errors import ServeError
from symphony_serve.placement.stages import cut_layers


class Started(NamedTuple):
    """What the processes of a group that are ready have said so far: their ids, the samples, and how the model is cut.

    No stages: the first process measures the layers, and cuts.
    """

    pids: tuple[int, ...]
    samples: dict[str, Samples]
    stages: tuple[Stage, ...]


class Passed(NamedTuple):
    """A batch on its way. value: for the next stage; after the last one, the outcomes. inputs: how many there are.

    seconds: of the stages that it has passed. failed: what a stage has raised, as an outcome.
    """

    value: Any
    inputs: int
    seconds: tuple[float, ...] = ()
    failed: Outcome | None = None


@NeedsPlainProcess.handed_on_by
class StageProcess:
    """Stage ``number`` of ``count``, each with ``room`` bytes of weights at most. A Ray actor without restarts.

    Raises ServeError if the model cannot be loaded, or not be cut.
    """

    def __init__(self, loading: Loading, number: int, count: int, room: float):
        adopt_environment(loading.environment)
        (trial,) = loading.trials
        self._name, self._number, self._count, self._room = trial.name, number, count, room
        model = loaded(loading.function(), trial)
        layers = layers_of(model)
        if layers is None:
            said = f"load returned {type(model).__name__} for trial {trial.name}, which has no layers to cut"
            raise ServeError(
                f"{said}; return a torch.nn.Sequential, or give it an attribute stages: a list of functions"
            )
        if (there := len(layers.functions)) < count:
            said = f"the model of trial {trial.name} has {there} layers, and {count} stages are to be made of it"
            raise ServeError(f"{said}; ask for at most {there}")
        self._layers = layers

    def ready(self, before: Started) -> Started:
        """Keep the layers of this stage. The first stage finds out before which these are, unless it is told.

        Raises ServeError if the model fails with its samples, or the stages have no room.
        """
        if not self._number:
            whole = self._whole = LoadedModel(self._name, self._layers)
            one = whole.batch([Packed.of(whole.samples.inputs[0])])
            before = Started((), {self._name: whole.samples}, before.stages or self._cut(self._layers.measured(one)))
        self._layers.keep(before.stages[self._number])
        return before._replace(pids=(*before.pids, os.getpid()))

    def _cut(self, layers: list[Layer]) -> tuple[Stage, ...]:
        seconds, weights = [one.seconds for one in layers], [one.weights for one in layers]
        return tuple(
            Stage(
                part.start,
                part.stop,
                sum(seconds[part.start : part.stop]),
                sum(weights[part.start : part.stop]),
                layers[part.stop - 1].activations,
            )
            for part in cut_layers(seconds, self._count, weights, self._room)
        )

    def alive(self, before: None) -> None:
        """The process answers, so it can answer others."""

    def run(self, batch: Passed) -> Passed:
        """The batch after this stage. What the model raises is passed on to the end."""
        if batch.failed is not None:
            return batch
        began = time.monotonic()
        try:
            value = self._run(batch)
        except Exception as error:
            end_without_gpu()
            return batch._replace(value=None, failed=failed(error, f" in stage {self._number}"))
        return batch._replace(value=value, seconds=(*batch.seconds, time.monotonic() - began))

    def run_first(self, batch: Passed) -> tuple[Passed, None]:
        """As `run`, in the first of several stages. What is returned besides says that the next batch can come."""
        return self.run(batch), None

    def _run(self, batch: Passed) -> Any:
        if self._number < self._count - 1:
            return called(self._after, batch.value)
        return [outcome_of(one) for one in outputs_of(self._name, self._after, batch.value, batch.inputs)]

    def _after(self, value: Any) -> Any:
        """What this stage makes of what has come to it."""
        value = writable(value) if self._number else self._layers.begin(self._whole.batch(value))
        return carried(self._layers.run(value))
