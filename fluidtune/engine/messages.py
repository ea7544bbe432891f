"""What goes into the engine and what comes out: plain, frozen dataclasses.

Events say what happened; instructions say what a shell must do about it. Neither knows a clock, Ray or
torch. A *device* is an int that the shell chose; a *node* is a string, equal for devices of one machine.
All times are seconds, all widths are shares of one device (<= 1) or whole numbers of devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: What can be done to a trial. ``plain``: packed and ordered, never grown or moved. ``checkpointing``: may be
#: suspended and resumed through its own checkpoint. ``elastic``: resizes in place.
Kind = Literal["plain", "checkpointing", "elastic"]

#: Searched-over hyperparameters of a trial, (name, value).
Traits = tuple[tuple[str, str], ...]

#: Why Tune let go of a trial. A paused trial comes back with a later `TrialAdded`.
Ending = Literal["paused", "stopped", "failed"]


class Event:
    """Something that happened."""


class Instruction:
    """Something that the shell must do."""


@dataclass(frozen=True)
class DeviceGained(Event):
    """A device can be used from now on."""

    device: int
    node: str = "local"


@dataclass(frozen=True)
class DeviceLeaving(Event):
    """A device will be lost soon: nothing starts there any more, and what can be moved leaves at its next commit.

    Followed by `DeviceLost`.
    """

    device: int


@dataclass(frozen=True)
class DeviceLost(Event):
    """A device is gone, and with it every worker on it; trials that held it go back to the queue."""

    device: int


@dataclass(frozen=True)
class GroupAnnounced(Event):
    """A TrialGroup exists.

    ``synchronous``: its trials are a batch whose makespan counts (grid, random, a rung); largest first.
    Otherwise trials join and leave all the time (ASHA): first come, first served, and at most
    ``concurrency`` of them at once (None: as many as there are whole devices, as stock Tune would).
    ``tail``: iterations that its best trials will train after this group is over (the rungs to come), which
    cannot begin before. Trials with the most to do until the end of that go first.
    """

    group: str
    synchronous: bool = True
    concurrency: int | None = None
    tail: float = 0.0


@dataclass(frozen=True)
class TrialAdded(Event):
    """Tune wants this trial to run: a new one, a promoted one, or one that was paused.

    ``iterations``: iterations left until the end of its budget, None when nobody knows.
    ``share``: what the script asked for of one device: 1.0, less, or a whole number of devices; a trial
    that asks for several gets exactly that many and is never resized. ``traits``: its searched-over
    hyperparameters, (name, value); trials with the same ones take about as long (`likeness`).
    """

    trial: str
    group: str
    kind: Kind = "plain"
    iterations: float | None = None
    share: float = 1.0
    traits: Traits = ()


@dataclass(frozen=True)
class KindFound(Event):
    """What the trial turned out to be, found while it ran."""

    trial: str
    kind: Kind


@dataclass(frozen=True)
class BudgetChanged(Event):
    """Iterations left are known anew (a promotion in place, for example)."""

    trial: str
    iterations: float | None


@dataclass(frozen=True)
class Result(Event):
    """One iteration was done: in ``seconds``, at ``width`` (what it really ran at).

    ``memory``: the part of its device's memory that the trial needs; None: nobody knows. ``ephemeral``: how much of
    that lives within an iteration only. ``compute``: the part of its device that it kept busy, 0 to 1; None: not known.
    """

    trial: str
    seconds: float
    width: float
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
    """The resize that was last instructed has happened; the pause it cost was ``seconds``."""

    trial: str
    devices: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class ResizeFailed(Event):
    """The resize that was last instructed cannot be done; the trial goes on with ``devices``."""

    trial: str
    devices: tuple[int, ...]


@dataclass(frozen=True)
class WorkerLost(Event):
    """A worker process of the trial died, its devices did not: it must start again from its last commit.

    ``left``: or it goes on by itself, with the workers on these devices. ``device``: the dead worker's, if known.
    ``alive``: that of a worker which lives for sure, the one that told of it.
    """

    trial: str
    left: tuple[int, ...] = ()
    device: int | None = None
    alive: int | None = None


@dataclass(frozen=True)
class TrialEnded(Event):
    """Tune let go of the trial: what it held is free."""

    trial: str
    ending: Ending


@dataclass(frozen=True)
class Start(Instruction):
    """Run the trial, for the first time, on these devices. devices[0] is its first worker's.

    ``share`` is the part of each device it gets (1.0, or 1/p when packed). Several devices and an elastic
    trial: it starts on devices[0] and the shell brings in the others as soon as it can, then says `Resized`.
    """

    trial: str
    devices: tuple[int, ...]
    share: float


@dataclass(frozen=True)
class Resume(Start):
    """The same, for a trial that has run before: it continues from its last commit or checkpoint."""


@dataclass(frozen=True)
class Resize(Instruction):
    """Make an elastic trial's workers those of ``devices``; devices[0] stays.

    Answered by Resized or ResizeFailed.
    """

    trial: str
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Suspend(Instruction):
    """Take the trial off its devices at its next commit; it will get a Resume.

    Answered by TrialEnded(paused) and, when it waits again, TrialAdded.
    """

    trial: str


@dataclass(frozen=True)
class Release(Instruction):
    """The trial no longer holds these devices; their workers may serve others."""

    trial: str
    devices: tuple[int, ...]
