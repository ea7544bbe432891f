"""The versions of a served model: which one serves, which one stands beside it, and what may be asked next. It is pure.

A version is a checkpoint of a trial, with a number from 1. At most two are loaded at a time. An event goes into
`handle`, and the versions after it come out. What there must be for them, such as processes, is read off them
(`Versions.loaded`), and `symphony_serve.replacement` says in which order that comes about. docs/serving-decisions.md
draws the states, and a test holds the drawing equal to what `handle` does.
"""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass, replace
from typing import Any, Literal

from symphony_serve.errors import ServeError

#: ``one``: one version is loaded. ``loading``: another one loads, or is measured. ``canary``: another one answers its
#: share of the requests. ``moved``: the newer one answers all, and the one before is kept. It is read off the versions.
Phase = Literal["one", "loading", "canary", "moved"]

#: ``loading``: its processes start. ``measuring``: its batches are timed. ``refused``: it could not serve. ``serving``:
#: it answers all but a canary's requests. ``kept``: it answers only who names it. ``ended``: it has no process. The
#: first version begins as ``serving``, the others as ``loading``.
State = Literal["loading", "measuring", "refused", "serving", "canary", "kept", "ended"]


@dataclass(frozen=True)
class Version:
    """A checkpoint of a trial that is or was served.

    what: what a process needs to load it; nothing is decided by it. aim: its state when it is measured. share: the part
    of the requests that it answers as a canary. why: it was refused.
    """

    number: int
    trial: str
    run: str
    what: Any = None
    state: State = "loading"
    aim: State = "serving"
    share: float = 0.0
    why: str = ""

    @property
    def key(self) -> str:
        """Its name in the scheduler, the log and the books: the trial, and from version 2 on its number."""
        return self.trial if self.number == 1 else f"{self.trial}@{self.number}"

    @property
    def said(self) -> str:
        return f"version {self.number} (trial {self.trial})"


def labels(key: str) -> tuple[str, str]:
    """The trial and the version's number of a `Version.key`."""
    trial, _, number = key.partition("@")
    return trial, number or "1"


def operators_command(user: str, word: str, name: str) -> str:
    """What an operator types about the service of this name and user, as a shell takes it."""
    return shlex.join(["fluidtune", "serve", "--user", user, word, "--name", name])


@dataclass(frozen=True)
class Versions:
    """The versions of a model. serving: answers. other: stands beside it, or is to. last: the latest that went.

    service, user: the name of the service and its user, for the commands that its refusals name.
    """

    serving: Version
    other: Version | None = None
    last: Version | None = None
    service: str = ""
    user: str = ""

    def command(self, word: str) -> str:
        """What an operator types about this service."""
        return operators_command(self.user, word, self.service)

    @property
    def phase(self) -> Phase:
        if self.other is None:
            return "one"
        phases: dict[State, Phase] = {"canary": "canary", "kept": "moved"}
        return phases.get(self.other.state, "loading")

    @property
    def known(self) -> list[Version]:
        """All that status shows, the serving one first."""
        return [one for one in (self.serving, self.other, self.last) if one is not None]

    @property
    def loaded(self) -> list[Version]:
        """The versions that each device is to have."""
        return [one for one in (self.serving, self.other) if one is not None]

    @property
    def answering(self) -> dict[str, Version]:
        """By number, the versions that a request may name."""
        found = [one for one in self.known if one.state in ("serving", "canary", "kept")]
        return {str(one.number): one for one in sorted(found, key=lambda one: one.number)}

    def drawn(self, request: str, able: bool = True) -> Version:
        """The version for a request with this id; the same each time. able: whether a canary can answer now."""
        if self.other is None or self.other.state != "canary" or not able:
            return self.serving
        mark = int.from_bytes(hashlib.blake2b(request.encode(), digest_size=8).digest(), "big")
        return self.other if mark < self.other.share * 2**64 else self.serving


@dataclass(frozen=True)
class Deploy:
    """Somebody wants another checkpoint to serve. share: the part of the requests that it gets at first; 1: all."""

    trial: str
    run: str
    what: Any = None
    share: float = 1.0


@dataclass(frozen=True)
class Restored:
    """The front was restarted, and the version that was beside the serving one is to come back. ``version``: as it was.

    It takes the place that it had when it is measured.
    """

    version: Version


@dataclass(frozen=True)
class Loaded:
    """All devices have the version of this number. Now its batches are timed."""

    number: int


@dataclass(frozen=True)
class Measured:
    """The version can serve."""

    number: int


@dataclass(frozen=True)
class Failed:
    """The version cannot serve."""

    number: int
    why: str


@dataclass(frozen=True)
class Promote:
    """The canary is to answer all requests."""


@dataclass(frozen=True)
class Rollback:
    """What was deployed last is to go: one that loads, a canary, or one that answers all and has the other one kept."""


Event = Deploy | Restored | Loaded | Measured | Failed | Promote | Rollback


def handle(versions: Versions, event: Event) -> Versions:
    """The versions after the event.

    Raises ServeError in one line for what cannot be asked now; nothing has changed then. An event of a version that is
    not loading any more changes nothing.
    """
    other, phase = versions.other, versions.phase
    if isinstance(event, Deploy):
        return _deploy(versions, event)
    if isinstance(event, Restored):
        if phase != "one":
            raise ServeError(f"a version comes back to a service that is {phase}, expected one version")
        back = replace(event.version, state="loading", aim=event.version.state)
        return replace(versions, other=back)
    if isinstance(event, Promote):
        if other is None or other.state != "canary":
            raise ServeError(f"there is no canary to promote; {versions.command('status')} shows the versions")
        return _move(versions, other)
    if isinstance(event, Rollback):
        if other is None:
            said = f"only {versions.serving.said} of service {versions.service!r} is loaded"
            raise ServeError(f"{said}, so there is nothing to go back to; deploy one")
        if other.state != "kept":
            return replace(versions, other=None, last=replace(other, state="ended"))
        ended = replace(versions.serving, state="ended")
        return replace(versions, serving=replace(other, state="serving"), other=None, last=ended)
    if other is None or other.number != event.number or phase != "loading":
        return versions
    if isinstance(event, Failed):
        return replace(versions, other=None, last=replace(other, state="refused", why=event.why))
    if isinstance(event, Loaded):
        return replace(versions, other=replace(other, state="measuring"))
    if other.state != "measuring":
        return versions
    if other.aim == "serving":
        return _move(versions, other)
    return replace(versions, other=replace(other, state=other.aim))


def _deploy(versions: Versions, event: Deploy) -> Versions:
    other = versions.other
    if other is not None and other.state == "canary":
        raise ServeError(f"{other.said} is a canary; {versions.command('promote')}, or {versions.command('rollback')}")
    if other is not None and other.state != "kept":
        raise ServeError(f"{other.said} is being deployed; wait for it, or give it up: {versions.command('rollback')}")
    aim: State = "serving" if event.share >= 1 else "canary"
    number = 1 + max(one.number for one in versions.known)
    new = Version(number, event.trial, event.run, event.what, aim=aim, share=event.share)
    last = replace(other, state="ended") if other is not None else versions.last
    return replace(versions, other=new, last=last)


def _move(versions: Versions, new: Version) -> Versions:
    """The new version answers all; the one before is kept."""
    return replace(versions, serving=replace(new, state="serving"), other=replace(versions.serving, state="kept"))
