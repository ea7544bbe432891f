"""The course of a search in a Slurm job, from the start of Ray on its first node to the job's end. Pure.

    starting --head is ready--> joining --each node has said how it went, or JOIN_S is over--> searching
    searching --driver has ended--> ended        starting, joining, searching --head is lost--> ended
    starting, joining --notice--> ended

- *starting*: the head's Ray starts.
- *joining*: the other nodes join it.
- *searching*: the driver runs. A notice is handed on to it, once. A lost node is named, and the search goes on.
- *ended*: all processes end. If the driver's status is `AGAIN`, the job is requeued.

A job that gets its notice before its driver has begun is not requeued: its time limit would be too short again.

With ``joined`` the job is the head of an array (`joined`). Nodes of its other jobs join in any state but *ended*. A
driver that ends otherwise than by `AGAIN` ends them, too. After any other end one of them goes on with the search. So a
notice before the driver has begun requeues the job: it may have become the head late.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

#: The exit status of a driver that has written its state and asks to be run again: "try again later" in sysexits.h.
AGAIN = os.EX_TEMPFAIL
#: Seconds for which the search waits for nodes that have not joined. Judgement: a busy node starts Ray in 60 s.
JOIN_S = 90


@dataclass(frozen=True)
class Ready:
    """Ray runs on a node. ``address``: that of the job's Ray."""

    node: str
    address: str


@dataclass(frozen=True)
class Came:
    """Another job of the array has begun. ``job``: its id, for srun. ``nodes``: Slurm's names of its nodes."""

    name: str
    job: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Lost:
    """Ray has not started on a node, or has ended there."""

    node: str
    why: str


@dataclass(frozen=True)
class Noticed:
    """The job is to end soon. The driver may have been told by Slurm as well: to it that is one notice."""


@dataclass(frozen=True)
class Late:
    """`JOIN_S` are over since the head was ready."""


@dataclass(frozen=True)
class DriverEnded:
    """The driver has ended. ``status``: its exit status; less than 0: the signal that ended it."""

    status: int


Event = Ready | Came | Lost | Noticed | Late | DriverEnded


@dataclass(frozen=True)
class Say:
    """Print a line."""

    line: str


@dataclass(frozen=True)
class Join:
    """Start Ray on this node. ``of``: the other job whose it is. ``address``: that of the head."""

    node: str
    address: str
    of: Came | None = None


@dataclass(frozen=True)
class Drive:
    """Start the script. ``address``: that of the job's Ray."""

    address: str


@dataclass(frozen=True)
class TellDriver:
    """Send the driver SIGTERM, by which it writes its state and ends."""


@dataclass(frozen=True)
class EndOthers:
    """The search is over: end the other jobs of the array."""


@dataclass(frozen=True)
class End:
    """End all processes, requeue the job if it is to be run again, and end with this exit status."""

    status: int


Instruction = Say | Join | Drive | TellDriver | EndOthers | End


@dataclass
class Course:
    """The state machine. ``job``: the job's id. ``head`` and ``members``: Slurm's names of its nodes.

    ``joined``: it is the head of an array, whose other jobs may join it.
    """

    job: str
    head: str
    members: tuple[str, ...]
    joined: bool = False
    state: Literal["starting", "joining", "searching", "ended"] = "starting"
    _address: str = ""
    _said: set[str] = field(default_factory=set)
    _lost: set[str] = field(default_factory=set)
    _told: bool = False
    _early: list[Came] = field(default_factory=list)

    def take(self, event: Event) -> list[Instruction]:
        """What is to be done when this happens."""
        match self.state, event:
            case "ended", _:
                return []
            case _, Lost(node, _) if node in self._lost:
                return []
            case _, Lost(node, why) if node == self.head:
                again = f"Run the job again (scontrol requeue {self.job}); the search goes on from its state"
                again = "Another job of the array goes on with the search" if self.joined else again
                return [Say(f"job {self.job}: Ray on node {node} {why}. {again}"), *self._end(1)]
            case _, Lost(node, why):
                self._said.add(node)
                self._lost.add(node)
                said = Say(f"job {self.job}: Ray on node {node} {why}. The search goes on without this node")
                return [said, *self._search_if_all()]
            case _, DriverEnded(status):
                over: list[Instruction] = [EndOthers()] if self.joined and status != AGAIN else []
                return [*over, *self._end(status if status >= 0 else 128 - status)]
            case "searching", Noticed():
                told, self._told = self._told, True
                return [] if told else [TellDriver()]
            case _, Noticed() if self.joined:
                return self._end(AGAIN)
            case _, Noticed():
                return [Say(f"job {self.job} ends before its search has begun: give it a longer --time"), *self._end(1)]
            case "starting", Ready(node, address) if node == self.head:
                self.state, self._address = "joining", address
                own = [Join(node, address) for node in self.members] or self._search()
                return [*own, *(Join(node, address, each) for each in self._early for node in each.nodes)]
            case "starting", Came():
                self._early.append(event)
            case _, Came():
                return [Join(node, self._address, event) for node in event.nodes]
            case _, Ready(node):
                self._said.add(node)
                self._lost.discard(node)
                return self._search_if_all()
            case "joining", Late():
                missing = ", ".join(sorted({*self.members} - self._said))
                without = f"nodes {missing} join later than after {JOIN_S} s; the search begins without them"
                return [Say(f"job {self.job}: {without}"), *self._search()]
        return []

    def _search_if_all(self) -> list[Instruction]:
        return self._search() if self.state == "joining" and self._said >= {*self.members} else []

    def _search(self) -> list[Instruction]:
        self.state = "searching"
        return [Drive(self._address)]

    def _end(self, status: int) -> list[Instruction]:
        self.state = "ended"
        return [End(status)]
