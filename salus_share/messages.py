"""What goes into the scheduler of a device and what comes out: plain, frozen dataclasses.

Memory is bytes, times are seconds. A job is a trial as the device sees it.
"""

from __future__ import annotations

from dataclasses import dataclass

from salus_share.lanes import Amount


@dataclass(frozen=True)
class Need:
    """What a job takes of a device.

    ``persistent``: P, its model and what the framework keeps. ``ephemeral``: E, the peak of what lives within one
    iteration. ``compute``: the part of the device that its iterations keep busy when it runs alone, 0 to 1; None
    if nobody measured it.
    """

    persistent: Amount
    ephemeral: Amount
    compute: float | None = None

    def at_least(self, other: Need) -> Need:
        """The larger of both, amount by amount; ``compute`` is this one's."""
        persistent, ephemeral = max(self.persistent, other.persistent), max(self.ephemeral, other.ephemeral)
        return Need(persistent, ephemeral, self.compute)


class Event:
    """Something that happened."""


class Instruction:
    """Something that the shell must do."""


@dataclass(frozen=True)
class JobAdded(Event):
    """A job asks to be admitted. ``need`` None: nobody knows it, so it is run alone first."""

    job: str
    need: Need | None
    remaining: float | None = None
    rung: int = 0


@dataclass(frozen=True)
class NeedFound(Event):
    """At an iteration boundary a job turned out to need this much."""

    job: str
    need: Need


@dataclass(frozen=True)
class Progress(Event):
    """Seconds left and rung are known anew."""

    job: str
    remaining: float | None
    rung: int


@dataclass(frozen=True)
class Ready(Event):
    """A job stands at the gate: it would run an iteration. Raises StaleToken for a token that is not its last."""

    job: str
    token: int


@dataclass(frozen=True)
class IterationEnded(Event):
    """The iteration that `Run` allowed is over, after ``seconds``; ephemeral memory is empty.

    ``again``: the job stands at the gate for the next one in the same moment, and is chosen from with the others.
    """

    job: str
    seconds: float
    again: bool = False


@dataclass(frozen=True)
class Paused(Event):
    """The job did what `Pause` asked: it committed and its memory is free. It waits to be admitted again."""

    job: str


@dataclass(frozen=True)
class JobLeft(Event):
    """The job is gone, at whatever moment: done, stopped, or dead."""

    job: str


@dataclass(frozen=True)
class Admit(Instruction):
    """The job may load its model, and run iterations in ``lane`` while ``token`` is its last."""

    job: str
    lane: int
    token: int


@dataclass(frozen=True)
class Move(Instruction):
    """The job's iterations belong to another lane from now on; nothing is copied."""

    job: str
    lane: int


@dataclass(frozen=True)
class Run(Instruction):
    """The job runs one iteration in ``lane``. Answered by IterationEnded or JobLeft."""

    job: str
    lane: int


@dataclass(frozen=True)
class Pause(Instruction):
    """The job must commit and leave the device at its next boundary. Answered by Paused or JobLeft."""

    job: str


@dataclass(frozen=True)
class Refuse(Instruction):
    """The job can never be admitted. It is not known any more."""

    job: str
    reason: str
