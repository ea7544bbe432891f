"""What the parts of a training loop see of the trial's group, and what they ask all of its workers."""

from __future__ import annotations

from typing import Protocol

import torch

from ..alike.common_batches import CommonBatches
from ..alike.likeness import Likeness
from ..commits.committable import CommittableState
from ..errors import CannotDivide
from ..transport.base import CollectiveBackend
from .attribution import BatchesAtHand
from .counted import Counted
from .kept_samples import KEEPS
from .left_out import Place
from .loop_draws import LeadersStreams
from .outputs import Outputs


class GroupView(Protocol):
    """The group as the loop sees it. Used in the loop's thread only."""

    #: The trial's name.
    trial: str
    #: Which batches the loop works with; empty where no batch is divided.
    batches: BatchesAtHand
    #: Which batches are computed whole by all workers.
    common: CommonBatches
    #: Compares the workers.
    likeness: Likeness
    #: What the loop draws.
    draws: LeadersStreams
    #: What modules make of an evaluation's first batch.
    outputs: Outputs
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


# A worker knows only what it has read itself (`left_out`, `counted`). So all ask each other, and raise at one place.


def refuse_left_out(group: GroupView, place: Place) -> None:
    """Raise CannotDivide on all workers if the loop has left out batches because their parts are short."""
    why = group.batches.left_out.why(place)
    if why is not None:
        # A worker whose part is longer may have used the batch: it is in another collective then, and gets an error.
        group.backend.exchange(torch.zeros(1), "a batch that all have left out")
        raise CannotDivide(why)


def total_of_all(group: GroupView, pair: torch.Tensor) -> torch.Tensor:
    """What all workers give `elastic.mean`, a sum and the count of what is in it, summed up.

    Raises:
        CannotDivide: batches were left out, the counts are those of the whole data, or samples of an earlier turn were
            kept; on all workers.
    """
    refuse_left_out(group, "mean")
    why = None if group.common.whole_turn else group.batches.counted.why_wrong(float(pair[1]))
    group.batches.counted = Counted()
    flags = pair.new_tensor([float(why is not None), float(group.batches.kept.keeps)])
    rows = group.backend.exchange(torch.cat([pair, flags]), "elastic.mean()")
    total = group.likeness.total(rows[:, :2])
    if rows[:, 3].any():
        group.likeness.trains_apart(KEEPS)
    if why is not None and rows[:, 2].all():  # in one worker alone it is a coincidence
        raise CannotDivide(why)
    return total
