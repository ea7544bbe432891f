"""What cannot be trained as one is trained as alone, and says why in one line."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fluidtune.elastic.fused import FusedTrials, current_trial

from .loops import INPUTS, Plan, Twice, compare, perceptron, plain


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = perceptron(), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.norm(x))
        return y if y.sum() > 0 else -y


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = perceptron(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x) * (1 + 0.1 * self.calls)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x + 0.1 * torch.randn(x.shape))


class Skipping(Noisy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x if random.random() < 0.5 else -x)


class Alone(Noisy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(F.alpha_dropout(x, 0.1, self.training))


class Reading(Noisy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * x.square().mean().item()


class Growing(Noisy):
    """Its buffer has one number more after each call."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x.mean().detach().view(1)])
        return self.inner(x)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 4, dtype=torch.complex64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1).to(torch.complex64)).abs()


class Quantised(Noisy):
    """A quantised parameter cannot learn; the others do."""

    def __init__(self) -> None:
        super().__init__()
        scale = torch.quantize_per_tensor(torch.full((4,), 0.5), 0.1, 0, torch.qint8)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale.dequantize()


class OwnFunction(Noisy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Twice.apply(self.inner(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))[:, :4].mean(2)


class Unregistered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = perceptron(), torch.rand(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.temperature = perceptron(), random.random()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.temperature


def hooked() -> nn.Module:
    model = perceptron()
    model.register_forward_hook(lambda module, args, out: out * 2)
    return model


def in_channels_last() -> nn.Module:
    """Its dropout would draw in another order if its parameters were laid out otherwise."""
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(256, 4),
    )
    return model.to(memory_format=torch.channels_last)


UNFUSED = [
    (Branching, "depends on its data"),
    (Counting, "writes to its module"),
    (Noisy, "draws random numbers"),
    (Skipping, "draws random numbers"),
    (Alone, "draws random numbers (alpha_dropout)"),
    (OwnFunction, "Twice, an autograd function"),
    (Tied, "tied parameters"),
    (Unregistered, "scale is a tensor or module that is not registered"),
    (Tempered, "differs from that of another trial in temperature"),
    (hooked, "has hooks"),
    (Reading, "depends on its data (item)"),
    (Growing, "buffer seen changes its shape"),
    (Complex, "not of one real dtype"),
    (Quantised, "not of one real dtype"),
    (in_channels_last, "not contiguous (channels last"),
    (lambda: nn.utils.parametrizations.weight_norm(perceptron()[1]), "parametrizations"),
]


def test_a_model_whose_calls_never_meet_says_what_it_writes(sizes: Counter[tuple[str, int]]) -> None:
    ahead = threading.Event()

    def behind(iteration: int, model: nn.Module) -> None:
        trial = current_trial()
        if iteration == 0 and trial is not None:
            with trial.apart():
                assert ahead.wait(120)

    def leading(iteration: int, model: nn.Module) -> None:
        if iteration == 2 and current_trial() is not None:
            ahead.set()

    trials = compare([Plan(0, model=Counting, before=leading), Plan(1, model=Counting, before=behind)], fused=False)
    assert any("writes to its module" in line for trial in trials for line in trial.reasons)


def test_hooks_that_another_trial_has_meanwhile_are_no_error_of_one_that_joins() -> None:
    trials = FusedTrials()

    def hooked_later() -> None:
        trial, model = current_trial(), perceptron()
        assert trial is not None
        trial.prepare(model)
        model.register_forward_hook(lambda module, args, out: out * 2)
        trials.start("joiner", joins)
        trial.prepare()  # the other one goes first
        model(INPUTS)

    def joins() -> None:
        trial, model = current_trial(), perceptron()
        assert trial is not None
        trial.prepare(model)
        model(INPUTS)

    trials.start("first", hooked_later)
    first, second = trials.join()
    assert first.error is None and second.error is None
    assert ["has hooks" in line for line in first.reasons] == [True] and second.reasons == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(("model", "reason"), UNFUSED)
def test_what_cannot_be_fused_is_trained_alone_and_says_why(
    model: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fluidtune.elastic.fused.baton.PATIENCE", float("inf"))  # a trial that goes on says nothing
    step = plain if model is not UNFUSED[-1][0] else _flat
    trials = compare([Plan(i, model=model, step=step) for i in range(2)], fused=False)
    said = [line for trial in trials for line in trial.reasons]
    assert any(reason in line for line in said), said
    assert all(len(trial.reasons) <= 1 for trial in trials)


def test_calls_under_autocast_are_not_fused_and_say_so(sizes: Counter[tuple[str, int]]) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    for trial in compare([Plan(i, "convolution", step=step) for i in range(2)], fused=False):
        (line,) = trial.reasons
        assert "autocast" in line
    assert sizes["call", 2] == 2  # the validations


def _flat(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    return plain(nn.Sequential(nn.Flatten(), model), optimizer, x, y)
