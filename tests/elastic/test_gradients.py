"""Gradients after backward are those of the whole batch, on every worker, whatever its share."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from fluidtune import elastic
from fluidtune.elastic import GroupLost
from fluidtune.elastic.checks.in_turns import InTurns, TurnBackend
from fluidtune.elastic.data import gradients
from fluidtune.elastic.data.gradients import GradientReducer, at_end_of_backward, backward_pass

from .groups import alone, in_session, lone_session, on_all


def batches(samples, batch_size):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.pow(2).sum(1, keepdim=True)), batch_size=batch_size)


def grads(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def test_a_gradient_that_is_zero_or_taken_is_the_leaders_too():
    """`zero_grad(set_to_none=False)`, and a parameter that the step does not use: its weight decays."""
    turns = InTurns(2)

    def play(rank):
        session = lone_session(worker=f"w{rank}", leader=rank == 0, backend=TurnBackend(turns, rank, "cpu"))
        reducer = session._objects._gradients
        used, unused, new = parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
        for parameter in parameters:
            reducer.watch(parameter)
        used.grad = torch.full((2,), 1.0 + rank)
        reducer._unfinished.add(id(used))
        if rank == 0:
            unused.grad = torch.zeros(2)
        else:
            new.grad = torch.ones(2)
        apart = reducer._take_leaders(parameters)
        found = grads(nn.ParameterList(parameters)), [float(each) for each in apart]
        session.close()
        return found

    for rank, (found, apart) in enumerate(turns.run(play)):
        assert torch.equal(found[0], torch.ones(2)) and torch.equal(found[1], torch.zeros(2)) and found[2] is None
        assert apart == [float(rank), 0.0, 0.0]


def close(pool, fn, *args):
    expected = alone(fn, *args)
    for got in on_all(pool, fn, *args):
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            if b is None:
                assert a is None
            else:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def net(*more):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1), *more)


def one_pass(samples):
    model, loader = elastic.prepare(net(), batches(samples, samples))
    for x, y in loader:
        nn.functional.mse_loss(model(x), y).backward()
    return grads(model)


@pytest.mark.parametrize("samples", [1, 2, 3, 7, 8, 64])
def test_every_share_counts_by_its_samples(pool, samples):
    close(pool, one_pass, samples)


class Branches(nn.Module):
    """A part for samples of the first half, one for the others, one for none, one that is frozen at first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.low, self.high, self.never, self.later = (nn.Linear(4, 1) for _ in range(4))
        self.later.requires_grad_(False)

    def forward(self, x, index):
        out = self.later(x).squeeze(1)
        for part, chosen in [(self.low, index < 3), (self.high, index >= 3)]:
            if chosen.any():
                out = out.masked_scatter(chosen, part(x[chosen]).squeeze(1) + out[chosen])
        return out


def branches():
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, torch.arange(6)), batch_size=6)
    model, loader = elastic.prepare(Branches(), loader)
    found = []
    for unfreeze in (False, True):
        model.later.requires_grad_(unfreeze)
        for part, index in loader:
            model(part, index).square().mean().backward()
        found += grads(model)
        model.zero_grad()
    return found


def test_parameters_that_only_some_workers_used(pool):
    close(pool, branches)
    assert [g is None for g in alone(branches)] == [False] * 4 + [True] * 4 + [False] * 4 + [True] * 2 + [False] * 2


def scaled_and_clipped():
    model, loader = elastic.prepare(net().double(), batches(7, 7))
    model[0].float()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for x, y in loader:
        hidden = model[1](model[0](x)).double()
        scaler.scale(nn.functional.mse_loss(model[2](hidden), y.double())).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    return [norm, *[p.detach() for p in model.parameters()]]


def test_clipping_and_scaling_see_global_gradients_of_several_dtypes(pool):
    close(pool, scaled_and_clipped)


class Convolved(nn.Module):
    """Channels last; ``compiled``: by torch.compile, with a backend that needs no C++ compiler."""

    def __init__(self, compiled):
        super().__init__()
        torch.manual_seed(2)
        parts = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
        parts = parts.to(memory_format=torch.channels_last)
        self.parts = torch.compile(parts, backend="aot_eager") if compiled else parts

    def forward(self, x):
        return self.parts(x.to(memory_format=torch.channels_last)).mean((1, 2, 3))


