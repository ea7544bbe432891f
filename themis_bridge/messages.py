"""All that goes into the arbiter and comes out of it, as plain frozen dataclasses. All times are seconds.

Events say what happened, instructions what the shell must do. A `Leases` message has all leases of an app instead of a
change to them, so that a lost, repeated or overtaken message does no harm: an agent's next heartbeat has the version of
the last one that it has received.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from themis_bridge.auction import Bid
from themis_bridge.errors import ThemisError
from themis_bridge.locality import Gpu, check_together
from themis_bridge.plain import plain, shown


class Event:
    """Something that happened."""


class Instruction:
    """Something that the shell must do, after it has stored the arbiter's books."""


@dataclass(frozen=True)
class GpuJoined(Event):
    """A GPU is in the cluster and can be leased."""

    gpu: Gpu


@dataclass(frozen=True)
class GpuLeft(Event):
    """A GPU has left the cluster, and with it what was reserved there."""

    gpu: str


@dataclass(frozen=True)
class AppEvent(Event):
    """An app sent something. ``session``: names one run of the app's driver; after a restart it is a new one."""

    app: str
    session: str


@dataclass(frozen=True)
class AppJoined(AppEvent):
    """An app wants GPUs.

    user: the user or team that it belongs to; "": it is the only app of its user.
    life: id of a placement group that Ray removes when the driver dies; "": there is none.
    together: how many GPUs of one machine each of its trials needs at once, a power of two. The arbiter gives the app
        whole gangs of this number of GPUs, because it can use no fewer.
    """

    user: str = ""
    life: str = ""
    together: int = 1


@dataclass(frozen=True)
class AppLeft(AppEvent):
    """An app is done; its leases end now."""


@dataclass(frozen=True)
class Heard(AppEvent):
    """An app is alive. Every other event of the app says so, too.

    version: of the newest `Leases` that its agent knows; None: it does not say. The arbiter answers if it has others.
    """

    version: tuple[int, int] | None = None


@dataclass(frozen=True)
class Report:
    """An app's answer to `AskRho`. The arbiter computes rho and ``best`` itself, see `AppRecord.take_report`.

    rho: its finish-time fairness if it keeps the GPUs that it holds.
    useful: the most GPUs that it could use now, including those that it holds.
    gang: how many of its GPUs should be on one machine.
    best: its rho if it had all GPUs that it could use from now on.
    left: seconds until it would end with all those GPUs.
    whole: T_cluster, seconds that all its work, done and left, takes with all those GPUs.
    fair: T_id, seconds that all its work takes on its own share of the cluster; 0: ``whole`` times the contention.
    ends: seconds until it ends with the GPUs for which ``rho`` was computed; None: by ``rho`` and ``fair``.
    demand: the most GPUs that any part of its work left could use; at least ``useful``.
    leases: tokens of the leases that ``rho`` was computed for; empty if ``rho`` is that of an earlier bid.
    endless: it never ends, as a service. Then only ``useful`` counts, the GPUs that its load wants now.
    """

    rho: float
    useful: int
    gang: int = 1
    best: float = 0.0
    left: float = 0.0
    whole: float = 0.0
    leases: tuple[int, ...] = ()
    fair: float = 0.0
    ends: float | None = None
    demand: int = 0
    endless: bool = False


@dataclass(frozen=True)
class RhoAnswer(AppEvent):
    """An app's answer to `AskRho` in the round of that number."""

    round: int
    report: Report


@dataclass(frozen=True)
class BidAnswer(AppEvent):
    """An app's answer to `Offer` in the round of that number."""

    round: int
    bid: Bid


@dataclass(frozen=True)
class Release(AppEvent):
    """The app has left a GPU before its lease ended."""

    gpu: str
    token: int


#: All that an app can send.
APP_EVENTS = (AppJoined, AppLeft, Heard, RhoAnswer, BidAnswer, Release)
#: An app cannot send more than this number of messages at once. Judgement: it gives back each of its GPUs in one of
#: them, if not twice, and has few others.
MOST_MESSAGES = 10_000


def plain_events(events: object) -> list[AppEvent]:
    """What an app sent, with plain values. Raises ThemisError for messages that no app can send.

    Reports and bids are made plain when a round takes them, see `rounds.Round`.
    """
    if not isinstance(events, list) or len(events) > MOST_MESSAGES:
        raise ThemisError(f"{shown(events)}: expected a list of at most {MOST_MESSAGES} messages")
    return [plain_event(event) for event in events]


