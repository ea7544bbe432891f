"""Loops as PyTorch's tutorials and popular repositories have them, ported with five lines: for `test_tutorial_loops`.

All are small and in double precision. A number that is drawn for each sample is multiplied by zero, because what it is
depends on the width. Here are images and what steers the training; `tutorial_readings`, `tutorial_sequences` and
`tutorial_models` have the others.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as lrs
from torch.utils.checkpoint import checkpoint
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


def epoch_of(model: Any, optimizer: Any, loader: Any, loss_fn: Any = F.mse_loss, after: Any = None) -> float:
    """One epoch of the plainest loop; ``after``: called after each step."""
    meter = Meter()
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        meter.update(loss.item(), len(x))
        if after is not None:
            after()
    return meter.mean


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


def one_cycle(config: Config, report: Report) -> Any:
    model, loader = cnn(norm=True), loader_of(images())
    optimizer = sgd(model)
    scheduler = lrs.OneCycleLR(optimizer, 0.1, epochs=config["stop"], steps_per_epoch=len(loader))
    model, optimizer, scheduler, loader = elastic.prepare(model, optimizer, scheduler, loader)
    for _ in turns(config):
        report(epoch_of(model, optimizer, loader, F.cross_entropy, scheduler.step))
    return weights(model)


def mixup(mixes: float) -> Loop:
    """Mixes each sample with another one of the batch. ``mixes``: how much."""

    def loop(config: Config, report: Report) -> Any:
        model = cnn()
        optimizer = sgd(model)
        model, optimizer, loader = elastic.prepare(model, optimizer, loader_of(images(), own=3))
        for _ in turns(config):
            meter = Meter()
            for x, y in loader:
                lam = 1.0 - mixes * numpy.random.beta(1.0, 1.0)
                index = torch.randperm(x.size(0))
                out = model(lam * x + (1 - lam) * x[index])
                loss = lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[index])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                meter.update(loss.item(), len(x))
            report(meter.mean)
        return weights(model)

    return loop


def label_smoothing(config: Config, report: Report) -> Any:
    model = cnn()
    optimizer = sgd(model)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader_of(images()))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for _ in turns(config):
        report(epoch_of(model, optimizer, loader, criterion))
    return weights(model)


def focal(config: Config, report: Report) -> Any:
    def loss_fn(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ce = F.cross_entropy(out, y, reduction="none")
        return ((1 - torch.exp(-ce)) ** 2 * ce).mean()

    model = cnn()
    optimizer = sgd(model)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader_of(images()))
    for _ in turns(config):
        report(epoch_of(model, optimizer, loader, loss_fn))
    return weights(model)


class Cropped(Dataset):
    """Crops each image at a place that it draws, which here is no other place."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.images, self.draw = images(), draw

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.images[index]
        return x.roll(int(0.0 * self.draw()), 2), y


def _torch_draw() -> float:
    return torch.rand(()).item()


def crops(draw: Callable[[], float], **more: Any) -> Loop:
    def loop(config: Config, report: Report) -> Any:
        model = cnn()
        optimizer = sgd(model)
        model, optimizer, loader = elastic.prepare(model, optimizer, loader_of(Cropped(draw), own=3, **more))
        for _ in turns(config):
            report(epoch_of(model, optimizer, loader, F.cross_entropy))
        return weights(model)

    return loop


# -- what steers the training --


def accumulation(config: Config, report: Report) -> Any:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = lrs.CosineAnnealingLR(optimizer, 20)
    model, optimizer, scheduler, loader = elastic.prepare(model, optimizer, scheduler, loader_of(numbers()))
    for _ in turns(config):
        meter = Meter()
        for i, (x, y) in enumerate(loader):
            loss = F.mse_loss(model(x), y)
            (loss / 4).backward()
            if (i + 1) % 4 == 0 or i + 1 == len(loader):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            meter.update(loss.item(), len(x))
        report(meter.mean)
    return weights(model)


def warm_up(config: Config, report: Report) -> Any:
    model = mlp()
    optimizer = sgd(model)
    scheduler = lrs.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 15))
    model, optimizer, scheduler, loader = elastic.prepare(model, optimizer, scheduler, loader_of(numbers()))
    for _ in turns(config):
        report(epoch_of(model, optimizer, loader, after=scheduler.step))
    return weights(model)


def warm_restarts(config: Config, report: Report) -> Any:
    model = mlp()
    optimizer = sgd(model)
    scheduler = lrs.CosineAnnealingWarmRestarts(optimizer, 2)
    model, optimizer, scheduler, loader = elastic.prepare(model, optimizer, scheduler, loader_of(numbers()))
    for epoch in turns(config):
        meter = Meter()
        for i, (x, y) in enumerate(loader):
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step(epoch + i / len(loader))
            meter.update(loss.item(), len(x))
        report(meter.mean)
    return weights(model)


