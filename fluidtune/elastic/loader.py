"""The data of a trial: batches as the user's DataLoader makes them, each divided among the workers.

Only the leader draws the batches' indices, one by one as a stock DataLoader does, from its own random streams, and
sends them to the others. So the order does not depend on the width. At width 1 the user's DataLoader itself is
iterated, or one that gives the same batches in less time (`whole_batches`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from .attribution import Reading, Share
from .errors import CannotDivide
from .group_view import GroupView
from .left_out import refuse_left_out
from .whole_batches import as_it_is, in_whole_batches, reader_of

#: Batches whose indices travel in one message, if nobody can see when the sampler draws. Judgement: many
#: batches then share the delay of one message, and their indices are small.
_AHEAD = 32


class ElasticLoader:
    """Stands for the user's DataLoader, and has its length, dataset and all other attributes.

    ``len()`` is the number of batches, the same at every width. TypeError if the data cannot be divided.
    """

    def __init__(self, loader: DataLoader, group: GroupView) -> None:
        if isinstance(loader.dataset, IterableDataset):
            raise TypeError(
                "elastic.prepare() got a DataLoader over an IterableDataset, which cannot be divided among "
                "workers: give it a dataset with __getitem__ and __len__, or do not prepare it"
            )
        if loader.batch_sampler is None:
            raise TypeError(
                "elastic.prepare() got a DataLoader with batch_size=None, which cannot be divided among "
                "workers: give it a batch_size or a batch_sampler"
            )
        self._loader = loader
        self._group = group
        #: The number of iterators that were made in the trial.
        self.begun = 0
        #: Batches that the loop has got in this turn.
        self.read = 0
        #: The loop has gone on, in a later turn, with an iterator that it had made before.
        self.kept = False
        #: The loop has made a new iterator although it still had one of an earlier turn: it keeps none.
        self._renewed = False
        self._made: WeakSet[_Batches] = WeakSet()
        #: The user's loader has started its worker processes, which persist.
        self._kept = False

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # while unpickling it is not there yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        turn = self._group.turn_number
        self._renewed = self._renewed or any(made.turn is not None and made.turn < turn for made in self._unfinished())
        if self._group.width == 1:
            batches = _Batches(self, self._group, self._whole(), None)
        else:
            seed = self._seed()
            shares = _DividedBatches(self._loader, self._group)
            batches = _Batches(self, self._group, iter(self._divided(shares, seed)), shares)
        self._made.add(batches)
        return batches

    @property
    def undecided(self) -> bool:
        """At a boundary: it is not known whether the loop will keep an iterator that it has not read to its end."""
        last = self._group.turn_number - 1
        return not self._renewed and any(made.turn == last for made in self._unfinished())

    def _unfinished(self) -> list[_Batches]:
        return [made for made in self._made if not made.finished]

    def _whole(self) -> Iterator[Any]:
        """The iterator of the user's loader, which draws a seed only when an iterator of a stock loader would."""
        loader, own = self._loader, self._loader.generator
        if loader.persistent_workers and self.begun and not self._kept:
            loader.generator = torch.Generator().manual_seed(self._seed())
        self._kept = True
        self.begun += 1
        try:
            return iter(reader_of(loader))
        finally:
            loader.generator = own

    def _seed(self) -> int:
        """The seed of the loader's worker processes, which a stock iterator draws when it is made.

        If the processes persist, only the first iterator draws one; later ones get another number, and leave the stream
        as it is.
        """
        stream = self._loader.generator or torch.default_generator
        before = stream.get_state()
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator).item())
        if self._loader.persistent_workers and self.begun:
            stream.set_state(before)
            seed += self.begun
        self.begun += 1
        return seed % 2**63

    def _divided(self, shares: _DividedBatches, seed: int) -> DataLoader:
        loader = self._loader
        # The loader's worker processes are seeded from this generator: in the leader as in a stock loader, in each
        # follower differently.
        generator = torch.Generator()
        generator.manual_seed(seed + self._group.backend.rank)
        whole = in_whole_batches(loader.dataset, loader.collate_fn, loader.num_workers)
        return DataLoader(
            whole or loader.dataset,
            batch_sampler=shares,  # type: ignore[arg-type]
            num_workers=loader.num_workers,
            collate_fn=as_it_is if whole else loader.collate_fn,
            pin_memory=loader.pin_memory,
            pin_memory_device=loader.pin_memory_device,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
            generator=generator,
        )


