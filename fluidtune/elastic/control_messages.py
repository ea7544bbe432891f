"""What passes between a session's host, its loop and the other workers' loops."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from .backends.base import CollectiveBackend
from .membership import Reform


@dataclass(frozen=True)
class Order:
    """What the leader tells the others at a boundary."""

    kind: Literal["go", "reform", "stop", "end"]
    epoch: int
    reform: Reform | None = None
    #: What a follower must know of the leader's last `save` to inherit the trial.
    note: Any = None


@dataclass(frozen=True)
class Position:
    """Where the trial stands: which `epochs` call of the function, the epoch that runs next, the turns
    done.
    """

    loop: int
    epoch: int
    iteration: int


class State(Protocol):
    """What a trial consists of; `TrialState` unless the trial brings its own (`ElasticSession.adopt`)."""

    def capture(self) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any], *, with_streams: bool) -> None: ...
    def broadcast(self, backend: CollectiveBackend) -> None: ...
    def set_width(self, width: int) -> None: ...


@dataclass
class Wishes:
    """What the host wants, under one lock. The loop takes from here; nothing else is shared between them."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    reform: Reform | None = None
    entry: Reform | None = None
    leaving: bool = False
    ready: bool = False
    closed: bool = False
