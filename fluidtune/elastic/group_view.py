"""What the parts of a training loop see of the trial's group: the data, the gradients and the batch statistics."""

from __future__ import annotations

from typing import Protocol

from .attribution import BatchesAtHand
from .backends.base import CollectiveBackend


class GroupView(Protocol):
    """The group as the loop sees it. Used in the loop's thread only."""

    #: Which batches the loop works with; empty where no batch is divided. The loader tells it.
    batches: BatchesAtHand

    @property
    def turn_number(self) -> int:
        """The number of the iteration that runs; at a boundary, of the one that begins."""
        ...

    @property
    def width(self) -> int:
        """Workers that the loop shares its batches with, itself included; 1 in a joiner that has no state so far."""
        ...

    @property
    def generation(self) -> float:
        """The group's generation; -1 before the first reform."""
        ...

    def differed(self, worker: int, what: str) -> None:
        """Within this turn, ``worker`` differed from the leader in ``what``, and has the leader's now."""

    @property
    def backend(self) -> CollectiveBackend:
        """The group's collectives. Raises again what has ended this loop (`Left`, `GroupLost`)."""
        ...
