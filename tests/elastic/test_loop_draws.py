"""What a dataset draws leaves the loop's streams where they are; each worker's dropout moves them alike."""

from __future__ import annotations

import pickle
import random

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, get_worker_info

from fluidtune.elastic.data.loop_draws import DROPOUTS, LeadersStreams, OwnDropout, Part, PartsOfDataset
from fluidtune.elastic.random_streams import capture_streams, restore_streams


class Drawing(Dataset):
    """``opened``: set by a ``worker_init_fn``, as users set an open file."""

    opened = False

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, float, bool]:
        return index, random.random() + numpy.random.rand() + torch.rand(()).item(), self.opened


@pytest.fixture(autouse=True)
def _streams():
    before = capture_streams()
    yield
    restore_streams(before)


def numbers() -> tuple[float, float, float]:
    return random.random(), numpy.random.rand(), torch.rand(()).item()


def test_what_a_dataset_draws_follows_from_its_part_alone():
    parts = PartsOfDataset(Drawing())
    before = capture_streams()
    first = parts.__getitems__(Part([2, 5], seed=7))
    drawn = numbers()
    assert parts.__getitems__(Part([2, 5], seed=7)) == first
    assert parts.__getitems__(Part([2, 5], seed=8)) != first
    restore_streams(before)
    assert numbers() == drawn  # as if nothing had been fetched


def test_a_part_travels_to_another_process():
    part = pickle.loads(pickle.dumps(Part([3, 1], seed=9)))
    assert (type(part), list(part), part.seed) == (Part, [3, 1], 9)
    assert pickle.loads(pickle.dumps(PartsOfDataset(Drawing())))[3][0] == 3


def opened(_: int) -> None:
    get_worker_info().dataset.opened = True


def test_a_worker_init_fn_reaches_the_users_dataset():
    loader = DataLoader(
        PartsOfDataset(Drawing()),
        batch_sampler=[Part([0, 1], seed=1)],  # type: ignore[arg-type]
        num_workers=1,
        worker_init_fn=opened,
        collate_fn=list,
    )
    assert [sample[2] for batch in loader for sample in batch] == [True, True]


@pytest.mark.parametrize("common", [False, True])
def test_dropout_draws_from_the_workers_own_streams_unless_all_have_the_batch(common):
    layer, x = nn.Dropout(0.5), torch.ones(64)
    own = OwnDropout(lambda: common)
    torch.manual_seed(3)
    plain, after = layer(x), torch.rand(())
    try:
        found = []
        for seed in (1, 2):
            own.enable(True, seed)
            torch.manual_seed(3)
            found.append((layer(x), torch.rand(())))
            own.enable(False)
    finally:
        own.enable(False)
    for dropped, drawn in found:
        if common:
            assert torch.equal(dropped, plain) and torch.equal(drawn, after)
        else:
            assert not torch.equal(dropped, plain)
    assert torch.equal(found[0][0], found[1][0]) == common
    assert torch.equal(found[0][1], found[1][1])  # the loop's streams are the same in all workers
    assert F.dropout is DROPOUTS["dropout"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_block_that_runs_again_in_the_backward_pass_drops_the_same(reentrant):
    own, x = OwnDropout(lambda: False), torch.ones(2, 64, requires_grad=True)
    try:
        own.enable(True, 7)
        outputs = [checkpoint(nn.Dropout(0.5), row, use_reentrant=reentrant) for row in x]
        (outputs[0] + outputs[1] ** 2).sum().backward()
    finally:
        own.enable(False)
    assert torch.equal(x.grad != 0, torch.stack(outputs) != 0)
    assert not torch.equal(outputs[0], outputs[1])


def test_what_draws_nothing_in_a_rehearsal_moves_no_stream(monkeypatch):
    own, before = OwnDropout(lambda: False), torch.get_rng_state()
    monkeypatch.setitem(DROPOUTS, "dropout", lambda input, p, training, inplace: input)
    try:
        own.enable(True, 7)
        F.dropout(torch.ones(4))
    finally:
        own.enable(False)
    assert torch.equal(torch.get_rng_state(), before)


def test_alpha_dropout_is_off_unless_it_is_asked_for():
    own, x = OwnDropout(lambda: False), torch.ones(16)
    try:
        own.enable(True, 1)
        assert torch.equal(F.alpha_dropout(x), x) and not torch.equal(F.dropout(x), x)
        assert torch.equal(F.dropout(x, training=False), x)
    finally:
        own.enable(False)


DRAWS = {"python": random.random, "numpy": numpy.random.rand, "torch": lambda: torch.rand(())}


@pytest.mark.parametrize("kind", DRAWS)
def test_the_leader_sends_its_streams_when_they_have_moved(kind):
    leader, follower = LeadersStreams(), LeadersStreams()
    follower.take(leader.news())
    assert leader.news() is None
    leader.look()
    assert not leader.drawn
    before = capture_streams()
    DRAWS[kind]()
    leader.look()
    assert leader.drawn
    sent, drawn = leader.news(), numbers()
    restore_streams(before)
    follower.take(sent)
    assert numbers() == drawn
    DRAWS[kind]()  # in the follower alone
    follower.take(None)
    assert numbers() == drawn
