"""Decides which of the fetched batches a backward pass is about, to weight its gradients by the worker's share.

PyTorch does not say from which batch a loss was computed. The rule: every loader that is being read has one batch *at
hand*, its latest. If the loop fetches a second batch before it has used the first one (it prefetches, or puts several
batches into one backward pass), all batches of that reading are at hand until the next boundary. A use may be about any
batch at hand, so all of them must be divided in the same way: their sizes are equal, or multiples of the width.
Otherwise `CannotDivide` is raised on all workers, and the trial goes on with one. A reading that has ended stays at
hand while the loop keeps its batches, as `itertools.cycle` does.

A loop that knows which batch it works on says so (`elastic.parts`): then the rule is not asked, and the loop may fetch
as many batches ahead as it likes.

A reading in which the loop evaluates is forgotten when it ends: nothing used its batches, and at each of its batches
gradients were off or all modules were in evaluation mode.

A loop may also evaluate over data that nobody divides, such as a DataLoader that was not prepared. Then each worker has
all of it. Only the leader's samples count: what the loop has not prepared, such as an average of weights, is right in
the leader. A loop that asks for its rank may have divided such data itself, and all its samples count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..errors import CannotDivide
from .batches import BatchPart, Reading, Share
from .counted import Counted
from .kept_samples import KeptSamples
from .left_out import LeftOut


@dataclass
class _Fetched:
    """What one kind of use knows of a reading. ``shares``: its batches at hand, one of each kind."""

    shares: dict[int, Share] = field(default_factory=dict)
    unused: int = 0
    used: bool = False
    #: It was ahead of its uses: its batches stay at hand.
    ahead: bool = False
    ended: bool = False


class Uses:
    """One kind of use (gradients, batch statistics or counts of samples) and the batches that are at hand for it.

    ``what`` names the kind in an error. ``kind_of``: for this use two batches are the same if it returns the same for
    both. ``on_use``: called at each use. ``again``: a batch may be used again beside a later one of another loader.
    """

    def __init__(
        self, what: str, kind_of: Callable[[Share], int], on_use: Callable[[], None], again: bool = True
    ) -> None:
        self._what, self._kind_of, self._on_use, self._again = what, kind_of, on_use, again
        #: Of the batch that the loop says it works on; None: it has said nothing.
        self.said: Share | None = None
        self._readings: dict[Reading, _Fetched] = {}
        #: Batches of readings that evaluated: only if nothing else is at hand, a use is about one of them.
        self._evaluated: dict[int, Share] = {}

    def fetched(self, reading: Reading, share: Share) -> None:
        """The loop gets a batch."""
        fetched = self._readings.setdefault(reading, _Fetched())
        if not fetched.unused and not fetched.ahead:
            fetched.shares.clear()
        fetched.shares[self._kind_of(share)] = share
        fetched.unused += 1

    def ended(self, reading: Reading) -> None:
        """The loop reads no further."""
        fetched = self._readings.get(reading)
        if fetched is None:
            return
        fetched.ended = True
        if reading.evaluates and not fetched.used:
            self._evaluated.update(fetched.shares)
            del self._readings[reading]

    def _is_over(self, reading: Reading, fetched: _Fetched) -> bool:
        """Whether its batches are used up, now that there are others."""
        if fetched.unused or fetched.ahead or not fetched.used:
            return not self._again and fetched.ended and reading.let_go
        return not self._again or (fetched.ended and not reading.kept)

    @property
    def settled(self) -> bool:
        """Whether the loop has fetched no batch before it used the last one, and keeps none on purpose."""
        return not any(f.ahead or f.unused > 1 or reading.kept for reading, f in self._readings.items())

    @property
    def all_used(self) -> bool:
        """Whether each batch was used that the loop learns from."""
        return not any(f.unused for reading, f in self._readings.items() if not reading.evaluates)

    def forget_ended(self) -> None:
        """What was fetched is used up, except by readings that go on."""
        self._readings = {reading: fetched for reading, fetched in self._readings.items() if not fetched.ended}
        self._evaluated = {}

    def use(self) -> Share | None:
        """The share of the batch that is used now; None: no batch was fetched since the boundary.

        Raises:
            CannotDivide: it could be one of several batches that are not divided in the same way.
        """
        self._on_use()
        if self.said is not None:
            return self.said
        if len(self._readings) > 1 and any(fetched.unused for fetched in self._readings.values()):
            self._readings = {r: f for r, f in self._readings.items() if not self._is_over(r, f)}
        shares: dict[int, Share] = {}
        for fetched in self._readings.values():
            fetched.ahead = fetched.ahead or fetched.unused > 1
            fetched.unused, fetched.used = 0, True
            shares.update(fetched.shares)
        found = list((shares or self._evaluated).values())
        if len(found) > 1:
            sizes = " or ".join(map(str, sorted(share.size for share in found)))
            raise CannotDivide(
                f"{self._what} could belong to batches of {sizes} samples, which {found[0].width} workers divide in "
                "different ways: the loop fetches a batch before it has used the last one (drop_last=True, or batch "
                "sizes that the width divides, let it grow)"
            )
        return found[0] if found else None


class BatchesAtHand:
    """The batches that the loop has fetched since its last boundary. Used in the loop's thread only."""

    def __init__(self) -> None:
        self._modules: list[torch.nn.Module] = []
        self.left_out = LeftOut()
        self.kept = KeptSamples()
        #: The loop has asked for this worker's rank.
        self.knows_rank = False
        #: The readings of this turn.
        self._read: list[Reading] = []
        self.clear()

    def watch(self, module: torch.nn.Module) -> None:
        """One of the trial's modules, by whose mode an evaluation is recognised."""
        self._modules.append(module)

    def next_turn(self) -> None:
        """A boundary: what was fetched before is used up, except by readings that the loop has kept."""
        self._handed_out = 0
        self._read = [reading for reading in self._read if not reading.ended]
        self.kept.next_turn()
        for uses in self._uses:
            uses.forget_ended()
            uses.said = None
        self.left_out.clear()

    def clear(self) -> None:
        """The trial has another group: no batch is divided now."""
        #: Since the last mean, or since the group has formed.
        self.counted = Counted()
        #: Batches that the loop has fetched and has not said yet that it works on.
        self._handed_out = 0
        self._read = []
        self.left_out.clear()
        used, counted = self.left_out.used, self.left_out.counted
        self.gradients = Uses("gradients", lambda share: share.division, used)
        self.statistics = Uses("batch statistics", lambda share: share.division, counted)
        self.counts = Uses("elastic.samples()", lambda share: share.stand_ins, counted, again=False)
        self._uses = (self.gradients, self.statistics, self.counts)

    def fetching(self) -> None:
        """The loop asks for a batch, at any width (see `rehearsal`)."""

    def fetched(self, reading: Reading, share: Share) -> None:
        """The loop gets a batch of which this worker has a share."""
        reading.evaluates = reading.evaluates and self.nothing_learns()
        reading.fetched()
        if reading not in self._read:
            self._read.append(reading)
        for uses in self._uses:
            uses.fetched(reading, share)
        self.left_out.fetched(reading, share)

    def handed_out(self) -> None:
        """The loop gets a batch and will say itself when it works on it."""
        self._handed_out += 1

    def work_on(self, part: BatchPart | None) -> None:
        """What follows is about this part of a batch; None: about what the loop fetches next, by the rule."""
        for uses in self._uses:
            uses.said = None if part is None else part.share
        if part is None:
            return
        self._handed_out = max(0, self._handed_out - 1)
        part.reading.evaluates = part.reading.evaluates and self.nothing_learns()
        self.left_out.fetched(part.reading, part.share)

    def ended(self, reading: Reading) -> None:
        """The reading's last batch was fetched, or the loop reads no further."""
        reading.evaluates = reading.evaluates and self.nothing_learns()
        reading.ended = True
        for uses in self._uses:
            uses.ended(reading)
        self.left_out.ended(reading)

    def count(self, n: int, leads: bool) -> int:
        """How many of these ``n`` samples count for this worker, which the loop works with now."""
        if not self._may_be_divided():
            return n if leads else 0
        share = self.counts.use()
        for reading in self._read:
            reading.count()
        return 0 if share is not None and share.stand_in else n

    def _may_be_divided(self) -> bool:
        """Whether what the loop works with may be of a batch that is divided."""
        if self.knows_rank or self._handed_out or self.counts.said is not None or not self.nothing_learns():
            return True
        return any(reading.may_be_counted for reading in self._read)

    @property
    def settled(self) -> bool:
        """Between two batches: the loop has used and counted all that it fetched, and keeps none of it."""
        return self._handed_out == 0 and self.gradients.settled and self.counts.all_used

    def nothing_learns(self) -> bool:
        """Whether gradients are off, or all of the trial's modules are in evaluation mode."""
        if not torch.is_grad_enabled():
            return True
        return bool(self._modules) and not any(module.training for module in self._modules)
