"""Loops as PyTorch's tutorials and popular repositories have them, ported with five lines: for `test_tutorial_loops`.

All are small and in double precision. A number that is drawn for each sample is multiplied by zero, because what it is
depends on the width. Here are images; `tutorial_readings`, `tutorial_sequences` and `tutorial_models` have the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as lrs
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fluidtune import elastic

Config = dict[str, Any]
Report = Callable[[float], None]
Loop = Callable[[Config, Report], Any]


class Meter:
    """The ``AverageMeter`` of many repositories, with `elastic.samples` and `elastic.mean`."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float, n: int) -> None:
        n = elastic.samples(n)
        self.total, self.count = self.total + value * n, self.count + n

    @property
    def mean(self) -> float:
        return elastic.mean(self.total, self.count)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(n: int = 44, seed: int = 0) -> TensorDataset:
    """One channel of 6 x 6, three classes."""
    x = torch.randn(n, 1, 6, 6, generator=seeded(seed), dtype=torch.float64)
    return TensorDataset(x, (x.mean((1, 2, 3)) * 12).long().clamp(-1, 1) + 1)


def numbers(n: int = 44, seed: int = 0) -> TensorDataset:
    """Six numbers, and one to predict."""
    x = torch.randn(n, 6, generator=seeded(seed), dtype=torch.float64)
    return TensorDataset(x, (x.sum(1, keepdim=True) > 0).double() + 0.1 * x[:, :1])


def loader_of(dataset: Dataset, own: int | None = None, **more: Any) -> DataLoader:
    """``own``: the seed of a generator of its own."""
    generator = {} if own is None else {"generator": seeded(own)}
    return DataLoader(dataset, batch_size=8, **{"shuffle": True, **generator, **more})


def mlp(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def cnn(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    middle = [nn.BatchNorm2d(4)] if norm else []
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=not norm), *middle, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    ).double()


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def weights(*models: nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for model in models for value in model.state_dict().values()]


def turns(config: Config) -> Iterator[int]:
    return iter(elastic.epochs(0, config["stop"]))


@torch.no_grad()
def evaluate(model: nn.Module, loader: Any, loss_fn: Callable[..., torch.Tensor] = F.mse_loss) -> float:
    model.eval()
    meter = Meter()
    for x, y in loader:
        meter.update(loss_fn(model(x), y).item(), len(x))
    model.train()
    return meter.mean


def fit(optimizer: Any, batches: Any, loss_of: Callable[..., torch.Tensor], after: Callable[[], Any] = int) -> float:
    """One epoch of the plainest loop. ``loss_of``: of what a batch consists of. ``after``: called after each step."""
    meter = Meter()
    for x, *rest in batches:
        optimizer.zero_grad()
        loss = loss_of(x, *rest)
        loss.backward()
        optimizer.step()
        meter.update(loss.item(), len(x))
        after()
    return meter.mean


def epoch_of(model: Any, optimizer: Any, loader: Any, loss_fn: Any = F.mse_loss, after: Any = int) -> float:
    """An epoch of a model that predicts."""
    return fit(optimizer, loader, lambda x, y: loss_fn(model(x), y), after)


# -- images --


def mnist(config: Config, report: Report) -> Any:
    """pytorch/examples/mnist: its test adds up the losses, and divides by the size of the data set."""
    model = cnn()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = lrs.StepLR(optimizer, step_size=1, gamma=0.7)
    train, test = loader_of(images()), DataLoader(images(21, 5), batch_size=10)
    model, optimizer, scheduler, train, test = elastic.prepare(model, optimizer, scheduler, train, test)
    for _ in turns(config):
        model.train()
        for x, y in train:
            optimizer.zero_grad()
            F.nll_loss(F.log_softmax(model(x), 1), y).backward()
            optimizer.step()
        model.eval()
        total, count = 0.0, 0
        with torch.no_grad():
            for x, y in test:
                n = elastic.samples(len(x))
                total += F.nll_loss(F.log_softmax(model(x), 1), y, reduction="sum").item() * (n > 0)
                count += n
        scheduler.step()
        report(elastic.mean(total, count))
    return weights(model)


def mixup(mixes: float) -> Loop:
    """Mixes each sample with another one of the batch. ``mixes``: how much."""

    def loop(config: Config, report: Report) -> Any:
        model = cnn()
        optimizer = sgd(model)
        model, optimizer, loader = elastic.prepare(model, optimizer, loader_of(images(), own=3))

        def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            lam = 1.0 - mixes * numpy.random.beta(1.0, 1.0)
            index = torch.randperm(x.size(0))
            out = model(lam * x + (1 - lam) * x[index])
            return lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[index])

        for _ in turns(config):
            report(fit(optimizer, loader, loss_of))
        return weights(model)

    return loop


LOOPS: dict[str, Loop] = {
    "mnist": mnist,
    "mixup": mixup(1.0),
    "mixup without an effect": mixup(0.0),
}
