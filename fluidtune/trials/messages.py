"""What goes into a trial's life and what comes out: events say what happened, instructions what a shell must do.

All of them are plain, frozen dataclasses. A *worker* is the shell's object for a process; only its name and its device
are looked at here. Errors, replies, checkpoints and results are handed through.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

from fluidtune.engine import messages as engine
from fluidtune.engine.messages import Ending, Kind
from fluidtune.group_facts import GroupFacts

#: How long a worker may take to unload its trial before it is killed. ``long``: it may write a last commit or
#: checkpoint. ``short``: nothing of it is wanted any more.
Patience = Literal["long", "short"]
#: How a follower's part ended. ``over``: its leader has ended or has dropped it, or its device has failed. ``error``:
#: its own code failed. ``died``: its process has.
End = Literal["over", "error", "died"]


class Worker(Protocol):
    """A worker process, as the shell knows it."""

    @property
    def name(self) -> str:
        """Its name: no other process of the job has it."""

    @property
    def device(self) -> int:
        """The device that it belongs to."""


class Reply(Protocol):
    """What a leader's reply to an iteration has for a trial's life; see `fluidtune.cluster.hosting.messages`."""

    result: dict[str, Any]
    kind: Kind
    seconds: float
    iteration: int
    facts: GroupFacts
    memory: float | None
    ephemeral: float
    compute: float | None
    saved: Any
    rewritten: list[Any]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that Tune has of a trial. ``number``: ``training_iteration`` of the result that it belongs to."""

    number: Any


@dataclass(frozen=True)
class Outside:
    """What a trial's life reads of its surroundings. Reading changes nothing."""

    #: The trial can be asked for a checkpoint at any iteration.
    can_save: bool
    #: An elastic trial commits when it is unloaded.
    commits: bool
    #: Several trials may be on one GPU, whose memory is not divided among them.
    shares_gpus_by_count: bool
    #: The algorithm may wait for the future of a checkpoint, so that each is asked of the leader.
    waits_for_checkpoints: bool
    #: The newest checkpoint that Tune has of the trial; None: Tune has none.
    newest_checkpoint: Callable[[], Checkpoint | None]
    #: Whether these devices are on several nodes.
    on_several_nodes: Callable[[Collection[int]], bool]
    #: Whether trials of its trainable need several devices: others may have shown that while it ran.
    needs_several: Callable[[], bool]


@dataclass(eq=False)
class Call:
    """A method of the trial's trainable that is to be called. The life makes ``save`` and ``restore`` calls itself."""

    method: str
    #: Tune waits for its result; for its error. For a call that the life has made it waits for neither.
    wants_result: bool = False
    wants_error: bool = False
    #: It was sent to the leader and is not answered.
    issued: bool = False
    #: What the shell keeps with it.
    carried: Any = None


@dataclass(frozen=True)
class Event:
    """Something that happened. The engine's instructions are events, too. `Release`: a device of the trial is lost."""


def outline(event: Event | engine.Instruction) -> str:
    """The event in a few words. What is handed through is left out."""
    said = (f"{each.name}={_plain(getattr(event, each.name))}" for each in fields(event))
    return f"{type(event).__name__}({', '.join(each for each in said if not each.endswith('=...'))})"


def _plain(value: Any) -> str:
    if isinstance(value, Call):
        return value.method
    if value is None or isinstance(value, (bool, int, float, str, tuple)):
        return repr(value)
    name = getattr(value, "name", None)
    return name if isinstance(name, str) else "..."


@dataclass(frozen=True)
class TrainableCapabilities:
    """What trials of one trainable have turned out to be.

    ``kind``: None: none has shown it, and they are taken to be plain. ``growable``: they can have several workers.
    ``devices``: how many of one node each needs, with what it starts in Ray; 0: those that it asks for.
    """

    kind: Kind | None = None
    growable: bool = False
    devices: int = 0


# Events: from Tune


@dataclass(frozen=True)
class MethodCalled(Event):
    """Tune calls a method of the trainable. ``plain``: without arguments."""

    call: Call
    plain: bool


@dataclass(frozen=True)
class CallsDropped(Event):
    """Tune waits for none of its calls any more."""


@dataclass(frozen=True)
class Released(Event):
    """Tune lets go of the trial. `Left` follows."""


