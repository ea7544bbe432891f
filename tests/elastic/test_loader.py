"""The order of the data is the stock DataLoader's at every width, and each sample goes to one worker."""

from __future__ import annotations

import gc
import random
import socket
from itertools import chain, pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fluidtune import elastic
from fluidtune.elastic.data.attribution import BatchesAtHand
from fluidtune.elastic.data.loader import ElasticLoader, part_of_batch, sampler_contents
from fluidtune.elastic.errors import CannotDivide

from .groups import alone, in_session, on_all, open_backend, run_rank, serve


class Numbers(Dataset):
    def __len__(self):
        return 23

    def __getitem__(self, index):
        return {"index": index, "name": f"n{index}"}


class Lazy:
    """A batch sampler that draws from the global stream for each batch."""

    def __iter__(self):
        for _ in range(4):
            yield [random.randrange(23), int(torch.randint(23, ())), 5]

    def __len__(self):
        return 4


class Eager:
    """A batch sampler that draws all of its batches when its iterator is made."""

    def __iter__(self):
        return iter(torch.randperm(20).reshape(5, 4).tolist())

    def __len__(self):
        return 5


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def collate(samples):
    return {"index": torch.tensor([s["index"] for s in samples]), "name": [s["name"] for s in samples]}


STOCK = {
    "in order": lambda: DataLoader(Numbers(), batch_size=5),
    "shuffled": lambda: DataLoader(Numbers(), batch_size=5, shuffle=True),
    "dropping": lambda: DataLoader(Numbers(), batch_size=5, shuffle=True, drop_last=True),
    "one each": lambda: DataLoader(Numbers(), shuffle=True),
    "generator": lambda: DataLoader(Numbers(), batch_size=5, shuffle=True, generator=seeded(3)),
    "sampler's generator": lambda: DataLoader(
        Numbers(), batch_size=4, sampler=RandomSampler(Numbers(), generator=seeded(4))
    ),
    "replacing": lambda: DataLoader(Numbers(), batch_size=5, sampler=RandomSampler(Numbers(), True, 40)),
    "weighted": lambda: DataLoader(
        Numbers(), batch_size=5, sampler=WeightedRandomSampler([1.0] * 11 + [2.0] * 12, 20)
    ),
    "batches": lambda: DataLoader(
        Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers()), 6, False), collate_fn=collate
    ),
    "processes": lambda: DataLoader(Numbers(), batch_size=5, shuffle=True, num_workers=2),
    "persistent processes": lambda: DataLoader(
        Numbers(), batch_size=5, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "eager": lambda: DataLoader(Numbers(), batch_sampler=Eager()),
    "lazy": lambda: DataLoader(Numbers(), batch_sampler=Lazy()),
}


def orders(kind, leave_after=None):
    """The samples of three epochs without stand-ins, and the next numbers of the random streams."""
    random.seed(9)
    loader = elastic.prepare(STOCK[kind]())
    found = []
    for _ in range(3):
        for step, batch in enumerate(loader):
            assert [f"n{i}" for i in batch["index"].tolist()] == batch["name"]
            n = elastic.samples(len(batch["name"]))
            found.append(batch["index"].tolist()[:n])
            if step == leave_after:
                break
    return found, len(loader), (torch.rand(()).item(), random.random())


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.parametrize("leave_after", [None, 1])
@pytest.mark.parametrize("kind", STOCK)
def test_the_order_and_the_streams_are_stocks(pool, kind, leave_after):
    batches, length, streams = alone(orders, kind, leave_after)
    parts = on_all(pool, orders, kind, leave_after)
    for world, got in ((3, parts), (1, on_all(pool[:1], orders, kind, leave_after))):
        together = [list(chain(*shares)) for shares in zip(*(part[0] for part in got), strict=True)]
        assert together == batches
        assert [part[1] for part in got] == [length] * world
        assert got[0][2] == streams


def tensors():
    """The samples of two epochs over tensors, whether some were stacked, and the next number of the stream."""
    loader = DataLoader(TensorDataset(torch.arange(23.0).reshape(23, 1), torch.arange(23)), batch_size=5, shuffle=True)
    real, stacked, found = torch.stack, [], []
    torch.stack = lambda *args, **kwargs: stacked.append(1) or real(*args, **kwargs)
    try:
        for batch in chain(*([elastic.prepare(loader)] * 2)):
            n = elastic.samples(len(batch[0]))
            found.append(list(zip(batch[0][:n, 0].tolist(), batch[1][:n].tolist(), strict=True)))
    finally:
        torch.stack = real
    return found, bool(stacked), torch.rand(()).item()


