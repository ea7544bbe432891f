"""What passes between a session's host, its loop and the other workers' loops."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from .backends.base import CollectiveBackend
from .membership import Reform
from .random_streams import Streams


@dataclass(frozen=True)
class BoundaryOrder:
    """What the leader tells the others at a boundary.

    ``kind``: "go" on; "reform" the group; "stop", because the host has asked the trial to; or "end", because the
    leader's function has returned. ``epoch``: the epoch that the leader stands before. ``weights``: all compare theirs
    now. ``reform``: with "reform", the group to form. ``note``: what a follower must know of the leader's last `save`
    to inherit the trial. ``streams``: the leader's random streams, if its followers have others.
    """

    kind: Literal["go", "reform", "stop", "end"]
    epoch: int
    weights: bool = False
    reform: Reform | None = None
    note: Any = None
    streams: Streams | None = None


@dataclass
class TrialPosition:
    """How far the trial is; sent to joiners.

    ``loop``: which call of `epochs` in the user's function runs (0: the first, -1: none so far). ``epoch``: the epoch
    that runs next. ``iteration``: the iterations done, those before a restart included.
    """

    loop: int
    epoch: int
    iteration: int


class CommittableState(Protocol):
    """What a trial consists of: `TrialState`, unless the trial brings its own (`ElasticSession.adopt`).

    ``own_streams``: each follower draws from random streams of its own, and not from the leader's.
    """

    own_streams: bool

    def capture(self) -> dict[str, Any]:
        """A snapshot that shares nothing with the live objects."""
        ...

    def load(self, state: dict[str, Any], *, with_streams: bool) -> None:
        """Put a snapshot back into the live objects. ``with_streams``: and into the process' random streams."""
        ...

    def broadcast(self, backend: CollectiveBackend) -> None:
        """All ranks of a group: take rank 0's state."""
        ...

    def loop_begins(self) -> None:
        """The boundary before the first iteration of a loop: other processes get there with the same objects."""
        ...

    def obstacle(self, lasting: bool = False) -> str | None:
        """Why other processes cannot go on from this boundary with what they have when the loop begins; None: they can.

        ``lasting``: only if that will not pass.
        """
        ...

    def facts(self, weights: bool) -> dict[str, float]:
        """What must be equal in all workers, by name; counts are of the turn that ends. Empty: nothing is compared.

        ``weights``: a digest of these, too.
        """
        ...

    def digests(self) -> dict[str, float]:
        """Of the weights, by name: those of `facts`."""
        ...

    def take_over(self, backend: CollectiveBackend) -> float:
        """All ranks of a group: as `broadcast`. Returns how far this rank's weights were from the leader's; up to 1 is
        rounding.
        """
        ...

    def set_width(self, width: int) -> None:
        """The group has this many workers from now on."""
        ...


@dataclass
class HostRequests:
    """What the host asks of the loop, and what it waits for; ``changed`` guards all of it.

    ``reform``: the leader's next group. ``entry``: the group that a follower is to enter. ``leaving``: the loop is to
    end. ``ready``: a follower stands at its first boundary. ``closed``: the loop has ended.
    """

    changed: threading.Condition = field(default_factory=threading.Condition)
    reform: Reform | None = None
    entry: Reform | None = None
    leaving: bool = False
    ready: bool = False
    closed: bool = False

    def keep(self, reform: Reform) -> None:
        """The leader could not tell the others of this group: ask for it again, unless a newer one is asked for."""
        with self.changed:
            self.reform = self.reform or reform

    def drop_for(self, gone: set[str]) -> None:
        """Drop a request that would wait for a worker that just died; the host will send another one."""
        with self.changed:
            if self.reform is not None and gone & set(self.reform.members):
                self.reform = None
