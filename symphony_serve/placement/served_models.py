"""What a placement is made of: models, the shapes in which GPUs can serve them, and groups of GPUs.

A *shape* OPxPP is PP stages in a pipeline (inter-operator parallelism) whose operators are each shared by OP GPUs
(intra-operator parallelism), so it has OP * PP GPUs. A *group* is that many GPUs with some models, which they serve in
turn. All times are seconds, all memory is bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from symphony_serve.errors import ServeError
from symphony_serve.placement.stages import cut_layers

#: A stage takes longer by this part of its time for each stage of the pipeline. Source: AlpaServe's simulator
#: (alpa-projects/mms); the paper names no number.
STAGE_OVERHEAD = 0.009


class Shape(NamedTuple):
    """GPUs that share each operator, and stages."""

    op: int
    pp: int

    @property
    def gpus(self) -> int:
        return self.op * self.pp

    def __str__(self) -> str:
        return f"{self.op}x{self.pp}"


@dataclass(frozen=True)
class Cut:
    """A model in a shape: seconds of each stage, bytes on each GPU of the largest stage.

    hop: seconds from one stage to the next, in which neither is busy.
    """

    seconds: tuple[float, ...]
    bytes: float = 0.0
    hop: float = 0.0

    def __post_init__(self) -> None:
        if not self.seconds:
            raise ServeError("there are no stages; give the seconds of 1 or more")
        for name, values, least in (("a stage", self.seconds, "above 0"), ("a hop", (self.hop,), "0 or more")):
            for value in values:
                if not 0 <= value < math.inf or (least == "above 0" and value == 0):
                    raise ServeError(f"{name} takes {value} s, expected finite seconds, {least}")
        if not 0 <= self.bytes < math.inf:
            raise ServeError(f"the largest stage has {self.bytes} bytes, expected a finite number of 0 or more")

    @property
    def latency(self) -> float:
        """Seconds from a request's start to its end, if nothing else runs."""
        return sum(self.seconds) + self.hop * (len(self.seconds) - 1)

    def slowed(self) -> Cut:
        """With the overhead of a pipeline: `STAGE_OVERHEAD` of a stage's time for each stage."""
        factor = 1 + STAGE_OVERHEAD * len(self.seconds)
        return Cut(tuple(one * factor for one in self.seconds), self.bytes, self.hop)


@dataclass(frozen=True)
class ServedModel:
    """A model, and what is asked of it. slo: seconds within which a request is answered.

    weight: what a request counts beside those of other models. delay: seconds of a request outside the stages.
    """

    name: str
    cuts: Mapping[Shape, Cut]
    slo: float
    weight: float = 1.0
    delay: float = 0.0

    @property
    def alone(self) -> float:
        """Seconds on the fewest GPUs on which it is known: one, mostly. It decides about the model's bucket."""
        return self.cuts[min(self.cuts, key=lambda shape: (shape.gpus, shape))].latency

    @property
    def gpu_seconds(self) -> float:
        """The least GPU-seconds of one request, of all cuts."""
        return min(shape.op * sum(cut.seconds) for shape, cut in self.cuts.items())


class Group(NamedTuple):
    """GPUs of one shape, and the numbers of the models that they hold."""

    shape: Shape
    models: tuple[int, ...]


def cuts_of_layers(seconds: Sequence[float], weights: Sequence[float], hop: float = 0.0) -> dict[Shape, Cut]:
    """The cuts of a model with these layers: 1, 2, 4 and 8 stages (AlpaServe's), as far as there are layers.

    ``seconds``: of each layer, ``weights``: the bytes of each layer. Raises ServeError if they are not equally many.
    """
    if len(seconds) != len(weights) or not seconds:
        raise ServeError(f"{len(seconds)} seconds and {len(weights)} bytes of layers; give both of each layer")
    found = {}
    for count in (1, 2, 4, 8):
        if count <= len(seconds):
            parts = cut_layers(seconds, count)
            times = tuple(sum(seconds[layer] for layer in part) for part in parts)
            found[Shape(1, count)] = Cut(times, max(sum(weights[layer] for layer in part) for part in parts), hop)
    return found
