"""All that goes into the arbiter, and what it answers, as plain frozen dataclasses. All times are seconds.

Events say what is so, or what has become of a reservation. An app says five times a second who it is and how things
are with it (`Heartbeat`), and gets all its leases (`Leases`) if it does not know them. With its first message it joins.
Each of the two has a state and no change of one, so that a lost or repeated message does no harm, and a late one is
only an older report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from themis_bridge.errors import ThemisError
from themis_bridge.fairness import JobKind
from themis_bridge.locality import GUESSES, Gpu, check_together
from themis_bridge.plain import number, shown, text, whole


class Event:
    """Something that happened."""


@dataclass(frozen=True)
class Gpus(Event):
    """The GPUs that are in the cluster now and can be leased. With any other GPU went what was reserved there."""

    there: tuple[Gpu, ...]


@dataclass(frozen=True)
class AppEvent(Event):
    """An app sent something. ``session``: names one run of the app's driver; after a restart it is a new one."""

    app: str
    session: str


@dataclass(frozen=True)
class AppLeft(AppEvent):
    """That session of the app is over, as it says itself, or because Ray has removed ``life``, its sign of life.

    Ray may remove that of a driver that lives. Then the driver makes another one, and its session goes on.
    """

    life: str = ""


@dataclass(frozen=True)
class Report:
    """What an app still has to do, and what places cost it. The arbiter makes rho and bids of it, see `app_record`.

    phases: the work left by kinds of jobs, the running phase first; a phase begins when the one before it has ended.
    done: work done so far, GPU seconds.
    peak: the most GPUs that the app could ever use.
    most: how many GPUs it wants at most; None: all that its jobs can use.
    across: its S on GPUs of several machines, and on GPUs of several racks, see `locality.Slowdowns`.
    endless: it never ends, as a service, and its load wants so many GPUs now. Then nothing else counts. 0: it ends.
    """

    phases: tuple[tuple[JobKind, ...], ...] = ()
    done: float = 0.0
    peak: int = 1
    most: int | None = None
    across: tuple[float, float] = GUESSES
    endless: int = 0


@dataclass(frozen=True)
class Heartbeat(AppEvent):
    """Who an app is, and how things are with it.

    number: grows with each message of the session; one with a smaller number than another says nothing any more.
    report: what it still has to do.
    known: the digest of the newest `Leases` that it knows; "": it knows none.
    left: GPU and token of each lease in these `Leases` that it has given up.
    user: the user or team that it belongs to; "": it is the only app of its user.
    life: id of a placement group that Ray removes when the driver dies; "": there is none.
    together: how many GPUs of one machine each of its trials needs at once, a power of two. The arbiter gives the app
        whole gangs of this number of GPUs, because it can use no fewer.
    bundle: Ray resource -> amount, what one of its devices reserves.
    """

    number: int
    report: Report
    known: str = ""
    left: tuple[tuple[str, int], ...] = ()
    user: str = ""
    life: str = ""
    together: int = 1
    bundle: Mapping[str, float] = field(default_factory=dict)


#: An app cannot give up more leases at once. Judgement: more than any cluster has GPUs.
MOST_LEFT = 100_000
#: A report cannot have more kinds of jobs in all its phases. Judgement: a search has a dozen rungs, and its trials a
#: few widths.
MOST_KINDS = 1000
#: GPUs that a job can use. Judgement: more than any cluster has.
MOST_GPUS = 100_000
#: Resources of which one device of a job can need some. Judgement: jobs ask for a handful.
MOST_RESOURCES = 100


