"""What goes into the arbiter and what comes out: plain, frozen dataclasses; all times are seconds.

Events say what happened, instructions what a shell must do. `Leases` is the whole of what an app holds and not a
change to it, so that a lost, doubled or overtaken message does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from themis_bridge.auction import Bid
from themis_bridge.locality import Gpu


class Event:
    """Something that happened."""


class Instruction:
    """Something that the shell must do, after it has written down the arbiter's state."""


@dataclass(frozen=True)
class GpuJoined(Event):
    """A GPU can be leased from now on."""

    gpu: Gpu


@dataclass(frozen=True)
class GpuLeft(Event):
    """A GPU is gone, and what was reserved on it."""

    gpu: str


@dataclass(frozen=True)
class AppEvent(Event):
    """An app says something. ``session``: of its agent; a driver that starts again has a new one."""

    app: str
    session: str


@dataclass(frozen=True)
class AppJoined(AppEvent):
    """An app wants GPUs."""


@dataclass(frozen=True)
class AppLeft(AppEvent):
    """An app is done: its leases end now."""


@dataclass(frozen=True)
class Heard(AppEvent):
    """An app lives. Every other event of it says so too."""


@dataclass(frozen=True)
class Report:
    """An app's answer to `AskRho`.

    ``rho``: if nothing changed. ``useful``: the most GPUs that it could use now, those it holds included. ``gang``:
    GPUs of it that should lie together. ``facts``: what the baselines of the twin go by. ``best``: rho if it had all
    that it could use from now on, and ``left`` seconds until it ends then. ``whole``: T_cluster, what all its
    work, done and left, takes then. ``leases``: tokens of those that ``rho`` goes by; none where it is of a past bid.
    """

    rho: float
    useful: int
    gang: int = 1
    facts: Any = None
    best: float = 0.0
    left: float = 0.0
    whole: float = 0.0
    leases: tuple[int, ...] = ()


@dataclass(frozen=True)
class RhoAnswer(AppEvent):
    """The answer to `AskRho` of that round."""

    round: int
    report: Report


@dataclass(frozen=True)
class BidAnswer(AppEvent):
    """The answer to `Offer` of that round."""

    round: int
    bid: Bid


@dataclass(frozen=True)
class Release(AppEvent):
    """The app has left a GPU before its lease ended."""

    gpu: str
    token: int


@dataclass(frozen=True)
class Removed(Event):
    """What was reserved on a GPU for that token is gone; nothing of it runs there."""

    gpu: str
    token: int


@dataclass(frozen=True)
class Reserved(Event):
    """The GPU is reserved under that token."""

    gpu: str
    token: int


@dataclass(frozen=True)
class ReserveFailed(Event):
    """The GPU could not be reserved for that app (somebody outside has it, or the CPUs beside it): try later."""

    gpu: str
    token: int


@dataclass(frozen=True)
class Configured(Event):
    """An operator changed settings; see `Settings`."""

    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Tick(Event):
    """Time passed."""


@dataclass(frozen=True)
class AskRho(Instruction):
    """Step 1: ask an app for its `Report`. ``contention``: N_avg of its life; ``gpus``: R_C."""

    app: str
    session: str
    round: int
    contention: float
    gpus: int


@dataclass(frozen=True)
class Offer(Instruction):
    """Steps 2 and 3: offer GPUs to an app. ``held``: what it keeps or was promised; ``most``: its quota, if any."""

    app: str
    session: str
    round: int
    offered: tuple[Gpu, ...]
    contention: float
    gpus: int
    held: tuple[Gpu, ...]
    most: int | None


@dataclass(frozen=True)
class LeaseView:
    """One lease as its holder sees it. ``ending``: it will not be renewed; ``remaining``: seconds until its end."""

    gpu: Gpu
    token: int
    remaining: float
    ending: bool = False
    leftover: bool = False


@dataclass(frozen=True)
class Leases(Instruction):
    """Tell an app all that it holds. ``version`` only grows: a message with a smaller one is out of date."""

    app: str
    session: str
    version: tuple[int, int]
    leases: tuple[LeaseView, ...]


@dataclass(frozen=True)
class Refused(Instruction):
    """Tell an app that it, or its answer, is not accepted.

    ``final``: it must not go on. ``unknown``: the arbiter does not know it, and it has to join again.
    """

    app: str
    session: str
    why: str
    final: bool = False
    unknown: bool = False


@dataclass(frozen=True)
class Reserve(Instruction):
    """Step 5: reserve the GPU for the app under this token. Answered by `Reserved` or `ReserveFailed`."""

    gpu: str
    app: str
    token: int


@dataclass(frozen=True)
class Remove(Instruction):
    """Kill what runs on the GPU under this token and free it. Answered by `Removed`."""

    gpu: str
    app: str
    token: int
