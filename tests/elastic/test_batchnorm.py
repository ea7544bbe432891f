"""Batch norm sees the whole batch: the same outputs, gradients and running statistics as one worker."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fluidtune import elastic
from fluidtune.testing.processes import peer_processes

from .groups import alone, on_all


@pytest.fixture(scope="module")
def pool():
    with peer_processes(3) as started:
        yield started


def model_of(kind, **options):
    torch.manual_seed(4)
    if kind == "flat":
        return nn.Sequential(
            nn.BatchNorm1d(6, **options), nn.Linear(6, 4), nn.BatchNorm1d(4, **options), nn.Linear(4, 1)
        )
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 3, 2),
        nn.BatchNorm2d(3, **options),
        nn.Flatten(),
        nn.Linear(6, 1),
    )


def normed(kind, samples, options):
    generator = torch.Generator().manual_seed(3)
    x = 100 + torch.randn(samples, 6, generator=generator)  # a mean far from 0 needs a careful variance
    model = model_of(kind, **options)
    model, loader = elastic.prepare(model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=samples))
    for _ in range(3):
        for part, y in loader:
            model.zero_grad()
            nn.functional.l1_loss(model(part), 0.01 * y).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
    model.eval()
    out = model(x).detach()
    return [out, *[p.grad for p in model.parameters()], *[b.clone() for b in model.buffers()]]


@pytest.mark.parametrize("kind", ["flat", "image"])
@pytest.mark.parametrize("samples", [2, 7, 24])
@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"track_running_stats": False}, {"affine": False}], ids=str
)
def test_as_one_worker(pool, kind, samples, options):
    expected = alone(normed, kind, samples, options)
    for got in on_all(pool, normed, kind, samples, options):
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4)


def kept_whole():
    model = elastic.prepare(model_of("flat"))
    session = elastic.current()
    replaced = ["forward" in m.__dict__ for m in model]
    copy.deepcopy(model)
    session._member.state.set_width(1)
    return replaced, ["forward" in m.__dict__ for m in model]


def test_the_modules_are_torchs_own_again_at_width_one(pool):
    assert on_all(pool, kept_whole) == [([True, False, True, False], [False] * 4)] * 3


def one_sample():
    model, loader = elastic.prepare(nn.BatchNorm1d(2), DataLoader(TensorDataset(torch.ones(1, 2)), batch_size=1))
    for (x,) in loader:
        with pytest.raises(ValueError, match="more than 1 value"):
            model(x)


def test_a_batch_of_one_is_refused_as_torch_does(pool):
    alone(one_sample)
    on_all(pool, one_sample)


def in_half_precision():
    model, loader = elastic.prepare(nn.BatchNorm1d(2), DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=8))
    for (x,) in loader:
        return [model(x.bfloat16()).dtype, model.running_mean.dtype]


def test_half_precision_stays(pool):
    assert on_all(pool, in_half_precision) == [alone(in_half_precision)] * 3