@dataclass(frozen=True)
class Left(Event):
    """Tune has let go of the trial, and this is why.

    ``keep``: its process serves further trials, and its trainable may stay there. ``waits``: its process may wait with
    it until it goes on.
    """

    ending: Ending
    keep: bool = False
    waits: bool = False


# Events: about its leader


@dataclass(frozen=True)
class WorkerFound(Event):
    """The trial gets this worker of its first device as its leader."""

    worker: Worker


@dataclass(frozen=True)
class Resumed(Event):
    """The trial goes on in this worker, where it has waited since it was paused.

    ``facts``: what its leader knew of itself then; ``done_here``: iterations that it has done since it was loaded.
    """

    worker: Worker
    facts: GroupFacts
    done_here: int


@dataclass(frozen=True)
class Loaded(Event):
    """The leader has loaded the trial, of which this is known now."""

    worker: Worker
    facts: GroupFacts = field(default_factory=GroupFacts)


@dataclass(frozen=True)
class LeaderDied(Event):
    """The leader's process died before it answered ``by``: a call, or the loading in this worker.

    ``started``: the process had started before. ``device_there``: its device is still there. ``why``: in words.
    """

    by: Call | Worker
    error: Exception
    why: str
    started: bool
    device_there: bool


@dataclass(frozen=True)
class Raised(Event):
    """What ``by`` names (see `LeaderDied`) has raised an error. ``final``: the trial fails, whoever waits for it."""

    by: Call | Worker
    error: Exception
    final: bool = False


@dataclass(frozen=True)
class MustReschedule(Event):
    """The trial must go on in another process, for this reason. ``by``: see `LeaderDied`; None: it has no leader yet.

    As where its code cannot run in a forked process, its device has failed, or its commit is not whole.
    """

    by: Call | Worker | None
    why: str


@dataclass(frozen=True)
class RoomLacking(Event):
    """The trial cannot go on where it is.

    ``by``: see `LeaderDied`. ``need``: (persistent, ephemeral) memory that it needs, as parts of a device's; None: not
    known. ``between``: it is between two iterations. ``devices``: how many devices of one node it needs; None: as many
    as it has.
    """

    by: Call | Worker
    reason: str
    need: tuple[float, float] | None = None
    between: bool = False
    devices: int | None = None


@dataclass(frozen=True)
class IterationDone(Event):
    """The leader has done an iteration.

    ``number``: the result's ``training_iteration``. ``final``: the reply is no result, but says that the
    loop is over.
    """

    call: Call
    reply: Reply
    number: Any
    final: bool = False


@dataclass(frozen=True)
class Answered(Event):
    """The leader has returned ``value`` from a call that is neither an iteration nor a restore."""

    call: Call
    value: Any


@dataclass(frozen=True)
class CheckpointRestored(Event):
    """The leader has restored a checkpoint.

    ``delivered``: how many iterations now count as seen by Tune. ``number``: ``training_iteration`` of the checkpoint.
    """

    call: Call
    delivered: int
    number: Any


@dataclass(frozen=True)
class CheckpointKept(Event):
    """Tune has a checkpoint that it has not asked for: the answer to `KeepCheckpoint`."""


@dataclass(frozen=True)
class Unloaded(Event):
    """The worker that a moving trial has left is done with it, or dead."""


# Events: about its followers


@dataclass(frozen=True)
class JoinerFound(Event):
    """The trial gets this worker as a follower to be."""

    worker: Worker


@dataclass(frozen=True)
class Attached(Event):
    """A new worker is attached to the leader, and follows it."""

    worker: Worker


@dataclass(frozen=True)
class NotAttached(Event):
    """A new worker does not follow the leader, for this reason.

    ``late``: it has not answered in time. ``over``: its device is gone.
    """

    worker: Worker
    how: Literal["refused", "died", "late", "over"]
    why: str


@dataclass(frozen=True)
class FollowerEnded(Event):
    """A follower does not follow any more. ``why``: in words."""

    worker: Worker
    how: End
    why: str = ""


@dataclass(frozen=True)
class CapabilitiesLearned(Event):
    """Trials of its trainable have shown this, while it has no place."""

    shown: TrainableCapabilities


# Instructions


class Instruction:
    """Something that the shell must do."""