def plain_heartbeat(heard: object) -> Heartbeat:
    """What an app sent, with plain values. Raises ThemisError for what cannot be true."""
    if type(heard) is not Heartbeat or type(heard.report) is not Report:
        raise ThemisError(f"{shown(heard)} is no message of an app; see themis_bridge.messages")
    left = _tuple(heard.left, "left", MOST_LEFT)
    pairs = [_tuple(pair, "one of left", 2, 2) for pair in left]
    together = whole(heard.together, "together")
    check_together(together)
    return Heartbeat(
        text(heard.app, "app"),
        text(heard.session, "session"),
        whole(heard.number, "number"),
        _plain_report(heard.report),
        text(heard.known, "known"),
        tuple((text(gpu, "a GPU of left"), whole(token, "a token of left")) for gpu, token in pairs),
        text(heard.user, "user"),
        text(heard.life, "life"),
        together,
        _plain_bundle(heard.bundle),
    )


def _plain_bundle(bundle: object) -> dict[str, float]:
    if type(bundle) is not dict or len(bundle) > MOST_RESOURCES:
        raise ThemisError(f"devices of {shown(bundle)}: expected at most {MOST_RESOURCES} Ray resources, by name")
    return {text(name, "a resource"): number(amount, "an amount", 0) for name, amount in bundle.items()}


def _tuple(value: Any, name: str, most: int, least: int = 0) -> tuple[Any, ...]:
    if type(value) is not tuple or not least <= len(value) <= most:
        raise ThemisError(f"{name} is {shown(value)}: expected a tuple of at most {most}")
    return value


def _plain_report(report: Report) -> Report:
    phases = [_tuple(phase, "a phase", MOST_KINDS) for phase in _tuple(report.phases, "phases", MOST_KINDS)]
    if sum(map(len, phases)) > MOST_KINDS:
        raise ThemisError(f"phases of a report: expected at most {MOST_KINDS} kinds of jobs in all")
    machines, racks = _tuple(report.across, "across", 2, 2)
    return Report(
        tuple(tuple(map(_plain_kind, phase)) for phase in phases),
        number(report.done, "done", 0),
        whole(report.peak, "peak", 1, MOST_GPUS),
        None if report.most is None else whole(report.most, "most", 0),
        (number(machines, "across", 1), number(racks, "across", 1)),
        whole(report.endless, "endless", 0, MOST_GPUS),
    )


def _plain_kind(kind: object) -> JobKind:
    if type(kind) is not JobKind:
        raise ThemisError(f"{shown(kind)} in a report: expected a JobKind")
    work = number(kind.work, "work", 0)
    return JobKind(
        whole(kind.max_gpus, "max_gpus", 1, MOST_GPUS),
        whole(kind.number, "number", 1),
        work,
        number(kind.longest, "longest", 0, work),
    )


@dataclass(frozen=True)
class Reservation(Event):
    """What has become of the reservation of a GPU under that token.

    group: id of the placement group that Ray has made, in hexadecimal digits; "": the reservation waits, because
        something else uses the GPU, or CPUs that the app needs with it.
    """

    gpu: str
    token: int
    group: str = ""


@dataclass(frozen=True)
class Configured(Event):
    """An operator changed settings. ``changes``: name of a field of `Settings` -> its new value."""

    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Tick(Event):
    """Time passed."""


@dataclass(frozen=True)
class LeaseView:
    """One lease, as a message to its holder has it.

    group: id of the placement group that is reserved for it, in hexadecimal digits.
    ending: it will not be renewed.
    remaining: seconds until its end when the message was made.
    """

    gpu: Gpu
    token: int
    group: str = ""
    ending: bool = False
    remaining: float = 0.0


@dataclass(frozen=True)
class Leases:
    """All leases of an app that Ray has reserved: the answer to a `Heartbeat` that knows others.

    digest: of the leases, but for the time that remains.
    promised: GPUs that are on their way to the app; 0 for apps that need no gangs. Apps that do wait for the rest of a
        gang only while something is promised.
    """

    digest: str
    leases: tuple[LeaseView, ...]
    promised: int = 0


@dataclass(frozen=True)
class Refused:
    """The answer to an app whose message the arbiter does not take.

    why: the reason, for people.
    ends: the app must not go on; otherwise it has not joined, and may try again later.
    """

    why: str
    ends: bool
