"""What a service is started with: what is served, to whom, and how."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fluidtune.serving.model_process import Loading
from symphony_serve.model_side import Batching, StartPolicy

if TYPE_CHECKING:
    from fluidtune.serving.model_leases import Leasing
    from fluidtune.serving.running_services import RunningService


@dataclass(frozen=True)
class Following:
    """How a search that still runs is followed: seconds between two looks at it, and how its trials are ranked."""

    every: float
    metric: str
    mode: str


@dataclass(frozen=True)
class PlacedModel:
    """One model of several. slo: seconds. rate: requests per second that are expected, cv: of their gaps.

    weight: what a request counts beside those of other models. bytes: of memory; None: they are measured.
    """

    name: str
    slo: float
    rate: float
    cv: float = 1.0
    weight: float = 1.0
    bytes: float | None = None


@dataclass(frozen=True)
class Placing:
    """Several models, of which each device holds some. memory: bytes that the models of a device take at most.

    seconds: that a search for a placement takes at most.
    """

    models: tuple[PlacedModel, ...]
    memory: float
    seconds: float


@dataclass(frozen=True)
class Setting:
    """What is served, to whom, and how.

    known: its name and user. host, port: where it listens. run: the directory of the run. folder: below that, for its
    log, profiles and copies of checkpoints. resources: a model process', by Ray's names. devices: how many there are;
    0: they are leases. leasing: how these are leased. modules: what model processes import, as far as is known; None:
    they are not forked. max_body: bytes of a request's body; None: `intake.largest_body` of the samples. token: whoever
    asks has it; None: anybody may. cors: origins of pages that may ask. following: the search; None: the run has ended.
    stages: processes into which the model is cut, which are a device then. room: bytes of weights in each of these.
    placing: several models, and ``slo`` is the longest of theirs; None: each device holds all trials.
    """

    known: RunningService
    host: str
    port: int
    run: str
    folder: str
    loading: Loading
    slo: float
    resources: dict[str, float]
    devices: int
    max_batch: int
    max_body: int | None
    policy: StartPolicy
    modules: tuple[str, ...] | None
    leasing: Leasing | None = None
    token: str | None = None
    cors: tuple[str, ...] = ()
    batching: Batching = Batching.AUTO
    following: Following | None = None
    stages: int = 1
    room: float = math.inf
    placing: Placing | None = None

    def slo_of(self, model: str) -> float:
        """Seconds within which a request to the model is answered."""
        placed = self.placing.models if self.placing is not None else ()
        return next((one.slo for one in placed if one.name == model), self.slo)
