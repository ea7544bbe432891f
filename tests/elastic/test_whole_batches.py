"""Batches that are fetched in one operation are those of the stock DataLoader, to the last bit."""

from __future__ import annotations

import contextlib
import random

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    StackDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)
from torch.utils.data._utils import collate

from fluidtune import elastic
from fluidtune.elastic.data.whole_batches import WholeBatches, reader_of

from .groups import in_session

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.uint8, torch.uint16, torch.bool, torch.complex64),
]


@pytest.fixture
def stacks(monkeypatch):
    """How often something was stacked: never, if batches are fetched in one operation."""
    made = []

    def stack(*args, **kwargs):
        made.append(1)
        return real(*args, **kwargs)

    real = torch.stack
    monkeypatch.setattr(torch, "stack", stack)
    return made


def seen(tensor):
    """All that a loop can see of a tensor."""
    bits = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).tolist()
    return (
        *(type(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), bits),
        *(tensor.requires_grad, tensor.is_leaf, tensor.is_inference(), tensor.is_pinned(), tensor.is_shared()),
        *(tensor.is_conj(), tensor.is_neg(), tensor.untyped_storage().nbytes(), vars(tensor)),
    )


def read(loader, data, streams):
    """What each batch is, what the streams' states are after it, and the error at the end."""
    found = []
    try:
        for batch in loader:
            found.append((type(batch), [seen(tensor) for tensor in batch], [s.get_state().tolist() for s in streams]))
            found.append(random.getstate())
            for tensor in batch:
                if not tensor.requires_grad:
                    tensor.zero_()  # the loop may do this: the data must not change
    except Exception as error:
        found.append((type(error), str(error)))
    return found, [tensor.detach().clone().resolve_conj().tolist() for tensor in data]


LAYOUTS = ["rows", "rows", "rows", "rows", "channels last", "turned", "every other", "one row", "odd"]


@st.composite
def tensors(draw, samples):
    dtype = draw(st.sampled_from(DTYPES))
    layout = draw(st.sampled_from(LAYOUTS))
    sizes = st.sampled_from([1, 2, 2, 3, 3, 3, 0])
    if layout == "channels last":  # each row is
        frames, channels, *size = draw(st.lists(sizes, min_size=4, max_size=5))
        shape = (samples, frames, *size, channels)
    else:
        shape = (samples, *draw(st.lists(sizes, max_size=4)))
    made = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    if layout == "one row":
        return made[:1].expand(shape)
    if layout == "channels last":
        return made.movedim(-1, 2)
    if layout == "turned" and made.dim() > 1:
        return made.mT.contiguous().mT
    if layout == "every other":
        return torch.cat([made, made])[::2]
    if layout == "odd":
        if dtype.is_complex:
            return draw(st.sampled_from([made.conj(), made.conj().imag]))
        if dtype.is_floating_point and dtype.itemsize > 1:
            return draw(st.sampled_from([made.requires_grad_(), torch.nn.Parameter(made)]))
    return made


class Given:
    """A sampler that gives what it has."""

    def __init__(self, indices):
        self.indices = indices

    def __iter__(self):
        random.random()
        return iter(self.indices)

    def __len__(self):
        return len(self.indices)


@st.composite
def cases(draw):
    """A function that makes the same loader each time that it is called, and its tensors."""
    samples = draw(st.integers(1, 7))
    data = draw(st.lists(tensors(samples), min_size=1, max_size=2))
    subset = draw(st.sampled_from([None, None, None, None, list, tuple, numpy.array, torch.tensor, "range", "twice"]))
    among = draw(st.lists(st.integers(0, samples - 1), min_size=1, max_size=6))
    among[0] -= draw(st.sampled_from([0, 0, 0, samples]))
    length = samples if subset is None else len(among)
    given = draw(st.sampled_from([None, None, None, "samples", "batches"]))
    if given is not None:
        index = st.one_of(st.integers(0, length - 1), st.integers(0, length - 1).map(numpy.int64))
        odd = st.sampled_from([-1, -length - 1, length, True, None, 0.0, 2**70, torch.tensor(0), slice(0, 1)])
        indices = draw(st.lists(index, min_size=1, max_size=8)) + draw(st.lists(odd, max_size=1))
        given = indices if given == "samples" else [indices, tuple(indices), numpy.zeros(2, int), []]
    kind = draw(st.sampled_from(["in order", "shuffled", "generator", "replacing", "weighted", "batches"]))
    size = draw(st.integers(1, 5))

    def made():
        dataset = TensorDataset(*data)
        if subset == "twice":
            dataset = Subset(Subset(dataset, among), range(len(among)))
        elif subset is not None:
            dataset = Subset(dataset, range(len(among)) if subset == "range" else subset(among))
        own = torch.Generator().manual_seed(5)
        settings = {
            "in order": {"batch_size": size},
            "shuffled": {"batch_size": size, "shuffle": True},
            "generator": {"batch_size": size, "shuffle": True, "generator": own, "drop_last": True},
            "replacing": {"batch_size": size, "sampler": RandomSampler(dataset, True, 9, generator=own)},
            "weighted": {"batch_size": size, "sampler": WeightedRandomSampler([1.0] * length, 9)},
            "batches": {"batch_sampler": BatchSampler(RandomSampler(range(length)), size, False)},
        }[kind]
        if given is not None:
            batches = isinstance(given[0], list)
            settings = {"batch_sampler": Given(given)} if batches else {"batch_size": size, "sampler": Given(given)}
        return DataLoader(dataset, pin_memory=False, **settings), own

    return data, made


