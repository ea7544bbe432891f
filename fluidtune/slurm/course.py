"""The course of a search in a Slurm job, from the start of Ray on its first node to the job's end. Pure.

    starting --head is ready--> joining --all nodes have said how it went, or JOIN_S is over--> searching
    searching --driver has ended--> ending --no process is left--> ended
    starting, joining, searching --head is lost--> ending        starting, joining --notice--> ending

- *starting*: the head's Ray starts.
- *joining*: the other nodes join it.
- *searching*: the driver runs. A notice is handed on to it, once. A node that is lost is said; the search goes on.
- *ending*: the driver and the nodes end. Then a search that is to be run again is requeued.

A driver that has ended with status AGAIN is run again. A job that gets its notice before its driver has begun is not:
its time limit is too short, and would be so again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

#: The exit status of a driver that has written its state and asks to be run again: "try again later" in sysexits.h.
AGAIN = os.EX_TEMPFAIL
#: Seconds for which the search waits for nodes that have not joined. Judgement: a busy node imports Ray in 30 s.
JOIN_S = 90.0

# --- what happens


@dataclass(frozen=True)
class Ready:
    """Ray runs on a node. ``address``: that of the job's Ray."""

    node: str
    address: str


@dataclass(frozen=True)
class Lost:
    """Ray has not started on a node, or runs there no more."""

    node: str
    why: str


@dataclass(frozen=True)
class Noticed:
    """The job is to end soon. ``all_told``: Slurm has sent the signal to each process of the job's first node."""

    all_told: bool


@dataclass(frozen=True)
class Late:
    """`JOIN_S` are over since the head was ready."""


@dataclass(frozen=True)
class DriverEnded:
    """The driver has ended. ``status``: its exit status; less than 0: the signal that ended it."""

    status: int


@dataclass(frozen=True)
class AllEnded:
    """No process is left on any node."""


Event = Ready | Lost | Noticed | Late | DriverEnded | AllEnded

# --- what is done


@dataclass(frozen=True)
class StartMembers:
    """Start Ray on the job's other nodes."""

    address: str


@dataclass(frozen=True)
class StartDriver:
    """Start the script."""

    address: str


@dataclass(frozen=True)
class TellDriver:
    """Send the driver SIGTERM, by which it writes its state and ends."""


@dataclass(frozen=True)
class EndAll:
    """End the driver, if it runs, and Ray on all nodes."""


@dataclass(frozen=True)
class Requeue:
    """Ask Slurm to run the job again."""


@dataclass(frozen=True)
class Say:
    """Print a line."""

    line: str


@dataclass(frozen=True)
class Exit:
    """End with this status."""

    status: int


Instruction = StartMembers | StartDriver | TellDriver | EndAll | Requeue | Say | Exit


@dataclass
class Course:
    """The state machine. ``job``: the job's id. ``head`` and ``members``: Slurm's names of its nodes."""

    job: str
    head: str
    members: tuple[str, ...]
    state: Literal["starting", "joining", "searching", "ending", "ended"] = "starting"
    status: int = 1
    _address: str = ""
    _said: set[str] = field(default_factory=set)
    _told: bool = False

    def take(self, event: Event) -> list[Instruction]:
        """What is to be done when this happens."""
        if isinstance(event, Lost):
            return self._lost(event)
        if isinstance(event, AllEnded) and self.state == "ending":
            self.state = "ended"
            return [*([Requeue()] if self.status == AGAIN else []), Exit(self.status)]
        if self.state in ("ending", "ended"):
            return []
        if isinstance(event, Noticed):
            return self._noticed(event)
        if isinstance(event, DriverEnded):
            return self._end(event.status if event.status >= 0 else 128 - event.status)
        if isinstance(event, Ready) and event.node == self.head:
            if self.state != "starting":
                return []
            self.state, self._address = "joining", event.address
            return [StartMembers(event.address)] if self.members else self._search()
        if isinstance(event, Ready):
            self._said.add(event.node)
            return self._search_if_all()
        return self._late() if isinstance(event, Late) and self.state == "joining" else []

    def _lost(self, event: Lost) -> list[Instruction]:
        if self.state in ("ending", "ended"):
            return []
        said = f"job {self.job}: Ray on node {event.node} {event.why}"
        if event.node == self.head:
            again = f"Run the job again (scontrol requeue {self.job}); the search goes on from its state"
            return [Say(f"{said}. {again}"), *self._end(1)]
        self._said.add(event.node)
        return [Say(f"{said}. The search goes on without this node"), *self._search_if_all()]

    def _noticed(self, event: Noticed) -> list[Instruction]:
        if self.state != "searching":
            return [Say(f"job {self.job} ends before its search has begun: give it a longer --time"), *self._end(1)]
        told, self._told = self._told, True
        return [] if told or event.all_told else [TellDriver()]

    def _late(self) -> list[Instruction]:
        missing = ", ".join(sorted(set(self.members) - self._said))
        waited = f"job {self.job}: nodes {missing} have not joined after {JOIN_S:g} s"
        return [Say(f"{waited}. The search begins without them, and uses them when they come"), *self._search()]

    def _search_if_all(self) -> list[Instruction]:
        return self._search() if self.state == "joining" and self._said >= set(self.members) else []

    def _search(self) -> list[Instruction]:
        self.state = "searching"
        return [StartDriver(self._address)]

    def _end(self, status: int) -> list[Instruction]:
        self.state, self.status = "ending", status
        return [EndAll()]
