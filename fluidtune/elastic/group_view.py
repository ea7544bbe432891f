"""What the parts of a training loop see of the trial's group: the data, the gradients and the batch statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .backends.base import CollectiveBackend


@dataclass(frozen=True)
class Share:
    """This worker's part of the batch at hand.

    ``weight``: the part of the batch's samples that it has; its gradient counts by it. ``stand_in``: it has none, and
    takes part in the step with a copy of another worker's sample.
    """

    weight: float
    stand_in: bool = False


class GroupView(Protocol):
    """The group as the loop sees it. Used in the loop's thread only."""

    #: What this worker has of the batch at hand. None: no batch is divided now. The loader sets it.
    share: Share | None

    @property
    def width(self) -> int:
        """Workers that the loop shares its batches with, itself included; 1 in a joiner that has no state so far."""
        ...

    @property
    def weight(self) -> float:
        """What this worker's gradient counts; the weights of all workers sum to 1."""
        ...

    @property
    def generation(self) -> float:
        """The group's generation; -1 before the first reform."""
        ...

    @property
    def backend(self) -> CollectiveBackend:
        """The group's collectives. Raises again what has ended this loop (`Left`, `GroupLost`)."""
        ...