def compare(case, around):
    data, made = case

    def outcome(read_by):
        random.seed(4)
        torch.manual_seed(4)
        kept = [tensor.detach().clone() for tensor in data]
        try:
            loader, own = made()
        except Exception as error:
            return type(error), str(error)
        with around():
            found = read(read_by(loader), data, [torch.default_generator, own])
        with torch.no_grad():
            for tensor, before in zip(data, kept, strict=True):
                assert torch.equal(tensor, before)
        return found

    assert outcome(reader_of) == outcome(lambda loader: loader)


AROUND = [
    contextlib.nullcontext,
    torch.no_grad,
    torch.inference_mode,
    lambda: torch.autocast("cpu", torch.bfloat16),
    lambda: torch.device("meta"),
]


@given(cases(), st.sampled_from(AROUND))
@settings(max_examples=30, deadline=None)
def test_batches_and_streams_are_stocks(case, around):
    compare(case, around)


def numbers(samples=10):
    return torch.arange(2.0 * samples).reshape(samples, 2), torch.arange(samples)


def both(loader):
    """The batches of the reader, and of the loader itself."""
    found = []
    for read_by in (reader_of(loader), loader):
        torch.manual_seed(1)
        batches = list(read_by)
        found.append([(type(batch), [seen(tensor) for tensor in batch]) for batch in batches])
    return found


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(*numbers()),
        Subset(TensorDataset(*numbers()), [4, 2, 9]),
        Subset(TensorDataset(*numbers()), numpy.array([4, 2, 9])),
        Subset(Subset(TensorDataset(*numbers()), range(1, 9)), (0, 7, 3)),
        *random_split(TensorDataset(*numbers()), [7, 3]),
    ],
)
def test_batches_of_tensors_are_fetched_at_once(dataset, stacks):
    loader = DataLoader(dataset, batch_size=2, shuffle=True)
    before = dict(vars(dataset))
    made = list(reader_of(loader))
    assert not stacks and [len(batch) for batch in made[0]] == [2, 2]
    assert vars(dataset) == before
    ours, stock = both(loader)
    assert ours == stock and stacks


class Doubled(TensorDataset):
    def __getitem__(self, index):
        return tuple(2 * tensor for tensor in super().__getitem__(index))


class Shifted(Subset):
    def __getitems__(self, indices):
        return super().__getitems__([(index + 1) % len(self) for index in indices])


class Twice(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield [2 * tensor for tensor in batch]


def own_items():
    dataset = Subset(TensorDataset(*numbers()), [1, 2])
    dataset.__getitems__ = lambda indices: [(torch.ones(1),) for _ in indices]
    return dataset


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Doubled(*numbers()), batch_size=2),
        lambda: DataLoader(Shifted(TensorDataset(*numbers()), [3, 5]), batch_size=2),
        lambda: DataLoader(own_items(), batch_size=2),
        lambda: DataLoader(ConcatDataset([TensorDataset(*numbers())] * 2), batch_size=2),
        lambda: DataLoader(StackDataset(*numbers()), batch_size=2),
        lambda: DataLoader(TensorDataset(*numbers()), batch_size=2, collate_fn=lambda s: [torch.stack(s[0][:1])]),
        lambda: DataLoader(TensorDataset(numbers()[0].requires_grad_()), batch_size=2),
        lambda: Twice(TensorDataset(*numbers()), batch_size=2),
    ],
)
def test_all_else_is_fetched_by_the_loader(make, stacks):
    ours, stock = both(make())
    assert ours == stock
    assert len(stacks) % 2 == 0 and stacks  # as often by the one as by the other


def test_what_the_user_has_put_into_torchs_classes_and_tables_is_kept(monkeypatch):
    loader = DataLoader(TensorDataset(*numbers()), batch_size=2)
    batches = iter(reader_of(loader))
    monkeypatch.setitem(collate.default_collate_fn_map, tuple, lambda batch, *, collate_fn_map: len(batch))
    assert next(batches) == 2
    monkeypatch.undo()
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda self, index: index)
    assert next(iter(reader_of(loader))).tolist() == [0, 1]


def test_an_index_beyond_the_end_raises_what_stock_raises():
    for shape in ((3, 2), (3,), (3, 0)):
        loader = DataLoader(TensorDataset(torch.zeros(shape)), sampler=[0, 1, 7], batch_size=3)
        with pytest.raises(IndexError, match="index 7 is out of bounds for dimension 0 with size 3"):
            next(iter(reader_of(loader)))


def test_a_prepared_loader_fetches_at_once_and_only_in_a_session(stacks):
    loader = DataLoader(TensorDataset(*numbers()), batch_size=5, shuffle=True)
    assert elastic.prepare(loader) is loader  # under stock Ray Tune nothing is replaced
    torch.manual_seed(2)
    stock = [[tensor.tolist() for tensor in batch] for batch in loader]
    del stacks[:]
    with in_session():
        prepared = elastic.prepare(loader)
        torch.manual_seed(2)
        assert [[tensor.tolist() for tensor in batch] for batch in prepared] == stock
        assert prepared.dataset is loader.dataset and not isinstance(prepared.dataset, WholeBatches)
        assert not stacks