def lr_finder(config: Config, report: Report) -> Any:
    """The rate grows by a counter of its own."""
    model, step = mlp(), 0
    optimizer = sgd(model)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader_of(numbers()))
    for _ in turns(config):
        meter = Meter()
        for x, y in loader:
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * 1.1**step
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meter.update(loss.item(), len(x))
        report(meter.mean)
    return weights(model)


def plateau(config: Config, report: Report) -> Any:
    model = mlp()
    optimizer = sgd(model)
    scheduler = lrs.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    train, test = loader_of(numbers()), DataLoader(numbers(21, 5), batch_size=10)
    model, optimizer, scheduler, train, test = elastic.prepare(model, optimizer, scheduler, train, test)
    for _ in turns(config):
        epoch_of(model, optimizer, train)
        loss = evaluate(model, test)
        scheduler.step(loss)
        report(loss)
    return weights(model)


class EarlyStopping:
    def __init__(self, patience: int) -> None:
        self.best, self.bad, self.patience = float("inf"), 0, patience

    def stops(self, loss: float) -> bool:
        self.bad = 0 if loss < 0.9 * self.best else self.bad + 1
        self.best = min(loss, self.best)
        return self.bad >= self.patience


def early_stopping(config: Config, report: Report) -> Any:
    model, stopping = mlp(), EarlyStopping(3)
    optimizer = sgd(model, 0.01)
    train, test = loader_of(numbers()), DataLoader(numbers(21, 5), batch_size=10)
    model, optimizer, train, test = elastic.prepare(model, optimizer, train, test)
    for _ in turns({"stop": 50}):
        epoch_of(model, optimizer, train)
        loss = evaluate(model, test)
        report(loss)
        if stopping.stops(loss):
            break
    return weights(model)


def best_restored(config: Config, report: Report) -> Any:
    """Goes back to its best weights, which it keeps for itself, whenever it got worse."""
    model, best, kept = mlp(), float("inf"), None
    optimizer = sgd(model, 0.3)
    train, test = loader_of(numbers()), DataLoader(numbers(21, 5), batch_size=10)
    model, optimizer, train, test = elastic.prepare(model, optimizer, train, test)
    for _ in turns(config):
        epoch_of(model, optimizer, train)
        loss = evaluate(model, test)
        if loss < 0.5 * best:
            best, kept = loss, copy.deepcopy(model.state_dict())
        elif kept is not None:
            model.load_state_dict(kept)
        report(loss)
    return weights(model)


def clipped(config: Config, report: Report) -> Any:
    model = mlp()
    optimizer = sgd(model)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader_of(numbers()))
    for _ in turns(config):
        meter = Meter()
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
            optimizer.step()
            meter.update(loss.item(), len(x))
        report(meter.mean)
    return weights(model)


def unfreezing(adds: bool) -> Loop:
    """Its first layer learns from the third epoch on. ``adds``: it gets a group of the optimizer then."""

    def loop(config: Config, report: Report) -> Any:
        model = mlp()
        for p in model[0].parameters():
            p.requires_grad = False
        optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad or not adds, model.parameters()), lr=0.05)
        model, optimizer, loader = elastic.prepare(model, optimizer, loader_of(numbers()))
        for epoch in turns(config):
            if epoch == 2:
                for p in model[0].parameters():
                    p.requires_grad = True
                if adds:
                    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
            report(epoch_of(model, optimizer, loader))
        return weights(model)

    return loop


def noisy_weights(config: Config, report: Report) -> Any:
    """Noise in the weights before each step, the same in all workers."""
    model = mlp()
    optimizer = sgd(model)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader_of(numbers(), own=3))
    for _ in turns(config):
        meter = Meter()
        for x, y in loader:
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(torch.randn_like(p) * 0.01)
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meter.update(loss.item(), len(x))
        report(meter.mean)
    return weights(model)


def recomputed(config: Config, report: Report) -> Any:
    model = mlp()
    optimizer = sgd(model)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader_of(numbers()))
    for _ in turns(config):
        report(epoch_of(lambda x: checkpoint(model, x, use_reentrant=False), optimizer, loader))
    return weights(model)


LOOPS: dict[str, Loop] = {
    "mnist": mnist,
    "one cycle": one_cycle,
    "mixup": mixup(1.0),
    "mixup without an effect": mixup(0.0),
    "label smoothing": label_smoothing,
    "focal loss": focal,
    "crops by torch": crops(_torch_draw),
    "crops by numpy": crops(numpy.random.rand),
    "crops by random": crops(random.random),
    "crops in processes": crops(_torch_draw, num_workers=2),
    "accumulation": accumulation,
    "warm-up": warm_up,
    "warm restarts": warm_restarts,
    "lr finder": lr_finder,
    "plateau": plateau,
    "early stopping": early_stopping,
    "best weights restored": best_restored,
    "clipped": clipped,
    "unfreezing": unfreezing(adds=False),
    "unfreezing, a group added": unfreezing(adds=True),
    "noisy weights": noisy_weights,
    "recomputed": recomputed,
}
