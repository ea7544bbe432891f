"""What goes into the engine and what comes out: plain, frozen dataclasses.

Events say what happened; instructions say what a shell must do about it. A *device* is an int that the shell chose; a
*node* is a string, equal for devices of one machine. All times are seconds. A width is a share of one device (<= 1) or
a whole number of devices. A trial is known by its name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fluidtune.engine.reasons import Why

#: What a trial goes on from when it has left its devices. ``plain``: from nothing, so that it is never moved.
#: ``checkpointing``: from its own checkpoint. ``elastic``: from a commit, which it makes when it leaves. Whether it can
#: grow is another matter: see `CanGrow`.
Kind = Literal["plain", "checkpointing", "elastic"]

#: Searched-over hyperparameters of a trial, (name, value).
Traits = tuple[tuple[str, str], ...]

#: How a trial's run ended: through Tune, or "paused" after a `Suspend`. A paused trial comes back with a later
#: `TrialAdded`.
Ending = Literal["paused", "stopped", "failed"]


class Event:
    """Something that happened."""


@dataclass(frozen=True)
class Instruction:
    """Something that the shell must do, and ``why``, which does not count where two instructions are compared."""

    why: Why = field(compare=False, kw_only=True)


@dataclass(frozen=True)
class DeviceGained(Event):
    """A device can be used from now on."""

    device: int
    node: str = "local"


@dataclass(frozen=True)
class DeviceLeaving(Event):
    """A device will be lost soon: nothing starts there any more, and what can be moved leaves at its next commit.

    `DeviceLost` follows.
    """

    device: int


@dataclass(frozen=True)
class DeviceLost(Event):
    """A device is gone, and every worker on it. Trials whose first worker was there go back to the queue; others go on
    with the workers that they have elsewhere.
    """

    device: int


@dataclass(frozen=True)
class ModelFound(Event):
    """The device is of this model, for example a GPU's product name. Comes late if the device is lost already."""

    device: int
    model: str


@dataclass(frozen=True)
class GroupAnnounced(Event):
    """A TrialGroup exists, or its ``concurrency`` or ``tail`` has changed.

    ``synchronous``: its trials are a batch whose makespan counts (grid, random, a rung); the largest goes first. If
    not, trials join and leave all the time (ASHA): first come, first served, and at most ``concurrency`` of them at
    once (None: one for each whole device, as in stock Ray Tune). ``tail``: iterations that its best trials
    will do in the rungs to come, which begin when this group is over. Trials with the most to do until the end of these
    go first.
    """

    group: str
    synchronous: bool = True
    concurrency: int | None = None
    tail: float = 0.0


@dataclass(frozen=True)
class TrialAdded(Event):
    """Tune wants this trial to run: a new one, a promoted one, or one that was paused.

    ``iterations``: iterations left until the end of its budget; None: unknown. ``share``: the share of one
    device that the script asked for, or a whole number of devices. A trial that asks for several devices, a *gang*,
    gets exactly that number of one node and is never resized. ``traits``: its searched-over hyperparameters, from which
    `runtime_prediction` tells how long an iteration will take. ``growable``: see `CanGrow`. ``turn``: lowest first,
    in a batch whose order is its algorithm's; None: the trial with the most to do goes first.
    """

    trial: str
    group: str
    kind: Kind = "plain"
    iterations: float | None = None
    share: float = 1.0
    traits: Traits = ()
    growable: bool = False
    turn: int | None = None


@dataclass(frozen=True)
class KindFound(Event):
    """The trial turned out to be of this kind while it, or another trial of the same trainable, ran."""

    trial: str
    kind: Kind


@dataclass(frozen=True)
class CanGrow(Event):
    """The trial, or another trial of the same trainable, has shown that it can have several workers."""

    trial: str


@dataclass(frozen=True)
class GrowthEnded(Event):
    """The trial must not be given more devices again, although it seemed to be able to grow.

    ``stays``: it keeps those that it has, as further workers of it always fail; else several workers do not help it.
    """

    trial: str
    stays: bool = False


@dataclass(frozen=True)
class GangFound(Event):
    """The trial needs this many devices of one node, a whole number above 1; see `TrialAdded`. It counts if it waits.

    A trial that runs with fewer must lose them first (`WorkerLost`).
    """

    trial: str
    devices: int


@dataclass(frozen=True)
class BudgetChanged(Event):
    """The number of iterations left has changed, for example by a promotion in place."""

    trial: str
    iterations: float | None


@dataclass(frozen=True)
class Result(Event):
    """The trial has done one iteration, in ``seconds``, at ``width``: its workers, or its share of one device.

    ``width`` None: it changed meanwhile, so that the seconds are no measure of any width.
    ``memory``: the part of its device's memory that the trial needs; None: unknown. ``ephemeral``: the part of
    the device's memory that it needs within an iteration only, contained in ``memory``. ``compute``: the part of its
    device that it kept busy, 0 to 1; None: unknown.
    """

    trial: str
    seconds: float
    width: float | None
    memory: float | None = None
    ephemeral: float = 0.0
    compute: float | None = None


@dataclass(frozen=True)
class NeedFound(Event):
    """A trial could not go on with less than these parts of its device's memory; see `Result`."""

    trial: str
    memory: float
    ephemeral: float


@dataclass(frozen=True)
class Resized(Event):
    """The last `Resize` of the trial is done: it runs on ``devices``."""

    trial: str
    devices: tuple[int, ...]


@dataclass(frozen=True)
class ResizeFailed(Event):
    """The last `Resize` of the trial cannot be done; it goes on with ``devices``."""

    trial: str
    devices: tuple[int, ...]


@dataclass(frozen=True)
class WorkerLost(Event):
    """A worker process of the trial died; its devices did not.

    ``left``: the devices of the workers with which the trial goes on: it has lost a follower. If there are none, it has
    lost its first worker, and must start again from what it goes on from.
    """

    trial: str
    left: tuple[int, ...] = ()


@dataclass(frozen=True)
class TrialEnded(Event):
    """Tune let go of the trial, or a `Suspend` of it is done. The devices that it held are free."""

    trial: str
    ending: Ending


@dataclass(frozen=True)
class Start(Instruction):
    """Run the trial, for the first time, on these devices. devices[0] is its first worker's.

    ``share``: the part of each device that it gets, 1.0 or 1/p on a device for p trials. A trial that is no gang and
    gets several devices starts on devices[0]; the shell brings in the others as soon as it can, and then says
    `Resized`.
    """

    trial: str
    devices: tuple[int, ...]
    share: float


@dataclass(frozen=True)
class Resume(Start):
    """Run a trial that has run before, from its last commit or checkpoint. The fields are those of `Start`."""


@dataclass(frozen=True)
class Resize(Instruction):
    """Change the workers of a trial that can grow to those of ``devices``; devices[0] stays.

    The shell answers with `Resized` or `ResizeFailed`.
    """

    trial: str
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Suspend(Instruction):
    """Take the trial off its devices at its next commit. It will get a `Resume`.

    The shell answers with `TrialEnded` (paused) and, when the trial can run again, `TrialAdded`.
    """

    trial: str


@dataclass(frozen=True)
class Release(Instruction):
    """The trial no longer holds these devices; their workers may serve other trials."""

    trial: str
    devices: tuple[int, ...]
