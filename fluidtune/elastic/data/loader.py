"""The data of a trial: batches as the user's DataLoader makes them, each divided among the workers.

Only the leader draws the batches' indices, one by one as a stock DataLoader does, from its own random streams, and
sends them to the others. So the order does not depend on the width. At width 1 the user's DataLoader itself is
iterated, or one that gives the same batches in less time (`whole_batches`).
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any
from weakref import WeakSet

import numpy
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from ..alike.common_batches import compares
from ..errors import CannotDivide
from ..random_streams import Streams
from .batches import BatchPart, Reading, Share
from .group_view import GroupView, refuse_left_out
from .loop_draws import Part, PartsOfDataset, seed_of
from .whole_batches import as_it_is, in_whole_batches, reader_of

#: Batches whose indices travel in one message, if nothing shows when the sampler draws.
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
        self.begun = 0  # iterators that were made in the trial
        self.read = 0  # batches that the loop has got in this turn
        #: The growth (`CommonBatches.growths`) that the evaluations are counted since, and the evaluations over it.
        self._growth = self._evaluations = 0
        #: The loop has gone on, in a later turn, with an iterator that it had made before.
        self.reuses_iterator = False
        #: The loop has let go of an iterator of an earlier turn, or made a new one although it still had it.
        self.renews_iterator = False
        self._made: WeakSet[_Batches] = WeakSet()
        self._processes_started = False  # those of the user's loader, which may persist

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # while unpickling it is not there yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> _Batches:
        turn = self._group.turn_number
        if any(made.turn is not None and made.turn < turn for made in self._unfinished()):
            self.renews_iterator = True
        if self._group.width == 1:
            batches = _Batches(self, self._group, self._whole(), None)
        else:
            # A stock iterator is made so, too: first that of the sampler, which may draw all of its batches then.
            source = iter(self._loader.batch_sampler) if self._group.backend.rank == 0 else None  # type: ignore[arg-type]
            seed = self._seed()
            if self._loader.num_workers:
                seed = self._group.backend.broadcast_object(seed, "the seed of a loader's processes")
            shares = _DividedBatches(self, self._group, seed, source)
            batches = _Batches(self, self._group, iter(self._divided(shares, seed)), shares)
        self._made.add(batches)
        return batches

    def parts(self) -> Iterator[tuple[Any, BatchPart | None]]:
        """See `elastic.parts`."""
        batches = iter(self)
        batches.says_itself = True
        for batch in batches:
            yield batch, batches.part

    @property
    def undecided(self) -> bool:
        """At a boundary: it is not known whether the loop will keep an iterator that it has not read to its end."""
        last = self._group.turn_number - 1
        return not self.renews_iterator and any(made.turn == last for made in self._unfinished())

    def evaluation_is_compared(self) -> bool:
        """Leader, once for each evaluation of several workers: whether it begins with a batch that all have whole."""
        common = self._group.common
        if self._growth != common.growths:
            self._growth, self._evaluations = common.growths, 0
        self._evaluations += 1
        return common.growths > 0 and common.state != "differed" and compares(self._evaluations)

    def _unfinished(self) -> list[_Batches]:
        return [made for made in self._made if not made.over]

    def _whole(self) -> Iterator[Any]:
        """The iterator of the user's loader, which draws a seed only when an iterator of a stock loader would."""
        loader, own = self._loader, self._loader.generator
        if loader.persistent_workers and self.begun and not self._processes_started:
            loader.generator = torch.Generator().manual_seed(self._seed())
        self._processes_started = True
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
        whole = in_whole_batches(loader.dataset, loader.collate_fn, loader.num_workers)
        return DataLoader(
            whole or PartsOfDataset(loader.dataset),
            batch_sampler=shares,  # type: ignore[arg-type]
            num_workers=loader.num_workers,
            collate_fn=as_it_is if whole else loader.collate_fn,
            pin_memory=loader.pin_memory,
            pin_memory_device=loader.pin_memory_device,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
            # It seeds the loader's worker processes: what these draw once a batch is the same in all workers.
            generator=torch.Generator().manual_seed(seed),
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
        self.turn: int | None = None  # in which it was read last
        self.finished = False  # its end was drawn
        #: The loop says which batch it works on; and what this worker has of the last one, None if it has all of it.
        self.says_itself = False
        self.part: BatchPart | None = None
        self._given = 0
        self._all = _length(loader)
        self._of_data = _length(loader.dataset)
        self._generation = group.generation
        self._batches = batches
        self._shares = shares
        #: The outputs of modules are compared before the next batch.
        self._compares = False
        #: Nothing but the loop has the tensors of a batch.
        self._fresh = loader.collate_fn is default_collate
        self._reading = Reading()

    def __iter__(self) -> Iterator[Any]:
        return self

    @property
    def over(self) -> bool:
        """Whether it has given all its batches. A loop that counts them does not draw its end."""
        return self.finished or (self._all is not None and self._given >= self._all)

    def __next__(self) -> Any:
        if self._group.generation != self._generation:
            if self.over:
                raise StopIteration
            raise CannotDivide(
                "an iterator over a prepared DataLoader was kept while the trial was resized: make "
                "a new one (iter(loader), or a for loop) in each turn of elastic.epochs()"
            )
        turn = self._group.turn_number
        if self.turn is not None and self.turn < turn and not self.over:
            self._loader.reuses_iterator = True
        self.turn = turn
        self._group.batches.fetching()
        if self._compares and self._group.width > 1:
            self._compare_outputs()
        try:
            batch = next(self._batches)
        except StopIteration:
            self.finished = True
            self._end()
            if self._shares is not None:
                refuse_left_out(self._group, "reading")
            raise
        self._given += 1
        self._loader.read += 1
        if self._fresh and not self._group.batches.nothing_learns():
            self._group.batches.kept.note(batch)
        if self._shares is not None:
            share, compare = self._shares.handed.popleft()
            if self._shares.watches and self._given == 1:
                self._compares = True
                self._group.outputs.watch()
            self._group.common.got(share.common)
            if compare and self._group.width > 1:
                self._group.likeness.compare_weights(self._group.backend, self._group.state)
            self._reading.note(batch)
            self._group.batches.counted.read(
                share.part,
                uneven=not share.common and share.size % share.width > 0,
                of_data=self._of_data,
                batches=self._all,
            )
            if self.says_itself:
                self.part = BatchPart(share, self._reading)
                self._group.batches.handed_out()
            else:
                self._group.batches.fetched(self._reading, share)
        return batch

    def _compare_outputs(self) -> None:
        """All workers: whether modules have returned the same for the batches so far, which all of them had whole."""
        group, shares = self._group, self._shares
        assert shares is not None
        rows = group.backend.exchange(group.outputs.row(), "the comparison of outputs")
        if not rows.any():
            return  # it has fetched ahead, and has computed nothing so far
        self._compares = False
        group.outputs.stop()
        if (what := group.outputs.apart(rows)) is not None:
            group.likeness.go_apart(f"what {what} returns in an evaluation")
        elif self.says_itself or self._reading.counted_in_step:
            shares.watches = False

    def __del__(self) -> None:
        if self.turn is not None and not self.over and self._group.turn_number > self.turn:
            self._loader.renews_iterator = True
        self._end()

    def _end(self) -> None:
        if self._compares:
            self._compares = False
            self._group.outputs.stop()
        if self._shares is not None:
            self._group.batches.ended(self._reading)


def _length(of: Any) -> int | None:
    """None: it has no length, as a sampler, or a dataset beside a batch sampler, may have none."""
    try:
        return len(of)
    except (TypeError, NotImplementedError):
        return None


@dataclass(frozen=True)
class _Drawn:
    """What the leader sends of the next batches. ``batches``: their indices; empty at the end.

    ``common``: all workers get them whole. ``compare``: the workers' weights are compared before the first of them.
    ``watch``: what modules make of the first is compared before the second (`outputs`).
    ``seed``: of what the dataset draws. ``streams``: the leader's, if the others have others.
    """

    batches: list[list[Any]]
    common: bool
    compare: bool
    watch: bool
    seed: int
    streams: Streams | None


class _DividedBatches:
    """A batch sampler that yields this worker's part of each batch, and remembers its `Share`.

    ``seed``: the pass'. ``source``: the batches' indices, whole; None in a follower.
    """

    def __init__(self, loader: ElasticLoader, group: GroupView, seed: int, source: Iterator[Any] | None) -> None:
        self._loader = loader
        self._source = source
        self._group = group
        self._seed = seed
        self._ahead = _AHEAD if _draws_at_once(loader) else 1
        #: Batches are whole in all workers until it is known whether modules return the same for the first one.
        self.watches = False
        #: By batch, in the order of their indices: the share, and whether the weights are compared before it.
        self.handed: deque[tuple[Share, bool]] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        group, source = self._group, self._source
        number = 0
        while True:
            drawn = None if source is None else self._draw(source, first=not number)
            drawn = group.backend.broadcast_object(drawn, "the next batches")
            if source is None:
                group.draws.take(drawn.streams)
                group.common.follow(drawn.common)
                self.watches = self.watches or drawn.watch
            if not drawn.batches:
                return
            for batch in drawn.batches:
                number += 1
                yield self._hand_out(batch, drawn, number, drawn.compare and batch is drawn.batches[0])

    def _draw(self, source: Iterator[Any], first: bool) -> _Drawn:
        group = self._group
        if not first:
            group.draws.look()
        # An evaluation's weights may be others than those that learn, as an average is: a joiner may have another one.
        evaluates = group.batches.nothing_learns()
        if first and evaluates:
            self.watches = self._loader.evaluation_is_compared()
        common = self.watches or group.common.draw(may_divide=not first and group.batches.settled)
        compare = first if evaluates else not common and group.likeness.weights_due(at_batch=True)
        ahead = 1 if common or compare or group.draws.drawn else self._ahead
        batches = [list(batch) for batch in islice(source, ahead)]
        return _Drawn(batches, common, compare, first and self.watches, self._seed, group.draws.news())

    def _hand_out(self, batch: list[Any], drawn: _Drawn, number: int, compare: bool) -> list[Any]:
        rank, world = self._group.backend.rank, self._group.backend.world
        size = len(batch)
        if drawn.common:
            self.handed.append((Share(float(rank == 0), size, world, common=True), compare and self.watches))
            return Part(batch, seed_of(drawn.seed, number))
        start, stop = part_of_batch(size, rank, world)
        self.handed.append((Share((stop - start) / size, size, world), compare))
        return Part(batch[start:stop] or batch[:1], seed_of(drawn.seed, number, rank))


def part_of_batch(size: int, rank: int, world: int) -> tuple[int, int]:
    """The contiguous part [start, stop) of a batch that a rank gets. Parts differ by at most one sample."""
    each, over = divmod(size, world)
    start = rank * each + min(rank, over)
    return start, start + each + (rank < over)


def iterates_itself(loader: DataLoader) -> str | None:
    """Why a loader must be read by one worker, as nobody else can give what its iterator does; None: it is torch's."""
    if "_get_iterator" not in vars(loader) and all(
        getattr(type(loader), name) is getattr(DataLoader, name) for name in ("__iter__", "_get_iterator")
    ):
        return None
    return f"the prepared {type(loader).__name__} has an iterator of its own, whose batches cannot be divided"


def generators_of(loader: ElasticLoader) -> list[torch.Generator]:
    """The user's own generators that determine the order of the data, each once."""
    found: list[torch.Generator] = []
    batches = loader.batch_sampler
    for holder in (loader, batches, getattr(batches, "sampler", None)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not known for known in found):
            found.append(generator)
    return found


def sampler_contents(loader: ElasticLoader) -> str:
    """A digest of the numbers that a loader's samplers choose by, such as weights. The leader alone draws.

    A loop that changes them has learned them from the samples that it saw. The data itself is not read: samplers of
    torch have it as ``data_source``.
    """
    digest, data_set = 0, loader.dataset
    batches = loader.batch_sampler
    for holder in (batches, getattr(batches, "sampler", None)):
        for name, value in sorted(getattr(holder, "__dict__", {}).items()):
            if value is data_set:
                continue
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            elif isinstance(value, list | tuple | numpy.ndarray) and (array := _numbers(value)) is not None:
                data = array.tobytes()
            else:
                continue
            digest = zlib.crc32(data, zlib.crc32(name.encode(), digest))
    return f"with numbers {digest:08x}"


def _numbers(value: Any) -> numpy.ndarray | None:
    try:
        array = numpy.asarray(value)
    except ValueError:  # lists of several lengths
        return None
    return array if array.dtype.kind in "biuf" else None


def _draws_at_once(loader: ElasticLoader) -> bool:
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
