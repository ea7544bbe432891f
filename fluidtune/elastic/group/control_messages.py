"""What passes between a session's host, its loop and the other workers' loops."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Literal

from ..random_streams import Streams
from ..transport.membership import Reform


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
