"""What trials ask a lane service: each request is read and checked whole before the service acts on it.

A message is one JSON object. Its "do" names the request, and its other keys are the values. `read` refuses every value
that `Admission` or a seat of the table cannot hold, so that no request is carried out in part.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any

from salus_share.admission import check_remaining
from salus_share.errors import SalusError
from salus_share.lanes import amount
from salus_share.messages import Need
from salus_share.seat_table import LARGEST


@dataclass(frozen=True)
class Announce:
    """A trial of process ``pid`` asks to be admitted. The others are as in `messages.JobAdded`."""

    name: str
    pid: int
    need: Need | None
    remaining: float | None
    rung: int


@dataclass(frozen=True)
class Rejoin:
    """A trial that was admitted with ``token`` names itself to a new service."""

    name: str
    token: int


@dataclass(frozen=True)
class TellNeed:
    """The trial was measured to need this much."""

    need: Need


@dataclass(frozen=True)
class TellProgress:
    """As in `messages.Progress`."""

    remaining: float | None
    rung: int


@dataclass(frozen=True)
class AskStatus:
    """Somebody asks for the state of the service."""


Request = Announce | Rejoin | TellNeed | TellProgress | AskStatus


def read(asked: Any) -> Request:
    """The request in a message, which is what its JSON says. Raises SalusError if it is none."""
    if not isinstance(asked, dict):
        raise SalusError(f"a lane service was sent {reprlib.repr(asked)}, expected a JSON object")
    try:
        return _read(asked)
    except KeyError as error:
        raise SalusError(f"a lane service was sent no {error} in {reprlib.repr(asked)}") from None


def _read(asked: dict[str, Any]) -> Request:
    match asked["do"]:
        case "announce":
            name = str(asked["name"])
            need = None if asked["persistent"] is None else _need(asked)
            return Announce(name, _whole(asked, "pid"), need, _remaining(asked, name), _whole(asked, "rung"))
        case "rejoin":
            return Rejoin(str(asked["name"]), asked["token"])
        case "need":
            return TellNeed(_need(asked))
        case "progress":
            return TellProgress(_remaining(asked, "a trial"), _whole(asked, "rung"))
        case "status":
            return AskStatus()
        case other:
            known = "announce, rejoin, need, progress, status"
            raise SalusError(f"a lane service was asked to {reprlib.repr(other)}; it knows {known}")


def _need(asked: dict[str, Any]) -> Need:
    for kind in ("persistent", "ephemeral"):
        amount(asked[kind], f"{kind} memory")
    return Need(asked["persistent"], asked["ephemeral"])


def _remaining(asked: dict[str, Any], name: str) -> float | None:
    remaining = asked["remaining"]
    check_remaining(name, remaining)
    return None if remaining is None else float(remaining)


def _whole(asked: dict[str, Any], key: str) -> int:
    value = asked[key]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
        raise SalusError(f"{key} is {reprlib.repr(value)}, expected a whole number from 0 to {LARGEST}")
    return value