def convolved(compiled):
    x = torch.randn(7, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    model, loader = elastic.prepare(Convolved(compiled), DataLoader(TensorDataset(x, x.mean((1, 2, 3))), batch_size=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for part, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(part), y).backward()
        found += grads(model)
        optimizer.step()
    last = all(p.is_contiguous(memory_format=torch.channels_last) for p in model.parameters() if p.dim() == 4)
    return [*found, *[p.detach() for p in model.parameters()], torch.tensor(float(last))]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [pytest.param(False, marks=pytest.mark.core), True])
def test_channels_last_and_compiled_models(pool, compiled):
    close(pool, convolved, compiled)
    assert alone(convolved, compiled)[-1] == 1.0


def loose():
    """A parameter that the optimizer has, and no module."""
    model, scale = net(), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    optimizer, model, loader = elastic.prepare(optimizer, model, batches(7, 7))
    for x, y in loader:
        nn.functional.mse_loss(scale * model(x), y).backward()
    return [*grads(model), scale.grad]


def test_parameters_of_no_module(pool):
    close(pool, loose)


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("a broken layer")


def after_a_failed_pass():
    model, loader = elastic.prepare(net(), batches(9, 9))
    for x, y in loader:
        weight = model[0].weight
        with pytest.raises(ValueError, match="broken layer"):
            # the last layer's hooks have run when the first one's input fails
            model[2](Broken.apply(model[1](model[0](x)))).mean().backward()
        assert weight.grad is None
        model.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
    return grads(model)


def test_a_pass_that_fails_does_not_spoil_the_next(pool):
    close(pool, after_a_failed_pass)


def small_buckets():
    with mock.patch.object(gradients, "_BUCKET", 64):  # bytes
        return one_pass(7)


def test_buckets(pool):
    close(pool, small_buckets)


def not_finite():
    """A stand-in whose own loss is not finite counts nothing."""
    model, loader = elastic.prepare(net(), batches(2, 2))
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        (loss * float("nan") if elastic.samples(1) == 0 else loss).backward()
    return grads(model)


def test_a_stand_in_counts_nothing(pool):
    close(pool, not_finite)


def means():
    _, loader = elastic.prepare(net(), batches(11, 5))  # 5, 5, 1
    total, count = 0.0, 0
    for _, y in loader:
        n = elastic.samples(len(y))
        total, count = total + y.mean().item() * n, count + n
    return [torch.tensor(elastic.mean(total, count)), torch.tensor(elastic.mean(torch.tensor(3.0), 2))]


def test_the_mean_is_over_all_samples_and_the_same_everywhere(pool):
    close(pool, means)


# -- what of autograd is private: these fail if torch changes it --


def test_a_call_at_the_end_of_backward_runs_last_and_may_raise():
    x = torch.ones(2, requires_grad=True)
    seen = []

    def last():
        seen.append((backward_pass(), x.grad is not None))
        raise GroupLost("from within")

    def first(_):
        seen.append(backward_pass())
        at_end_of_backward(last)

    x.register_post_accumulate_grad_hook(first)
    assert backward_pass() == -1
    with pytest.raises(GroupLost, match="from within"):
        (x * 2).sum().backward()
    assert seen[0] >= 0
    assert seen[1][1]
    with pytest.raises(GroupLost):
        (x * 2).sum().backward()
    assert seen[2] > seen[0], "numbers of backward passes grow"


def test_what_cannot_be_divided_is_refused():
    with in_session():
        with pytest.raises(TypeError, match="sparse=False"):
            elastic.prepare(nn.Sequential(nn.Embedding(3, 2, sparse=True)))
        with pytest.raises(TypeError, match="run one batch"):
            elastic.prepare(nn.LazyLinear(3))
        with pytest.raises(TypeError, match="got a list"):
            elastic.prepare([1])
        model = nn.Linear(1, 1)
        assert elastic.prepare(model) is model
        assert elastic.prepare(model, model) == (model, model)
        assert len(model.weight._post_accumulate_grad_hooks) == 1


class Operations(TorchDispatchMode):
    """Counts torch's operations while a function of ours runs; views are none, and nothing of autograd's is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not any(each in str(function) for each in ("view", "split", "as_strided", "detach", "alias")):
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def counted(layers):
    """The operations that reducing the gradients of a model with ``layers`` layers takes, by name."""
    torch.manual_seed(2)
    model = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(layers)))
    model = elastic.prepare(model.to(memory_format=torch.channels_last))
    operations, reduce = Operations(), GradientReducer._reduce_bucket

    def watched(*args):
        with operations:
            reduce(*args)

    with mock.patch.object(GradientReducer, "_reduce_bucket", watched):
        model(torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)).sum().backward()
    return operations.names


def test_a_sum_takes_few_operations_however_many_parameters_there_are_and_the_host_waits_for_none(pool):
    few, many = (on_all(pool, counted, layers)[0] for layers in (2, 30))
    assert few == many and len(few) <= 8, few
    assert not any("_local_scalar_dense" in name or "item" in name for name in many)
