"""What the parts of a training loop see of the trial's group: the data, the gradients and the batch statistics."""

from __future__ import annotations

from typing import Protocol

from ..alike.common_batches import CommonBatches
from ..alike.likeness import Likeness
from ..commits.committable import CommittableState
from ..transport.base import CollectiveBackend
from .attribution import BatchesAtHand
from .loop_draws import LeadersStreams


class GroupView(Protocol):
    """The group as the loop sees it. Used in the loop's thread only."""

    #: The trial's name.
    trial: str
    #: Which batches the loop works with; empty where no batch is divided. The loader tells it.
    batches: BatchesAtHand
    #: Which batches are computed whole by all workers.
    common: CommonBatches
    #: Whether the workers are alike.
    likeness: Likeness
    #: What the loop draws.
    draws: LeadersStreams
    #: What the trial consists of.
    state: CommittableState

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

    @property
    def backend(self) -> CollectiveBackend:
        """The group's collectives. Raises again what has ended this loop (`Left`, `GroupLost`)."""
        ...
