"""Batch norm sees the whole batch: the same outputs, gradients and running statistics as one worker."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fluidtune import elastic
from fluidtune.elastic.errors import CannotDivide

from .groups import alone, on_all


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
@pytest.mark.parametrize("samples", [2, 7])
@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"track_running_stats": False}, {"affine": False}], ids=str
)
def test_as_one_worker(pool, kind, samples, options):
    expected = alone(normed, kind, samples, options)
    for got in on_all(pool, normed, kind, samples, options):
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4)


def copied():
    """What a copy, a pickle and a saved file of a prepared model compute after the model has learned more."""
    x = torch.arange(24.0).reshape(4, 6).sin()
    model, loader = elastic.prepare(model_of("flat"), DataLoader(TensorDataset(x), batch_size=4))
    file = io.BytesIO()
    for (part,) in loader:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        torch.save(model, file)
        keys = list(model.state_dict())
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.5)
        file.seek(0)
        copies.append(torch.load(file, weights_only=False))
        trained = [each(part).detach() for each in copies]
        return keys, trained, [each.eval()(x).detach() for each in copies]


def test_a_copy_of_a_prepared_model_is_what_it_is_alone(pool):
    keys, _, evaluated = alone(copied)
    answers = on_all(pool, copied)
    for their_keys, _, their_evaluated in answers:
        assert their_keys == keys
        torch.testing.assert_close(their_evaluated, evaluated)
    trained = [torch.cat(parts) for parts in zip(*(answer[1] for answer in answers), strict=True)]
    torch.testing.assert_close(trained, alone(copied)[1])


class Activated(nn.BatchNorm1d):
    """Batch norm with an activation, as in model libraries: its forward does not call that of its base class."""

    def forward(self, x):
        y = nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)
        return torch.relu(y) + 1


def activated(synchronised):
    x = torch.arange(24.0).reshape(4, 6).sin()
    model = nn.SyncBatchNorm(6) if synchronised and elastic.current() is not None else nn.BatchNorm1d(6)
    model, loader = elastic.prepare(model if synchronised else Activated(6), DataLoader(TensorDataset(x), batch_size=4))
    for (part,) in loader:
        return model(part).detach(), model.running_mean


@pytest.mark.parametrize("synchronised", [False, True])
def test_a_forward_of_its_own_is_called_and_sees_the_whole_batch(pool, synchronised):
    expected, mean = alone(activated, synchronised)
    answers = on_all(pool, activated, synchronised)
    torch.testing.assert_close(torch.cat([part for part, _ in answers]), expected)
    for _, their_mean in answers:
        torch.testing.assert_close(their_mean, mean)


def torch_again():
    elastic.prepare(model_of("flat"))
    replaced = nn.functional.batch_norm.__module__
    elastic.current()._member.state.set_width(1)
    return replaced, nn.functional.batch_norm.__module__


def test_torch_is_as_it_was_made_at_width_one(pool):
    assert on_all(pool, torch_again) == [("fluidtune.elastic.data.batchnorm", "torch.nn.functional")] * 3


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


def penalised(create_graph):
    """A gradient penalty, as in WGAN-GP; or a gradient by itself, which is not differentiated again."""
    torch.manual_seed(4)
    x = torch.randn(12, 6, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    model, loader = elastic.prepare(model, DataLoader(TensorDataset(x), batch_size=12))
    for (part,) in loader:
        part = part.clone().requires_grad_(True)
        try:
            (slope,) = torch.autograd.grad(model(part).sum(), part, create_graph=create_graph)
            (model(part).square().mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
        except CannotDivide as error:
            return str(error)
    return [p.grad for p in model.parameters()]


def test_a_gradient_of_a_gradient_is_refused_by_all_workers(pool):
    assert all("a gradient of a gradient goes through" in str(found) for found in on_all(pool, penalised, True))
    expected = alone(penalised, False)
    for gradients in on_all(pool, penalised, False):
        torch.testing.assert_close(gradients, expected)
