"""The course of a search in a Slurm job, from the start of Ray on its first node to the job's end. Pure.

    starting --head is ready--> joining --each node has said how it went, or JOIN_S is over--> searching
    searching --driver has ended--> ended        starting, joining, searching --head is lost--> ended
    starting, joining --notice--> ended

- *starting*: the head's Ray starts.
- *joining*: the other nodes join it.
- *searching*: the driver runs. A notice is handed on to it, once. A lost node is named, and the search goes on.
- *ended*: all processes end. If the driver's status is `AGAIN`, the job is requeued.

A job that gets its notice before its driver has begun is not requeued: its time limit would be too short again.

With ``joined`` the job is the head of an array (`joined`). Nodes of its other jobs join once its Ray runs, and again
after a fault. The search is over when the driver exits by itself, with any status but `AGAIN`: then the other jobs end,
too. After any other end, as by a signal, one of them goes on with the search. So a notice requeues the job whatever the
driver has done: it may have become the head late.
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
    """Another job of the array runs. ``job``: its id, for srun. ``nodes``: Slurm's names. ``start``: epoch seconds."""

    name: str
    job: str
    nodes: tuple[str, ...]
    start: int


@dataclass(frozen=True)
class Lost:
    """Ray has not started on a node, or has ended there. ``leaves``: as the node's job is to end."""

    node: str
    why: str
    leaves: bool = False


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

    @property
    def name(self) -> str:
        """What the node is called in events and lines."""
        return f"{self.node} of job {self.of.name}" if self.of else self.node


@dataclass(frozen=True)
class Drive:
    """Start the script. ``address``: that of the job's Ray. ``counted``: it knows how often its job was requeued."""

    address: str
    counted: bool = True


@dataclass(frozen=True)
class TellDriver:
    """Send the driver SIGTERM, by which it writes its state and ends."""


@dataclass(frozen=True)
class End:
    """End all processes, requeue the job if it is to be run again, and end with this exit status.

    ``others``: the search is over, and the other jobs of the array end, too.
    """

    status: int
    others: bool = False


Instruction = Say | Join | Drive | TellDriver | End


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
    #: By name of a node of another job, the job as it was when Ray was last started there; without lost nodes.
    _joins: dict[str, Came] = field(default_factory=dict)
    _told: bool = False

    def take(self, event: Event) -> list[Instruction]:
        """What is to be done when this happens."""
        match self.state, event:
            case "ended", _:
                return []
            case _, Lost(node, why) if node == self.head:
                again = f"Run the job again (scontrol requeue {self.job}); the search goes on from its state"
                again = "Another job of the array goes on with the search" if self.joined else again
                return [Say(f"job {self.job}: Ray on node {node} {why}. {again}"), *self._end(1)]
            case _, Lost(node, why, leaves):
                self._said.add(node)
                if not leaves:
                    self._joins.pop(node, None)
                said = Say(f"job {self.job}: Ray on node {node} {why}. The search goes on without this node")
                return [said, *self._search_if_all()]
            case _, DriverEnded(status):
                return self._end(status if status >= 0 else 128 - status, self.joined and 0 <= status != AGAIN)
            case "searching", Noticed():
                told, self._told = self._told, True
                return [] if told else [TellDriver()]
            case _, Noticed() if self.joined:
                return self._end(AGAIN)
            case _, Noticed():
                return [Say(f"job {self.job} ends before its search has begun: give it a longer --time"), *self._end(1)]
            case "starting", Ready(node, address) if node == self.head:
                self.state, self._address = "joining", address
                return [*(Join(node, address) for node in self.members), *self._search_if_all()]
            case (("joining" | "searching"), Came()):
                joins = [Join(node, self._address, event) for node in event.nodes]
                new = [join for join in joins if self._joins.get(join.name) != event]
                self._joins.update((join.name, event) for join in new)
                return [*new]
            case _, Ready(node):
                self._said.add(node)
                return self._search_if_all()
            case "joining", Late():
                missing = ", ".join(sorted({*self.members} - self._said))
                without = f"nodes {missing} join later than after {JOIN_S} s; the search begins without them"
                self._said.update(self.members)
                return [Say(f"job {self.job}: {without}"), *self._search_if_all()]
        return []

    def _search_if_all(self) -> list[Instruction]:
        if self.state != "joining" or not self._said >= {*self.members}:
            return []
        self.state = "searching"
        return [Drive(self._address, counted=not self.joined)]

    def _end(self, status: int, others: bool = False) -> list[Instruction]:
        self.state = "ended"
        return [End(status, others)]