@pytest.mark.slow
@pytest.mark.core
def test_tensors_are_fetched_at_once_at_every_width(pool):
    batches, stacked, stream = alone(tensors)
    assert stacked
    for got in (on_all(pool, tensors), on_all(pool[:1], tensors)):
        assert [list(chain(*shares)) for shares in zip(*(part[0] for part in got), strict=True)] == batches
        assert got[0][2] == stream and not any(part[1] for part in got)


def test_a_digest_of_a_sampler_reads_its_weights_and_not_the_data():
    data, weights = torch.zeros(6, 2), torch.ones(6, dtype=torch.float64)
    with in_session():
        plain = elastic.prepare(DataLoader(data, batch_size=2, shuffle=True))
        weighted = elastic.prepare(DataLoader(data, sampler=WeightedRandomSampler(weights, 6)))
        before = sampler_contents(plain), sampler_contents(weighted)
        data += 1
        assert (sampler_contents(plain), sampler_contents(weighted)) == before
        weighted.sampler.weights[2] = 3
        assert sampler_contents(weighted) != before[1]


def test_shares_are_contiguous_and_as_equal_as_possible():
    for world in (1, 2, 3, 7):
        for size in range(30):
            parts = [part_of_batch(size, rank, world) for rank in range(world)]
            assert parts[0][0] == 0 and parts[-1][1] == size
            assert all(a[1] == b[0] for a, b in pairwise(parts))
            lengths = [stop - start for start, stop in parts]
            assert max(lengths) - min(lengths) <= 1


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def test_what_cannot_be_divided_is_refused_with_the_remedy():
    assert list(elastic.prepare(DataLoader(Stream()))) == [0, 1, 2]  # outside a session all is stock
    with in_session():
        with pytest.raises(TypeError, match="__getitem__ and __len__"):
            elastic.prepare(DataLoader(Stream()))
        with pytest.raises(TypeError, match="give it a batch_size"):
            elastic.prepare(DataLoader(Numbers(), batch_size=None))
        loader = DataLoader(Numbers(), batch_size=5)
        prepared = elastic.prepare(loader)
        assert elastic.prepare(prepared) is prepared
        assert prepared.dataset is loader.dataset
        assert prepared.batch_size == 5
        assert len(prepared) == len(loader)


def test_a_store_ends_with_its_session_and_not_as_garbage(pool):
    """Its end waits for its threads. In a process of a loader that is forked later, that would be a crash."""
    for worker in pool:
        worker.call(gc.disable)
        worker.call(open_backend)
    try:
        address = pool[0].call(serve)
        for rank, worker in enumerate(pool):
            worker.send(run_rank, address, rank, len(pool), orders, ("in order",))
        for worker in pool:
            worker.result()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=60.0)
    finally:
        for worker in pool:
            worker.call(gc.enable)


def kept_iterator():
    session = elastic.current()
    loader = elastic.prepare(STOCK["in order"]())
    batches, unread = iter(loader), iter(loader)
    next(batches)
    session._member._group.generation += 1
    for kept in (batches, unread):
        with pytest.raises(CannotDivide, match="make a new one"):
            next(kept)


def test_an_iterator_kept_over_a_resize_is_refused(pool):
    on_all(pool, kept_iterator)
    on_all(pool[:1], kept_iterator)


def counted(rounds):
    """A turn of a loop that counts its batches and holds the iterator. Returns it, and whether it is undecided."""
    group = SimpleNamespace(width=1, generation=1, turn_number=1, batches=BatchesAtHand())
    loader = ElasticLoader(DataLoader(range(6), batch_size=2), group)
    held = iter(loader)
    for _ in range(rounds):
        next(held)
    group.turn_number += 1
    undecided = loader.undecided
    group.generation += 1  # the trial was resized
    return loader, held, undecided


def test_a_pass_that_has_given_all_its_batches_is_over_though_nobody_draws_its_end():
    """As with a range beside it, and with Lightning's prefetcher. docs/bugs.md, 360."""
    loader, held, undecided = counted(rounds=3)
    assert not undecided and next(held, "over") == "over" and not loader.reuses_iterator
    _, held, undecided = counted(rounds=2)
    assert undecided
    with pytest.raises(CannotDivide, match="was kept while the trial was resized"):
        next(held)


def test_a_loop_that_lets_go_of_an_unfinished_pass_in_a_later_turn_keeps_none():
    """As a generator over the loader that each turn makes anew. docs/bugs.md, 403."""
    loader, held, undecided = counted(rounds=2)
    assert undecided
    del held
    following = iter(loader)
    next(following)
    loader._group.turn_number += 1
    assert not loader.undecided and not loader.reuses_iterator
