"""A gradient counts by the share of its own batch, whatever the loop has fetched meanwhile; or the loop is refused."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fluidtune import elastic
from fluidtune.elastic.data.attribution import BatchesAtHand
from fluidtune.elastic.data.batches import Reading, Share
from fluidtune.elastic.errors import CannotDivide

from .groups import on_all


def share(size, width=2):
    return Share(((size + 1) // width) / size, size, width)


class Loop:
    """What a loop does, one call each, and the batch that each backward pass is taken to be about."""

    def __init__(self):
        self.hand = BatchesAtHand()
        self.readings = {}

    def fetch(self, name, size):
        self.hand.fetched(self.readings.setdefault(name, Reading()), share(size))
        return self

    def end(self, name):
        self.hand.ended(self.readings.pop(name))
        return self

    def backward(self):
        found = self.hand.gradients.use()
        return None if found is None else found.size

    def refused(self, *sizes):
        with pytest.raises(CannotDivide, match=" or ".join(map(str, sorted(sizes)))):
            self.hand.gradients.use()


def test_a_backward_pass_after_each_batch_may_meet_batches_of_any_size():
    loop = Loop()
    for size in (16, 16, 7, 3, 16):
        assert loop.fetch("a", size).backward() == size
        assert loop.backward() == size  # a GAN's second pass
    loop.end("a")
    assert loop.backward() == 16
    assert loop.fetch("b", 5).backward() == 5


def test_prefetching_is_right_while_all_batches_are_divided_alike():
    loop = Loop().fetch("a", 16)
    for _ in range(3):
        assert loop.fetch("a", 16).backward() == 16
    loop.fetch("a", 6)  # halves, too
    assert loop.backward() in (16, 6)
    loop.fetch("a", 7).refused(6, 7)
    loop.end("a").refused(6, 7)  # the pass of the last batch is as uncertain


def test_one_pass_over_several_batches():
    loop = Loop().fetch("a", 9).fetch("a", 9)
    assert loop.backward() == 9
    loop.fetch("a", 9).fetch("a", 4).refused(4, 9)


def test_loaders_that_are_read_in_step():
    loop = Loop()
    for sizes in ((16, 16), (16, 8), (3, 3)):
        for name, size in zip("ab", sizes, strict=True):
            loop.fetch(name, size)
        assert loop.backward() == sizes[1]
    loop.fetch("a", 16).fetch("b", 9).refused(9, 16)


def test_a_batch_of_another_loader_stays_at_hand_while_that_one_is_read():
    loop = Loop().fetch("a", 16)
    assert loop.backward() == 16
    loop.fetch("b", 9).refused(9, 16)
    loop = Loop().fetch("a", 16)
    assert loop.end("a").backward() == 16
    assert loop.fetch("b", 9).backward() == 9


def test_batches_that_are_kept_after_their_loader_has_ended():
    loop, kept = Loop(), [[torch.ones(1)], {"x": (torch.ones(1), "name")}]
    for batch in kept:
        loop.fetch("a", 9).readings["a"].note(batch)
        assert loop.backward() == 9
    loop.end("a").fetch("b", 16).refused(9, 16)
    kept.clear()  # its variable keeps the last one, which is no purpose
    assert loop.fetch("b", 16).backward() == 16


def test_an_evaluation_is_no_prefetching():
    loop, model = Loop(), nn.Linear(1, 1)
    loop.hand.watch(model)
    loop.fetch("train", 16).backward()
    for without in (torch.no_grad(), torch.inference_mode()):
        with without:
            loop.fetch("v", 16).fetch("v", 5).fetch("v", 3).end("v")
        assert loop.fetch("train", 16).backward() == 16
    model.eval()
    loop.fetch("v", 16).fetch("v", 5).end("v")
    model.train()
    assert loop.fetch("train", 16).backward() == 16
    loop.fetch("w", 16).fetch("w", 5).end("w").refused(5, 16)  # it could have kept them to learn from


def test_batches_that_were_collected_without_gradients_and_then_learnt_from():
    loop = Loop()
    with torch.no_grad():
        loop.fetch("a", 16).fetch("a", 5).end("a")
    loop.refused(5, 16)


def test_a_boundary_ends_what_was_fetched_except_by_an_iterator_that_is_kept():
    loop = Loop().fetch("a", 16).fetch("a", 5).end("a")
    loop.hand.next_turn()
    assert loop.backward() is None
    loop.fetch("kept", 5)
    loop.hand.next_turn()
    loop.fetch("kept", 16).refused(5, 16)


def test_a_count_needs_to_know_only_who_has_no_sample():
    hand, reading = BatchesAtHand(), Reading()
    for size in (16, 7, 2):
        hand.fetched(reading, share(size))
    assert hand.counts.use() is not None
    hand.fetched(reading, share(1))
    with pytest.raises(CannotDivide, match="1 or 2"):
        hand.counts.use()
    hand = BatchesAtHand()
    for reading, size in ((Reading(), 1), (Reading(), 16)):
        hand.fetched(reading, share(size))
        assert hand.counts.use() == share(size)  # a count is of the batch at hand, whatever else is read


def test_a_count_is_of_no_batch_that_the_loop_has_let_go_of():
    """Training counts nothing, as that of pytorch/examples/mnist; its test does. docs/bugs.md, 402."""
    for keeps in (False, True):
        hand, train, test = BatchesAtHand(), Reading(), Reading()
        batch = torch.zeros(4)
        train.note(batch)
        hand.fetched(train, share(4))
        hand.ended(train)
        if not keeps:
            del batch
        hand.fetched(test, share(1))
        if keeps:
            with pytest.raises(CannotDivide, match="1 or 4"):
                hand.counts.use()
        else:
            assert hand.counts.use() == share(1)


# -- what nobody divides --


def counted(loop, n, leads=False):
    return loop.hand.count(n, leads)


def test_of_what_nobody_divides_only_the_leaders_samples_count():
    loop = Loop().fetch("train", 16)
    assert counted(loop, 8) == 8
    loop.end("train")
    assert counted(loop, 8) == 8  # the loop learns
    with torch.no_grad():
        assert [counted(loop, n) for n in (8, 1, 16)] == [0, 0, 0]
        assert counted(loop, 8, leads=True) == 8
        assert counted(loop.fetch("test", 10), 5) == 5
        assert counted(loop, 5) == 5  # it may be a second meter's
        loop.end("test")
        assert counted(loop, 5) == 0


def test_what_is_fetched_and_not_counted_so_far_may_be_divided():
    loop, kept = Loop(), torch.ones(5)
    with torch.no_grad():
        loop.fetch("test", 10).fetch("test", 10)
        assert counted(loop, 5) == 5
        loop.fetch("test", 6)
        loop.readings["test"].note([kept])
        assert counted(loop, 5) == 5
        loop.end("test")
        assert counted(loop, 3) == 3  # it fetches ahead, and has the last one
        del kept
        assert counted(loop, 3) == 0


def test_a_training_that_nobody_counts_is_over_when_its_reading_is():
    loop = Loop().fetch("train", 16).fetch("train", 16).end("train")
    with torch.no_grad():
        assert counted(loop, 8) == 0


def test_a_loop_that_knows_its_rank_may_divide_by_itself():
    loop = Loop()
    loop.hand.knows_rank = True
    with torch.no_grad():
        assert counted(loop, 8) == 8


# -- in real groups --


def loader(samples, batch_size, seed=5):
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x.pow(2).sum(1, keepdim=True)), batch_size=batch_size)


def net(*more):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 5), *more, nn.Tanh(), nn.Linear(5, 1))


def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def prefetching(model, samples, batch_size):
    model, batches = elastic.prepare(model, loader(samples, batch_size))
    batches = iter(batches)
    coming = next(batches)
    while coming is not None:
        now, coming = coming, next(batches, None)
        yield loss(model, now)


def summed(model, samples, batch_size):
    model, batches = elastic.prepare(model, loader(samples, batch_size))
    batches = iter(batches)
    for first, second in zip(batches, batches, strict=False):
        yield loss(model, first) + loss(model, second)


def in_step(model, samples, batch_size):
    model, a, b = elastic.prepare(model, loader(samples, batch_size), loader(11, 6, seed=8))
    for first, second in zip(a, b, strict=False):
        yield loss(model, first) + loss(model, second)


def in_a_cycle(model, samples, batch_size):
    model, a, b = elastic.prepare(model, loader(samples, batch_size), loader(11, 6, seed=8))
    for first, second in zip(cycle(a), b, strict=False):
        yield loss(model, first) + loss(model, second)


def with_norm(model, samples, batch_size):
    return prefetching(net(nn.BatchNorm1d(5)), samples, batch_size)


def refusal(losses, samples, batch_size):
    model = net()
    with pytest.raises(CannotDivide) as refused:
        for value in losses(model, samples, batch_size):
            value.backward()
    return str(refused.value)


@pytest.mark.parametrize(
    ("losses", "world", "samples", "batch_size"),
    [
        (prefetching, 2, 11, 4),
        (summed, 2, 11, 7),
        (with_norm, 2, 9, 4),
        (in_step, 2, 10, 6),
        (in_step, 3, 8, 6),
        (in_a_cycle, 2, 6, 6),
    ],
)
def test_what_could_be_of_either_of_two_batches_is_refused_by_all(pool, losses, world, samples, batch_size):
    assert all("drop_last=True" in said for said in on_all(pool[:world], refusal, losses, samples, batch_size))
