"""What the driver remembers of one trial while Tune wants it to run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ray.tune.experiment import Trial

from fluidtune.cluster.pool import PooledWorker
from fluidtune.elastic import Reform
from fluidtune.elastic.random_streams import Streams
from fluidtune.elastic.transport.signing import new_secret
from fluidtune.engine import Why
from fluidtune.engine.messages import Kind
from fluidtune.ray_compat.controller import TrackedActor
from fluidtune.ray_compat.trainable import TRAINING_ITERATION

#: Under this name a trial's run metadata have what of its results Tune has seen. Tune saves all that is in there.
PROGRESS = "fluidtune_progress"
#: A trial whose workers die this many times without one iteration done in between is itself at fault.
#: Judgement: two deaths in a row may be an accident of its node.
MAX_DEATHS = 3
#: A trial is failed, too, when it loses this many workers through the cluster's fault without one iteration done in
#: between: before they had started, or together with their node. Judgement: it may take seconds until Ray notices that
#: a node is dead, and meanwhile workers are started there.
MAX_MISSES = 10


@dataclass(eq=False)
class Task:
    """One call that Tune has asked for on a trial, and whom to tell of its end; both None for a call of our own."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    on_result: Callable[..., None] | None
    on_error: Callable[..., None] | None
    future: Any = None
    #: Sent to a worker and not answered.
    issued: bool = False


