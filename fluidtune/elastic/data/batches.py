"""A worker's share of a batch (`Share`, `BatchPart`), and one iteration of the loop over a DataLoader (`Reading`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch


@dataclass(frozen=True)
class Share:
    """This worker's part of one batch.

    ``weight``: the part of the batch's samples that it has; its gradient counts by it. ``size``: samples of the whole
    batch. ``width``: the number of its parts. ``common``: all workers have the whole batch, and the leader's counts
    (`common_batches`).
    """

    weight: float
    size: int
    width: int
    common: bool = False

    @property
    def stand_in(self) -> bool:
        """Whether it has no sample, and takes part in the step with a copy of another worker's."""
        return not self.weight

    @property
    def part(self) -> int:
        """The samples of the batch that this worker has, whether they count or not."""
        return self.size if self.common else round(self.weight * self.size)

    @property
    def division(self) -> int:
        """Two batches with the same number have the same weights, on every worker. 0: equal ones; -1: the leader's."""
        return -1 if self.common else self.size if self.size % self.width else 0

    @property
    def stand_ins(self) -> int:
        """Two batches with the same number have a sample for the same workers. 0: for all; -1: for the leader."""
        return -1 if self.common else self.size if self.size < self.width else 0


class Reading:
    """One iteration over a prepared DataLoader. ``evaluates``: in each batch so far, nothing could learn."""

    def __init__(self) -> None:
        self.evaluates = True
        #: The loop reads no further.
        self.ended = False
        #: Batches since the loop has last counted samples by `elastic.samples`; whether it has, and once for several.
        self._uncounted, self._was_counted, self._ahead = 0, False, False
        self._batches = 0
        #: The tensors of the last batch, and of those before it, that the loop has not let go.
        self._last: WeakSet[torch.Tensor] = WeakSet()
        self._earlier: WeakSet[torch.Tensor] = WeakSet()
        self._had_tensors = False

    def note(self, batch: Any) -> None:
        """The loop gets this batch, as the loader's ``collate_fn`` has made it."""
        self._batches += 1
        self._earlier |= self._last
        self._last = WeakSet(tensors_in(batch))
        self._had_tensors = self._had_tensors or bool(self._last)

    @property
    def let_go(self) -> bool:
        """Whether the loop has let go of all tensors of its batches."""
        return self._had_tensors and not self._last and not self._earlier

    @property
    def may_be_counted(self) -> bool:
        """Whether a number of samples may be that of one of its batches."""
        if not self.ended:
            return True
        counts = self._was_counted or self.evaluates
        return counts and bool(self._ahead or self._uncounted) and not self.let_go

    @property
    def counted_in_step(self) -> bool:
        """Whether the loop has counted each batch so far before it fetched the next."""
        return self._was_counted and not self._ahead and not self._uncounted

    def fetched(self) -> None:
        self._uncounted += 1

    def count(self) -> None:
        """The loop counts the samples of what it has fetched."""
        self._ahead = self._ahead or self._uncounted > 1
        self._was_counted = self._was_counted or self._uncounted > 0
        self._uncounted = 0

    @property
    def kept(self) -> bool:
        """Whether the loop keeps batches on purpose: not only the last of several, as a loop's variables do."""
        return bool(self._earlier) or (self._batches == 1 and bool(self._last))


@dataclass(frozen=True)
class BatchPart:
    """What a worker has of one batch, for a loop that says itself which batch it works on; see `elastic.parts`."""

    share: Share
    reading: Reading

    @property
    def weight(self) -> float:
        """The part of the batch's samples that this worker has: its gradients count by it; 0 if none of them count."""
        return self.share.weight


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Those in a batch, or in what a module returns."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, list | tuple | dict):
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from tensors_in(part)
