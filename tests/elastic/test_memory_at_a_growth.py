"""Models and optimizers whose tensors lie in memory in ways of their own give at every width what they give alone.

A joiner's tensors lie as the leader's do: optimizers with kernels of their own pair numbers by their place in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fluidtune import elastic
from fluidtune.testing.processes import peer_processes

from . import trials
from .test_kinds_of_loops import Trip, same, seed

pytestmark = [pytest.mark.slow, pytest.mark.core]


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 4, 2)
        self.parts = nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.view(-1, 3, 5, 5).to(memory_format=torch.channels_last)
        return self.parts(image).mean((1, 2, 3))


class Remembering(nn.Module):
    """Its weights are views of one buffer where torch flattens them."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(5, 6, num_layers=2, batch_first=True), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x.view(-1, 15, 5))[0][:, -1]).squeeze(1)


class Speaking(nn.Module):
    """The words' weights are those that score them, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.scores = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
        self.scores.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = self.words((x[:, :4].abs() * 3).long().clamp(max=8)).mean(1)
        return self.scores(torch.tanh(self.inner(words))).square().mean(1)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.optim.Optimizer]]] = {
    "channels last, fused AdamW": (Convolved, partial(torch.optim.AdamW, lr=0.01, fused=True)),
    "channels last, foreach SGD": (Convolved, partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=True)),
    "channels last, Adam with amsgrad": (Convolved, partial(torch.optim.Adam, lr=0.01, amsgrad=True)),
    "LSTM": (Remembering, partial(torch.optim.AdamW, lr=0.01, fused=True)),
    "tied embedding": (Speaking, partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=True)),
}


def trial(config: dict[str, Any], report: Callable[[float], None]) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    build, optimize = KINDS[config["kind"]]
    model = build().double().to(memory_format=torch.channels_last)
    optimizer = optimize(model.parameters())
    x = torch.randn(44, 75, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, x.mean(1)), batch_size=8, shuffle=True)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader)
    for _ in elastic.epochs(0, config["stop"]):
        total, count = 0.0, 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            n = elastic.samples(len(x))
            total, count = total + loss.item() * n, count + n
        report(elastic.mean(total, count))
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def pool():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with peer_processes(3) as started:
        yield started
    torch.set_num_threads(threads)


@pytest.mark.parametrize("widths", [(1, 2, 3, 1)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_weights_are_those_of_the_trial_alone(pool, kind, widths):
    config = {"kind": kind, "stop": len(widths) + 1}
    seed()
    reports, weights = trials.plain(trial, config)
    got, values = Trip(pool, config, trial).go(widths)
    same(got, reports)
    for each in values:
        same(each, weights)