@dataclass(eq=False)
class TrialRun:
    """A trial from the moment Tune asks for its actor until Tune lets go of it.

    Which devices the trial holds is the engine's to say (`Engine.held_devices`). ``devices`` here are those where its
    workers are: during a resize the workers are still on the old devices, while the trial holds old and new ones.
    """

    #: By which Tune knows the trial's actor.
    tracked: TrackedActor
    trial: Trial
    kwargs: dict[str, Any]
    trainable_ref: Any
    kind: Kind = "plain"
    #: By which its workers recognise each other.
    secret: bytes = field(default_factory=new_secret, repr=False)
    #: It asked for several devices: one process sees them all, and it is never resized.
    gang: bool = False
    #: Devices of its workers, the leader's first.
    devices: tuple[int, ...] = ()
    #: The part of each device that it was given.
    share: float = 1.0
    #: Devices of its workers when the resize under way is done; without a resize, equal to ``devices``.
    wanted: tuple[int, ...] = ()
    #: Why the engine has chosen ``wanted``. Set once it has had a place.
    why: Why | None = None
    #: How many workers take part at the moment.
    width: int = 1
    leader: PooledWorker | None = None
    #: The other members of its group, by device.
    followers: dict[int, PooledWorker] = field(default_factory=dict)
    #: Devices whose workers are to become followers by the resize under way.
    awaited: set[int] = field(default_factory=set)
    #: By device, the workers that run the trial's code up to where they can enter the group.
    joining: dict[int, PooledWorker] = field(default_factory=dict)
    #: Devices whose workers have got there.
    ready: set[int] = field(default_factory=set)
    #: Number of the newest resize.
    generation: int = 0
    #: Its loop goes on by itself when a follower dies.
    mends: bool = False
    #: The group that the leader is to be told of with the next iteration.
    reform: Reform | None = None
    #: The leader was told of a new group and has not confirmed it.
    reforming: bool = False
    #: Set while it has a place or waits for a worker; another object after every new placement.
    placement: object | None = None
    #: Where followers find the leader, once the loop is elastic.
    address: tuple[str, int] | None = None
    #: How many of its followers ended by an error of their own.
    follower_errors: int = 0
    #: It must not have several workers again.
    growth_ended: bool = False
    #: The random streams with which the trial's code began, for its joiners.
    streams: Streams | None = None
    #: Calls that Tune waits for, oldest first.
    tasks: deque[Task] = field(default_factory=deque)
    #: What its leader would answer to ``save`` now, if that came with its newest result.
    saved: Any = None
    #: Its leader is loaded and takes tasks.
    live: bool = False
    #: It has been live before: what follows a loss is a recovery.
    started: bool = False
    #: How many of its workers died since its last iteration, as far as is known through its own fault.
    deaths: int = 0
    #: How many workers it lost since its last iteration through the cluster's fault.
    misses: int = 0
    #: The last loss, in words.
    loss: str = ""
    #: The engine wants it on another device; it goes at its next own checkpoint.
    suspend: bool = False
    #: Why it is to go, in words.
    suspended_for: str = ""
    #: It ran out of its GPU's memory, of which others held some. The next time the lack is its own.
    squeezed: bool = False
    #: Tune let go of it because it failed.
    failed: bool = False
    #: The trainable's own count of iterations at the newest result that Tune has seen.
    delivered: int = 0
    #: How many results Tune has seen. More than ``delivered`` where iterations were reported again after a failure.
    results: int = 0
    #: ``training_iteration`` of the newest result, as the trial reports it: not a count where the user sets it.
    number: Any = 0
    #: The user reports numbers of his own as ``training_iteration``.
    own_numbers: bool = False
    #: Tune retries the trial after a failure: iterations that run again are reported again, as under stock Tune.
    retried: bool = False
    #: The leader has done an iteration since the trial was loaded into it.
    iterated: bool = False

    def __post_init__(self) -> None:
        self.number = (self.trial.last_result or {}).get(TRAINING_ITERATION) or 0
        known = getattr(self.trial.run_metadata, PROGRESS, None)
        if known is None:  # it is new, or stock Tune or an older version began it
            self.delivered = self.results = int(self.number) if isinstance(self.number, (int, float)) else 0
            return
        self.delivered, self.results, self.own_numbers = known["delivered"], known["results"], known["own_numbers"]
        self.retried = self.trial.num_failures > known["failures"]

    def note_result(self, iteration: int, number: Any) -> dict[str, Any]:
        """The leader has a result. ``iteration``: the trainable's own count; ``number``: its ``training_iteration``.

        Returns what `keep_progress` is to keep when Tune hears the result.
        """
        self.delivered, self.number = iteration, number
        self.results += 1
        self.own_numbers = self.own_numbers or number != iteration
        self.retried = False
        return {"delivered": iteration, "results": self.results, "own_numbers": self.own_numbers}

    def keep_progress(self, progress: dict[str, Any]) -> None:
        """Tune hears the result now: keep with the trial what it has seen.

        Tune saves it with the trial, so that the trial's next run knows it, also in a restored experiment.
        """
        setattr(self.trial.run_metadata, PROGRESS, {**progress, "failures": self.trial.num_failures})

    def iterations_to(self, target: float | None) -> float | None:
        """How many iterations the trial has left until its ``training_iteration`` is ``target``; None: not known."""
        if target is None:
            return None
        number = self.number
        if self.retried:
            checkpoint = self.trial.latest_checkpoint_result
            number = checkpoint.metrics.get(TRAINING_ITERATION) if checkpoint else 0
        number = number if isinstance(number, (int, float)) else 0
        step = number / self.delivered if self.own_numbers and self.delivered and number > 0 else 1.0
        return max(0.0, float(target - number) / step)

    @property
    def id(self) -> str:
        return self.trial.trial_id

    def count_death(self, *, started: bool, device_there: bool) -> bool:
        """A worker of the trial died; ``started``: it had started before. Returns whether that was too often."""
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
        """A resize is under way."""
        return bool(self.awaited) or self.reform is not None or self.reforming

    def members(self) -> dict[int, PooledWorker]:
        """The workers of its group by device, the leader's first."""
        leader = {} if self.leader is None else {self.leader.device: self.leader}
        return {**leader, **self.followers}

    def call_off_resize(self) -> list[PooledWorker]:
        """Forget the resize under way. Returns the workers that were starting for it, which must be unloaded."""
        joining, self.joining = list(self.joining.values()), {}
        self.awaited, self.reform, self.reforming = set(), None, False
        return joining

    def at_own_checkpoint(self) -> bool:
        """The newest checkpoint that Tune knows is of the newest iteration: nothing would be lost by moving."""
        checkpoint = self.trial.latest_checkpoint_result
        return checkpoint is not None and checkpoint.metrics.get(TRAINING_ITERATION) == self.number

    @property
    def movable(self) -> bool:
        """Nothing is lost by moving now: it has done nothing since it was loaded, or its newest iteration is saved."""
        return not self.iterated or self.at_own_checkpoint()
