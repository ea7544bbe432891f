"""What a commit of a trial holds, and what joiners are sent: the trial's state, and how far the trial is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


class CommittableState:
    """What a trial consists of: `TrialState`, unless the trial brings its own (`ElasticSession.use_own_state`).

    The methods with a body are for a trial that keeps its state equal in all workers by itself.
    """

    #: Each follower draws from its own random streams, and not from the leader's.
    own_streams = False

    def capture(self) -> dict[str, Any]:
        """A snapshot on the CPU that shares nothing with the live objects."""
        raise NotImplementedError

    def load(self, state: dict[str, Any], *, with_streams: bool) -> None:
        """Put a snapshot back into the live objects. ``with_streams``: and into the process' random streams.

        Raises:
            ValueError: it is the state of other objects.
        """
        raise NotImplementedError

    def broadcast(self, backend: CollectiveBackend) -> None:
        """All ranks of a group: take rank 0's state."""
        raise NotImplementedError

    def loop_begins(self) -> None:
        """The boundary before the first iteration of a loop: other processes get there with the same objects."""

    def obstacle(self, lasting: bool = False) -> str | None:
        """Why other processes cannot go on from this boundary with what they have when the loop begins.

        ``lasting``: only if that will not pass.
        """
        return None

    def facts(self, weights: bool) -> dict[str, float]:
        """What must be equal in all workers, by name; counts are of the turn that ends. Empty: nothing is compared.

        ``weights``: a digest of these, too.
        """
        return {}

    def digests(self) -> dict[str, float]:
        """Of the weights, by name: those of `facts`."""
        return {}

    def take_over(self, backend: CollectiveBackend) -> float:
        """As `broadcast`. Returns how far this rank's weights were from the leader's; up to 1 is rounding."""
        return 0.0

    def set_width(self, width: int) -> None:
        """The group has this many workers from now on."""
