"""What a trial's leader knows of its group, which comes to the driver with every reply; and what it is told.

A session makes the facts (`fluidtune.elastic.LeaderSession.facts`), the worker's host sends them whole, and the trial's
life in the driver reads them (`fluidtune.trials`). A new fact is a field here, its value in a session, and a line that
reads it. A `Reform` goes the other way: the trial's life makes it, and a host hands it to its session.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class GroupFacts:
    """The defaults hold for a trial whose loop has not called `fluidtune.elastic`."""

    #: The trial can have several workers. It may become true as the loop runs, and then stays true.
    is_elastic: bool = False
    #: (host, port) where followers find the leader. None while the trial is not elastic.
    address: tuple[str, int] | None = None
    #: The number of workers in the group, the leader included.
    width: int = 1
    #: Generation and pause in seconds of the last resize; None before the first.
    last_reform: tuple[float, float] | None = None
    #: The generation of the last reform that the leader has refused. Its joiners end by themselves.
    refused: float | None = None
    #: Why the trial must go on with one worker, in a line.
    ungrowable: str | None = None
    #: At how many boundaries the workers differed, and in what at the last of these, in a line. They are equal again.
    differences: int = 0
    difference: str | None = None
    #: The loop goes on by itself, in a smaller group, when a follower dies.
    mends: bool = False
    #: Why the group is lost, in a line. What the loop raises after that is no error of the trial's: a GPU's collective
    #: that was aborted leaves no sum behind.
    lost: str | None = None
    #: The loop is writing its last commit, for which the host waits.
    committing: bool = False
    #: Why no commit is possible, or why the last one failed, in a line: what the trial has done since would be lost.
    cannot_commit: str | None = None
    #: The random streams with which the trial's code began, for its joiners. None: none, or they were sent before.
    streams: dict[str, Any] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Reform:
    """The trial's workers from the next boundary on.

    ``generation`` grows with every reform of the trial. ``members`` are worker ids; members[0] is the leader, in every
    reform of the trial the same. ``address`` is the leader's `GroupFacts.address`. ValueError if ``members`` is
    empty or names a worker twice.
    """

    generation: int
    members: tuple[str, ...]
    address: tuple[str, int]

    def __post_init__(self) -> None:
        if not self.members or len(set(self.members)) != len(self.members):
            raise ValueError(f"members must be one or more different workers, not {self.members}")
