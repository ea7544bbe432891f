"""The course of a search in a Slurm job, from the start of Ray on its first node to the job's end. Pure.

    starting --head is ready--> joining --each node has said how it went, or JOIN_S is over--> searching
    searching --driver has ended--> ended        starting, joining, searching --head is lost--> ended
    starting, joining --notice--> ended

- *starting*: the head's Ray starts.
- *joining*: the other nodes join it.
- *searching*: the driver runs. A notice is handed on to it, once. A lost node is named, and the search goes on.
- *ended*: all processes end. If the driver's status is `AGAIN`, the job is requeued.

A job that gets its notice before its driver has begun is not requeued: its time limit would be too short again.
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


Event = Ready | Lost | Noticed | Late | DriverEnded


@dataclass(frozen=True)
class Say:
    """Print a line."""

    line: str


@dataclass(frozen=True)
class Start:
    """Start Ray on the job's other nodes, or the script. ``address``: that of the job's Ray."""

    what: Literal["members", "driver"]
    address: str


@dataclass(frozen=True)
class TellDriver:
    """Send the driver SIGTERM, by which it writes its state and ends."""


@dataclass(frozen=True)
class End:
    """End all processes, requeue the job if it is to be run again, and end with this exit status."""

    status: int


Instruction = Say | Start | TellDriver | End


@dataclass
class Course:
    """The state machine. ``job``: the job's id. ``head`` and ``members``: Slurm's names of its nodes."""

    job: str
    head: str
    members: tuple[str, ...]
    state: Literal["starting", "joining", "searching", "ended"] = "starting"
    _address: str = ""
    _said: set[str] = field(default_factory=set)
    _lost: set[str] = field(default_factory=set)
    _told: bool = False

    def take(self, event: Event) -> list[Instruction]:
        """What is to be done when this happens."""
        match self.state, event:
            case "ended", _:
                return []
            case _, Lost(node, _) if node in self._lost:
                return []
            case _, Lost(node, why) if node == self.head:
                again = f"Run the job again (scontrol requeue {self.job}); the search goes on from its state"
                return [Say(f"job {self.job}: Ray on node {node} {why}. {again}"), *self._end(1)]
            case _, Lost(node, why):
                self._said.add(node)
                self._lost.add(node)
                said = Say(f"job {self.job}: Ray on node {node} {why}. The search goes on without this node")
                return [said, *self._search_if_all()]
            case _, DriverEnded(status):
                return self._end(status if status >= 0 else 128 - status)
            case "searching", Noticed():
                told, self._told = self._told, True
                return [] if told else [TellDriver()]
            case _, Noticed():
                return [Say(f"job {self.job} ends before its search has begun: give it a longer --time"), *self._end(1)]
            case "starting", Ready(node, address) if node == self.head:
                self.state, self._address = "joining", address
                return [Start("members", address)] if self.members else self._search()
            case "joining", Ready(node):
                self._said.add(node)
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
        return [Start("driver", self._address)]

    def _end(self, status: int) -> list[Instruction]:
        self.state = "ended"
        return [End(status)]
