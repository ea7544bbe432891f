"""Whether the workers of a group are alike, and what they do when one is not what the leader is."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..commits.committable import CommittableState
from ..transport.base import CollectiveBackend
from .common_batches import CommonBatches
from .comparison import Comparison
from .growth import Growth

#: What to do about a worker that is not what the leader is.
_REMEDY = (
    "a joiner has only what the loop has prepared: give elastic.prepare() the rest, too (elastic.state() for plain "
    "values), or derive it from the epoch"
)


class Likeness:
    """One worker's part in it; all workers of a group call it at the same places.

    ``leave_leader_alone``: ends the group, so that the leader goes on from where it is; raises in the others.
    """

    def __init__(self, common: CommonBatches, growth: Growth, leave_leader_alone: Callable[[], None]) -> None:
        self._common, self._growth, self._leave_leader_alone = common, growth, leave_leader_alone
        self._comparison = Comparison()

    def restart(self, joiners: bool) -> None:
        """The group is a new one. ``joiners``: some of its workers have begun the trial's code for it."""
        self._comparison.restart()
        self._common.formed(joiners)

    def differed(self, worker: int, what: str) -> None:
        """Within this turn, ``worker`` differed from the leader in ``what``, and has the leader's now."""
        self._comparison.differed(worker, what)

    def weights_due(self, at_batch: bool = False) -> bool:
        """Leader: whether the workers' weights are worth a comparison now."""
        if at_batch:
            return self._comparison.due_at_batch()
        return self._common.whole_turn or self._comparison.weights_due()

    def compare_weights(self, group: CollectiveBackend, state: CommittableState) -> None:
        """Before a batch: have the same weights, or go apart."""
        what = self._comparison.equal_at_batch(group, state)
        if what is not None:
            self.go_apart(what)

    def compare_all(self, group: CollectiveBackend, state: CommittableState, weights: bool) -> None:
        """At a boundary: have the same state, or go apart if the turn's results are the leader's alone."""
        what = self._comparison.make_equal(group, state, weights)
        if what is not None and self._common.whole_turn:
            self.go_apart(what)
        elif what is not None:
            self._growth.note_difference(f"{what}; a joiner has only what the loop has prepared")
        self._common.turn_ended()

    def total(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum of what all workers counted in this turn, by rank, each sample once."""
        return rows[0] if self._common.whole_turn else rows.sum(0)

    def go_apart(self, what: str) -> None:
        """A worker is not what the leader is, in ``what``. The leader goes on alone.

        If it alone counts in this turn so far, it does so at once; else at the boundary, as its followers have a part
        of the turn's means.
        """
        if self._common.state != "differed":
            self._growth.end(f"a new worker does not compute what the leader does: {what}; {_REMEDY}")
        at_once = self._common.whole_turn
        self._common.differed()
        if at_once:
            self._leave_leader_alone()

    def part_if_due(self) -> None:
        """At a boundary: a worker has differed in the turn that ends."""
        if self._common.state == "differed":
            self._leave_leader_alone()
