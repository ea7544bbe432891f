"""All that goes into the serving room and comes out of it, as plain frozen dataclasses. All times are seconds.

Events say what happened, instructions what the shell or the twin must do. A time is a reading of one clock: that of the
process which decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

#: Two times that differ by less are the same moment, s: far above the rounding error of a clock that counts years in
#: seconds (2e-8), far below any latency.
SAME_MOMENT_S = 1e-7


class Reason(str, Enum):
    """Why a request gets no answer. The frontend sends the text with the status 503."""

    #: No batch that holds it could start early enough.
    LATE = "it could not have been answered before its deadline"
    #: It could have been answered, but only in a batch so small that more requests behind it would have been lost.
    MAKES_WAY = "it was too late for a batch of the size that the load needs"
    #: It came so late that even a batch of 1, started at once, would end too late.
    LATE_ON_ARRIVAL = "its deadline was too near when it came"
    #: Its batch takes longer than any before it, or its body was not read in time.
    OVERDUE = "its answer was not there at its deadline"
    #: It was not even read: what waits before it takes too long.
    QUEUE_FULL = "too many requests wait before it"
    #: Its GPU was lost, and no other one could run it in time.
    GPU_LOST = "its GPU was lost and its deadline was too near for another one"
    #: It may be what ends the process of its GPU, so it gets no third one.
    LOST_TWICE = "two GPUs were lost while they ran it"
    #: Its sender does not want the answer any more.
    CANCELLED = "it was cancelled"
    #: No model of that name is served.
    UNKNOWN_MODEL = "no model of that name is served"
    #: The server was closed before its batch was sent.
    CLOSED = "the server was closed"
    #: The server was closed after its batch was sent.
    CUT_OFF = "the server was closed when a model may have had it"


#: The reasons of requests that a model may have seen. One that was sent to a GPU is refused for no other reason.
MAY_HAVE_RUN = frozenset({Reason.OVERDUE, Reason.GPU_LOST, Reason.LOST_TWICE, Reason.CANCELLED, Reason.CUT_OFF})


@dataclass(frozen=True, slots=True)
class Request:
    """One question to a model.

    id: names the request; smaller ids go first among equal deadlines.
    arrival: when it came. deadline: when its answer must be there (an answer at the deadline is in time).
    source: where times vary, requests of one source take times of one distribution; empty: nobody named one.
    """

    id: int
    model: str
    arrival: float
    deadline: float
    source: str = ""


class Event:
    """Something that happened."""

    __slots__ = ()


class Instruction:
    """Something that the shell must do."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class RequestArrived(Event):
    """A request came."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancelled(Event):
    """The answer to a request is not wanted any more. Once its batch was sent, nothing changes."""

    model: str
    request: int


@dataclass(frozen=True, slots=True)
class ModelAdded(Event):
    """One more model is served. All GPUs have it, but those that joined with a set of models.

    model: a `model_side.Model`.
    """

    model: Any


@dataclass(frozen=True, slots=True)
class ModelRemoved(Event):
    """A model takes no request any more. Those that it has are answered or refused, then `ModelGone` follows."""

    model: str


@dataclass(frozen=True, slots=True)
class BatchTook(Event):
    """A batch of a model took ``seconds``, after it had ``waited`` for its turn.

    Comes for each batch whose outputs are there, after its `BatchDone`. It also comes for a batch that was given up:
    otherwise nobody would learn that batches have become so long.
    """

    model: str
    requests: tuple[Request, ...]
    seconds: float
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class GpuJoined(Event):
    """A GPU can be used, with these models loaded; None: with all, also those that are added later.

    token: names the time for which it is ours. A GPU that comes back has a larger one.
    """

    gpu: int
    token: int
    models: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class GpuHolds(Event):
    """A GPU has these models from now on, and gets no batch of another one. None: it has all."""

    gpu: int
    models: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class GpuLeaving(Event):
    """The GPU will be taken away: it gets no batch any more."""

    gpu: int


@dataclass(frozen=True, slots=True)
class GpuLost(Event):
    """The GPU is gone, with all that was sent to it. begun: the plans of the batches that may run; None: all."""

    gpu: int
    begun: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class BatchDone(Event):
    """A GPU has finished the batch of a `Dispatch`, which ``token`` and ``plan`` name."""

    gpu: int
    token: int
    plan: int


@dataclass(frozen=True, slots=True)
class BatchPassed(Event):
    """The batch has left the first stage of a GPU that is a pipeline, so that the GPU can start the next one."""

    gpu: int
    token: int
    plan: int


@dataclass(frozen=True, slots=True)
class StoodStill(Event):
    """The process heard nothing for ``seconds`` until now, so a GPU that should have answered then may have done so."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """The moment of a `WakeAt` has come. All other events of that moment were handled before."""


@dataclass(frozen=True, slots=True)
class Dispatch(Instruction):
    """Send a batch to a GPU.

    token: of the GPU; its backend refuses a token that is older than the newest one which it has seen.
    plan: numbers the batches of the GPU under this token, from 0.
    start: when the batch will start. seconds: how long it will take, or where times vary, how long that is expected to
        take. longest: how long it may take where times vary; 0: no longer than ``seconds``. overlap: its last seconds,
        in which the GPU can run the next batch: it is a pipeline of stages.
    """

    gpu: int
    token: int
    plan: int
    model: str
    requests: tuple[Request, ...]
    start: float
    seconds: float
    longest: float = 0.0
    overlap: float = 0.0


@dataclass(frozen=True, slots=True)
class Suspect(Instruction):
    """The GPU has not answered for much longer than its batch takes. It gets no batch any more; say `GpuLost`."""

    gpu: int
    token: int


@dataclass(frozen=True, slots=True)
class Refuse(Instruction):
    """The request gets no answer, for this reason."""

    request: Request
    reason: Reason


@dataclass(frozen=True, slots=True)
class ModelGone(Instruction):
    """A model that was removed has no request any more, and no GPU runs a batch of it."""

    model: str


@dataclass(frozen=True, slots=True)
class WakeAt(Instruction):
    """Send `Tick` at this moment. Only the newest `WakeAt` counts."""

    at: float