def plain_event(event: object) -> AppEvent:
    """One message of an app, see `plain_events`."""
    if not isinstance(event, AppEvent) or type(event) not in APP_EVENTS:
        raise ThemisError(f"{shown(event)} is no message of an app; see themis_bridge.messages")
    event = plain(event, type(event), but=("report", "bid"))
    if isinstance(event, AppJoined):
        check_together(event.together)
    return event


@dataclass(frozen=True)
class DriverDied(Event):
    """The driver of that session is dead for certain, and not only silent."""

    app: str
    session: str


@dataclass(frozen=True)
class Removed(Event):
    """The reservation of a GPU under that token is gone, and nothing of it runs there any more."""

    gpu: str
    token: int


@dataclass(frozen=True)
class Reserved(Event):
    """Ray has reserved the GPU under that token."""

    gpu: str
    token: int


@dataclass(frozen=True)
class ReserveFailed(Event):
    """The GPU could not be reserved under that token: something else uses it, or CPUs that the app needs with it.

    also_for: further apps for which an attempt would have failed, because they ask for at least as much with a GPU.
    """

    gpu: str
    token: int
    also_for: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Freed(Event):
    """Something outside Themis gave resources back: reservations that failed may be tried again now."""


@dataclass(frozen=True)
class Configured(Event):
    """An operator changed settings. ``changes``: name of a field of `Settings` -> its new value."""

    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Tick(Event):
    """Time passed."""


@dataclass(frozen=True)
class AppInstruction(Instruction):
    """Something to send to the agent of an app. ``session``: the run of the app's driver that it is for."""

    app: str
    session: str


@dataclass(frozen=True)
class AskRho(AppInstruction):
    """Ask an app for its `Report` (step 1 of section 4.2.2).

    contention: N_avg over the app's life.
    gpus: R_C, GPUs in the cluster.
    """

    round: int
    contention: float
    gpus: int


@dataclass(frozen=True)
class Offer(AppInstruction):
    """Offer GPUs to an app and ask for a bid (steps 2 and 3 of section 4.2.2).

    contention, gpus: as of `AskRho`.
    held: the GPUs that the app keeps or was promised, whatever comes of this round.
    most: its quota; None if it has none.
    """

    round: int
    offered: tuple[Gpu, ...]
    contention: float
    gpus: int
    held: tuple[Gpu, ...]
    most: int | None


@dataclass(frozen=True)
class LeaseView:
    """One lease, as a message to its holder has it.

    remaining: seconds until its end when the message was made.
    expires: its end on the arbiter's clock, which grows when the lease is renewed.
    ending: it will not be renewed.
    leftover: the app was given the GPU and did not win it.
    group: id of the placement group that is reserved for it, in hexadecimal digits, filled in by the shell; "" while
        Ray has not reserved it.
    """

    gpu: Gpu
    token: int
    remaining: float
    ending: bool = False
    leftover: bool = False
    group: str = ""
    expires: float = 0.0


@dataclass(frozen=True)
class Leases(AppInstruction):
    """Tell an app all leases that it holds.

    ``version`` grows with each change of an app's leases: a message with another one that is not larger is out of date.
    ``promised``: GPUs that others hold and that the app gets next; 0 for apps that need no gangs. Apps that do wait for
    the rest of a gang only while something is promised.
    """

    version: tuple[int, int]
    leases: tuple[LeaseView, ...]
    promised: int = 0


@dataclass(frozen=True)
class Refused(AppInstruction):
    """Tell an app that it, or an answer of it, is not accepted.

    why: the reason, for people.
    final: the app must not go on.
    unknown: the arbiter does not know the app, which has to join again.
    waits: the app has not joined, and may try again later.
    """

    why: str
    final: bool = False
    unknown: bool = False
    waits: bool = False


@dataclass(frozen=True)
class Reserve(Instruction):
    """Reserve the GPU for the app under this token. The shell answers with `Reserved` or `ReserveFailed`."""

    gpu: str
    app: str
    token: int


@dataclass(frozen=True)
class Remove(Instruction):
    """Kill what runs on the GPU under this token and free it. The shell answers with `Removed`."""

    gpu: str
    app: str
    token: int
