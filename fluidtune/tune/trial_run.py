"""What the shell remembers of one trial while Tune wants it to run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ray.tune.experiment import Trial

from fluidtune.cluster.pool import PooledWorker
from fluidtune.elastic import Reform
from fluidtune.engine.messages import Kind
from fluidtune.ray_compat.controller import TrackedActor
from fluidtune.ray_compat.trainable import TRAINING_ITERATION

#: A trial whose worker dies this often without one iteration done in between is the trial's fault.
MAX_DEATHS = 3
#: Workers that died before they had started, or with their node, are the cluster's fault; it may take some seconds to
#: notice a dead node.
MAX_MISSES = 10


@dataclass(eq=False)
class Task:
    """One call that Tune has asked for on a trial, and whom to tell."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    on_result: Callable[..., None] | None
    on_error: Callable[..., None] | None
    future: Any = None
    #: Sent to a worker and not answered.
    issued: bool = False


@dataclass(eq=False)
class Run:
    """A trial from the moment Tune asks for its actor until Tune lets go of it."""

    tracked: TrackedActor
    trial: Trial
    kwargs: dict[str, Any]
    trainable_ref: Any
    kind: Kind = "plain"
    #: It asked for several devices: one process sees them all, and it is never resized.
    gang: bool = False
    #: The devices that the engine says it holds; devices[0] is the leader's.
    devices: tuple[int, ...] = ()
    share: float = 1.0
    #: The devices it is to have when the resize under way is done.
    wanted: tuple[int, ...] = ()
    #: How many workers take part at the moment.
    width: int = 1
    leader: PooledWorker | None = None
    #: The other members of its group, by device.
    followers: dict[int, PooledWorker] = field(default_factory=dict)
    #: Devices whose workers are to become followers; those that warm up; those that stand ready.
    awaited: set[int] = field(default_factory=set)
    joining: dict[int, PooledWorker] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    generation: int = 0
    #: Its loop goes on by itself when a follower dies.
    mends: bool = False
    #: What the leader is to be told with the next iteration; whether it was told and has not confirmed.
    reform: Reform | None = None
    reforming: bool = False
    #: Set while it has a place or waits for one; another object after every new placement.
    placement: object | None = None
    #: Where followers find the leader, once the loop is elastic.
    address: tuple[str, int] | None = None
    tasks: deque[Task] = field(default_factory=deque)
    #: Its leader is loaded and takes tasks.
    live: bool = False
    #: It has been live before: what follows a loss is a recovery.
    started: bool = False
    #: Workers since its last iteration that died under it, or that the cluster lost; and the last loss in words.
    deaths: int = 0
    misses: int = 0
    loss: str = ""
    #: The engine wants it on another device; it goes at its next own checkpoint.
    suspend: bool = False
    #: Iterations that Tune has seen.
    delivered: int = 0

    def __post_init__(self) -> None:
        self.delivered = int((self.trial.last_result or {}).get(TRAINING_ITERATION) or 0)

    @property
    def id(self) -> str:
        return self.trial.trial_id

    def died(self, *, started: bool, device_there: bool) -> bool:
        """A worker died under it, that had ``started`` or not; returns whether that was too often."""
        if started and device_there:
            self.deaths += 1
        else:
            self.misses += 1
        return self.deaths >= MAX_DEATHS or self.misses >= MAX_MISSES

    @property
    def ran_at(self) -> float:
        """The width of its last iteration: workers, or its share of one device."""
        return self.width if self.width > 1 else self.share

    @property
    def resizing(self) -> bool:
        return bool(self.awaited) or self.reform is not None or self.reforming

    def workers(self) -> dict[int, PooledWorker]:
        """The members of its group by device, leader first."""
        members = {} if self.leader is None else {self.leader.device: self.leader}
        return {**members, **self.followers}

    def at_own_checkpoint(self) -> bool:
        """The newest checkpoint that Tune knows is of the newest iteration: nothing would be lost by moving."""
        checkpoint = self.trial.latest_checkpoint_result
        return checkpoint is not None and checkpoint.metrics.get(TRAINING_ITERATION) == self.delivered