class _Batches:
    """An iterator over the batches of a loader; ``shares``: that of its batch sampler, None at width 1.

    Raises:
        CannotDivide: it was made before the trial was resized, or the loop leaves batches out (`left_out`).
    """

    def __init__(
        self, loader: ElasticLoader, group: GroupView, batches: Iterator[Any], shares: _DividedBatches | None
    ) -> None:
        self._loader = loader
        self._group = group
        #: The turn in which it was read last; None before.
        self.turn: int | None = None
        self.finished = False
        self._generation = group.generation
        self._batches = batches
        self._shares = shares
        self._reading = Reading()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._group.generation != self._generation:
            raise CannotDivide(
                "an iterator over a prepared DataLoader was kept while the trial was resized: make "
                "a new one (iter(loader), or a for loop) in each turn of elastic.epochs()"
            )
        turn = self._group.turn_number
        self._loader.kept = self._loader.kept or (self.turn is not None and self.turn < turn and not self.finished)
        self.turn = turn
        self._group.batches.fetching()
        try:
            batch = next(self._batches)
        except StopIteration:
            self.finished = True
            self._end()
            if self._shares is not None:
                refuse_left_out(self._group, "reading")
            raise
        self._loader.read += 1
        if self._shares is not None:
            self._reading.note(batch)
            self._group.batches.fetched(self._reading, self._shares.next_share())
        return batch

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        if self._shares is not None:
            self._group.batches.ended(self._reading)


class _DividedBatches:
    """A batch sampler that yields this worker's part of each batch, and remembers its `Share`."""

    def __init__(self, loader: DataLoader, group: GroupView) -> None:
        self._sampler = loader.batch_sampler
        self._group = group
        self._ahead = _AHEAD if _draws_at_once(loader) else 1
        self._drawn: deque[Share] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        group = self._group.backend
        rank, world = group.rank, group.world
        source = iter(self._sampler) if rank == 0 else None  # type: ignore[arg-type]
        while True:
            message = None
            if source is not None:
                message = [list(batch) for batch in islice(source, self._ahead)]
            batches = self._group.backend.broadcast_object(message, "the next batches")
            if not batches:
                return
            for batch in batches:
                start, stop = part_of_batch(len(batch), rank, world)
                self._drawn.append(Share((stop - start) / len(batch), stop == start, len(batch), world))
                yield batch[start:stop] or batch[:1]

    def next_share(self) -> Share:
        """The share of the batch that is handed out now; batches are handed out in the order of their indices."""
        return self._drawn.popleft()


def part_of_batch(size: int, rank: int, world: int) -> tuple[int, int]:
    """The contiguous part [start, stop) of a batch that a rank gets. Parts differ by at most one sample."""
    each, over = divmod(size, world)
    start = rank * each + min(rank, over)
    return start, start + each + (rank < over)


def generators_of(loader: ElasticLoader) -> list[torch.Generator]:
    """The user's own generators that determine the order of the data, each once."""
    found: list[torch.Generator] = []
    batches = loader.batch_sampler
    for holder in (loader, batches, getattr(batches, "sampler", None)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not known for known in found):
            found.append(generator)
    return found


def _draws_at_once(loader: DataLoader) -> bool:
    """Whether the sampler draws from a stream that others use only before its first batch.

    Then indices can be drawn ahead, and a loop that is left early leaves the streams as a stock loader does.
    """
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        return False
    sampler = batches.sampler
    if type(sampler) is RandomSampler:
        return sampler.generator is None
    return type(sampler) is SequentialSampler
