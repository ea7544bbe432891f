"""Ends the group where the loop's own use of its batches shows that the trial cannot be divided.

One worker alone knows only what it has read itself (`left_out`, `counted`). So all ask each other, and raise
`CannotDivide` at the same place.
"""

from __future__ import annotations

import torch

from ..errors import CannotDivide
from .counted import Counted
from .group_view import GroupView
from .left_out import Place


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
        CannotDivide: the counts are those of the whole data; on all workers.
    """
    why = None if group.common.whole_turn else group.batches.counted.why_wrong(float(pair[1]))
    group.batches.counted = Counted()
    rows = group.backend.exchange(torch.cat([pair, pair.new_tensor([float(why is not None)])]), "elastic.mean()")
    if why is not None and rows[:, 2].all():  # in one worker alone it is a coincidence
        raise CannotDivide(why)
    return group.likeness.total(rows[:, :2])
