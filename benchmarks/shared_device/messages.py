"""The events that go into the `Admission` of a device, and the instructions that come out: plain, frozen dataclasses.

Memory is in bytes, times are in seconds. A job is a trial as its device sees it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from salus_share import Need
from salus_share.policies import Standing


class Event:
    """Something that happened."""


class Instruction:
    """Something that whoever drives the `Admission` must do."""


@dataclass(frozen=True)
class JobAdded(Event):
    """A job asks to be admitted. ``need`` None: it is not known, so the job runs alone on the device first."""

    job: str
    need: Need | None
    remaining: float | None = None
    rung: int = 0


@dataclass(frozen=True)
class NeedFound(Event):
    """A job that is not within an iteration was measured to need this much."""

    job: str
    need: Need


@dataclass(frozen=True)
class Progress(Event):
    """Somebody outside the device says anew how many seconds a job has left, and its rung."""

    job: str
    remaining: float | None
    rung: int


@dataclass(frozen=True)
class Served(Event):
    """The standings of residents, by job, after the iterations that they have run by now."""

    standings: Mapping[str, Standing]


@dataclass(frozen=True)
class JobLeft(Event):
    """The job is done, stopped or dead, or has freed its memory after `Pause`. It may have been waiting or resident."""

    job: str


@dataclass(frozen=True)
class Admit(Instruction):
    """The job may load its model, and run iterations in ``lane`` until it gets another token than ``token``."""

    job: str
    lane: int
    token: int


@dataclass(frozen=True)
class Move(Instruction):
    """The job's iterations run in another lane from now on. Nothing is copied."""

    job: str
    lane: int


@dataclass(frozen=True)
class Pause(Instruction):
    """The job must commit and leave the device at its next iteration boundary. `JobLeft` answers it."""

    job: str


@dataclass(frozen=True)
class Refuse(Instruction):
    """The job can never be admitted. It is forgotten."""

    job: str
    reason: str
