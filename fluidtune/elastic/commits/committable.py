"""What a commit of a trial holds, and what joiners are sent: the trial's state, and how far the trial is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ..transport.base import CollectiveBackend


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