@dataclass(frozen=True)
class Tell(Instruction):
    """Hand this event to the engine. ``why``: why the trial leaves its devices, in words, if it does so now."""

    event: engine.Event
    why: str = ""


@dataclass(frozen=True)
class Announce(Instruction):
    """Hand the engine the events with which a trial arrives."""


# Instructions: to workers


@dataclass(frozen=True)
class RequestLeader(Instruction):
    """Find a worker of ``device`` that sees the devices ``others`` as well.

    Answered by `WorkerFound` or `MustReschedule`, while `TrialStateMachine.wants_leader` holds for ``placement``.
    """

    device: int
    others: tuple[int, ...]
    placement: int


@dataclass(frozen=True)
class Load(Instruction):
    """Load the trial into this worker. Answered by `Loaded`, or as a call may be."""

    worker: Worker


@dataclass(frozen=True)
class CallLeader(Instruction):
    """Send the call to the leader.

    Answered by `IterationDone`, `CheckpointRestored`, `Answered`, or an event that names it in ``by``.
    """

    worker: Worker
    call: Call


@dataclass(frozen=True)
class DropCalls(Instruction):
    """The answers to these calls are of no interest any more."""

    calls: tuple[Call, ...]


@dataclass(frozen=True)
class RequestJoiner(Instruction):
    """Find a worker of ``device``. Answered by `JoinerFound` while `TrialStateMachine.wants_joiner` holds."""

    device: int
    generation: int


@dataclass(frozen=True)
class Attach(Instruction):
    """Have the worker attach itself to the leader, and then follow it.

    Answered by `Attached` or `NotAttached`, and after `Attached` by `FollowerEnded`.
    """

    worker: Worker


@dataclass(frozen=True)
class Discard(Instruction):
    """End the worker's process at once, for this reason: it follows the leader, or tries to. Nothing answers."""

    worker: Worker
    why: str


@dataclass(frozen=True)
class Unload(Instruction):
    """Have the worker unload the trial. ``then``: answer with `Unloaded`. For the rest see `Left`."""

    worker: Worker
    patience: Patience
    then: bool = False
    keep: bool = False


@dataclass(frozen=True)
class Park(Instruction):
    """The worker waits with the trial, which is paused. ``commits``: the trial has commits. The rest: see `Resumed`."""

    worker: Worker
    facts: GroupFacts
    done_here: int
    commits: bool


@dataclass(frozen=True)
class EndIdleWorkers(Instruction):
    """End all idle workers of the job: they hold memory of GPUs."""


@dataclass(frozen=True)
class PollDevices(Instruction):
    """Look now which devices are there."""


# Instructions: to Tune


@dataclass(frozen=True)
class TellRunning(Instruction):
    """The trial runs in this worker. Tune is told of the first time since it asked for the trial.

    ``again``: it ran before, and why it left its worker then, in words: Tune does not notice.
    """

    worker: Worker
    again: str | None = None


@dataclass(frozen=True)
class TellTune(Instruction):
    """A call has returned ``value``. ``progress``: what to keep with the trial when Tune gets it."""

    call: Call
    value: Any
    progress: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class TellError(Instruction):
    """A call has raised ``error``. If the trial leaves its devices now, that is why: as in `Tell`."""

    call: Call
    error: Exception


@dataclass(frozen=True)
class Fail(Instruction):
    """The trial has failed, and with it these calls. Tune's further calls for it do nothing."""

    calls: tuple[Call, ...]
    error: Exception


@dataclass(frozen=True)
class KeepCheckpoint(Instruction):
    """Hand Tune a checkpoint that it has not asked for. Answered by `CheckpointKept`."""

    value: Any


# Instructions: what is written down


@dataclass(frozen=True)
class Write(Instruction):
    """Write an event of the trial into the event log. ``reason``: a reason that may be long, and is cut."""

    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    reason: str | None = None


@dataclass(frozen=True)
class WriteIteration(Instruction):
    """An iteration has come that Tune has not seen before."""

    reply: Reply


@dataclass(frozen=True)
class Warn(Instruction):
    """Warn the user."""

    text: str


@dataclass(frozen=True)
class ShareCapabilities(Instruction):
    """The trial has shown this. All trials of its trainable that wait for devices get `CapabilitiesLearned`."""

    shown: TrainableCapabilities
