"""Compares the workers of a group, and decides what they do when one is not what the leader is.

Workers drift apart where a loop keeps state that no joiner gets, such as slow weights in a list. Small facts are
compared at every boundary. Digests of weights are compared before each of the first `EACH_BATCH` divided batches of a
group, later as often as that costs less than `SHARE` of the time, at the first boundary, before a loop's last iteration
and after it, and before the group is re-formed or stopped. If something differs, all workers take the leader's state.
Weights that differ before a batch end the trial's growth (`common_batches` says how the turn goes on). A difference at
a boundary ends it the second time, because the loop would cause it again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from ..commits.committable import CommittableState
from ..transport.base import CollectiveBackend
from .common_batches import CommonBatches
from .growth import Growth

#: The part of a trial's time that digests of its weights may take: below the noise of iteration times.
SHARE = 0.01
#: Divided batches of a group before each of which the weights are compared, whatever that costs: what a loop does every
#: 5 or 10 steps, such as a step of slow weights, shows in them.
EACH_BATCH = 32
#: The facts about weights.
_WEIGHTS = ("parameters", "buffers")
#: The facts that people can read; the others are digests.
_NUMBERS = ("optimizer steps", "batches", "learning rate")
#: What to do about a worker that is not what the leader is.
_REMEDY = (
    "a joiner has only what the loop has prepared: give elastic.prepare() the rest, too (elastic.state() for plain "
    "values), or derive it from the epoch"
)


class Likeness:
    """One worker's part in it; all workers of a group call it at the same places.

    ``leave_leader_alone``: ends the group, so that the leader goes on from where it is; raises in the others.
    ``begin_anew``: raises in all, for the reason that it gets; the trial begins again with one worker.
    """

    def __init__(
        self,
        common: CommonBatches,
        growth: Growth,
        leave_leader_alone: Callable[[], None],
        begin_anew: Callable[[str], None],
    ) -> None:
        self._common, self._growth = common, growth
        self._leave_leader_alone, self._begin_anew = leave_leader_alone, begin_anew
        #: When this group's weights were compared last (monotonic clock).
        self._last: float | None = None
        #: The seconds that the quickest digest took: one that is slow on a busy machine must not delay later ones.
        self._cost = math.inf
        #: Comparisons before a batch, in this group.
        self._at_batches = 0
        #: What was found to differ since the last boundary, and put right: the worker, and the words.
        self._within: tuple[int, str] | None = None

    def restart(self, joiners: bool) -> None:
        """The group is a new one. ``joiners``: some of its workers have begun the trial's code for it."""
        self._last = self._within = None
        self._at_batches = 0
        self._common.formed(joiners)

    def differed(self, worker: int, what: str) -> None:
        """Within this turn, ``worker`` differed from the leader in ``what``, and has the leader's now."""
        self._within = (worker, what)

    def weights_due(self, at_batch: bool = False) -> bool:
        """Leader: whether the workers' weights are worth a comparison now."""
        if self._at_batches < EACH_BATCH if at_batch else self._common.whole_turn:
            return True
        return self._last is None or self._cost <= SHARE * (time.monotonic() - self._last)

    def compare_weights(self, group: CollectiveBackend, state: CommittableState) -> None:
        """Before a batch: have the same weights, or go apart."""
        self._at_batches += 1
        found = self._differing(group, state, self._timed(state.digests))
        if found is not None:
            self.go_apart(found[1])

    def compare_all(
        self, group: CollectiveBackend, state: CommittableState, weights: bool, again: bool = False
    ) -> None:
        """At a boundary: have the same state, or go apart if the turn's results are the leader's alone.

        ``again``: the next turn begins with a batch that all compute whole.
        """
        facts = self._timed(lambda: state.facts(True)) if weights else state.facts(False)
        if facts:
            within, self._within = self._within, None
            found = self._differing(group, state, facts)
            if found is not None and within is not None:
                found = found[0], f"{within[1]}, {found[1]}"
            found = found or within
            if found is not None:
                what = f"worker {found[0]} differed from the leader in: {found[1]}"
                if self._common.whole_turn:
                    self.go_apart(what)
                else:
                    self._growth.note_difference(f"{what}; a joiner has only what the loop has prepared")
        self._common.turn_ended()
        if again:
            self._common.ask_again()

    def total(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum of what all workers counted in this turn, by rank, each sample once."""
        return rows[0] if self._common.whole_turn else rows.sum(0)

    def trains_apart(self, what: str) -> None:
        """With the same weights and batch a worker does not train as the leader does, in ``what``.

        It differs in what the loop keeps for itself. The leader has that as it would alone only if it has got no part
        of a batch so far: then it goes on alone. Else the trial begins anew.
        """
        if self._common.has_divided and self._common.state != "differed":
            self._begin_anew(f"its workers do not compute the same any more: {what}; {_REMEDY}")
        self.go_apart(what)

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

    def _timed(self, digests: Callable[[], dict[str, float]]) -> dict[str, float]:
        started = self._last = time.monotonic()
        found = digests()
        self._cost = min(self._cost, time.monotonic() - started)
        return found

    def _differing(
        self, group: CollectiveBackend, state: CommittableState, facts: dict[str, float]
    ) -> tuple[int, str] | None:
        """The first worker that differs from the leader beyond rounding, and in what. All have the leader's then."""
        rows = group.exchange(torch.tensor(list(facts.values()), dtype=torch.float64), "the comparison of the workers")
        differing = [i for i in range(rows.shape[1]) if not torch.equal(rows[:, i], rows[:1, i].expand(len(rows)))]
        if not differing:
            return None
        distance = state.take_over(group)
        furthest = float(group.exchange(torch.tensor([distance], dtype=torch.float64), "the distance").max())
        names = list(facts)
        if furthest <= 1 and all(names[i] in _WEIGHTS for i in differing):
            return None
        worker = next(rank for rank in range(1, len(rows)) if not torch.equal(rows[rank], rows[0]))
        return worker, ", ".join(_described(names[i], float(rows[0, i]), float(rows[worker, i])) for i in differing)


def _described(name: str, leaders: float, theirs: float) -> str:
    return f"{name} ({theirs:g}, leader {leaders:g})" if name in _NUMBERS else name
