"""Loops that read their data in ways of their own, or evaluate an average of weights: see `tutorial_loops`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, Subset

from fluidtune import elastic

from .tutorial_loops import (
    Config,
    Loop,
    Meter,
    Report,
    cnn,
    epoch_of,
    evaluate,
    fit,
    images,
    loader_of,
    mlp,
    numbers,
    sgd,
    turns,
    weights,
)

# -- weights beside the weights --


class Ema:
    """The exponential moving average of many repositories: a dict of shadows."""

    def __init__(self, model: nn.Module, decay: float = 0.8) -> None:
        self.model, self.decay, self.backup = model, decay, {}
        self.shadow = {name: p.data.clone() for name, p in model.named_parameters()}

    def update(self) -> None:
        for name, p in self.model.named_parameters():
            self.shadow[name] = self.decay * self.shadow[name] + (1 - self.decay) * p.data

    def apply_shadow(self) -> None:
        for name, p in self.model.named_parameters():
            self.backup[name], p.data = p.data, self.shadow[name].clone()

    def restore(self) -> None:
        for name, p in self.model.named_parameters():
            p.data = self.backup[name]

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = {name: value.clone() for name, value in state["shadow"].items()}


def ema(prepared: bool, divided: bool) -> Loop:
    """Evaluates the average. ``prepared``: it is; ``divided``: the loader of the evaluation is prepared."""

    def loop(config: Config, report: Report) -> Any:
        model = mlp()
        optimizer = sgd(model, 0.01)
        average = Ema(model)
        train, test = loader_of(numbers()), DataLoader(numbers(21, 5), batch_size=10)
        model, optimizer, train = elastic.prepare(model, optimizer, train)
        if divided:
            test = elastic.prepare(test)
        if prepared:
            elastic.prepare(average)
        for _ in turns(config):
            epoch_of(model, optimizer, train, after=average.update)
            average.apply_shadow()
            loss = evaluate(model, test)
            average.restore()
            report(loss)
        return [*weights(model), *(average.shadow.values() if prepared else [])]

    return loop


def swa(prepared: bool, evaluated: int = 1) -> Loop:
    """The average begins in the second epoch, and is evaluated with statistics of its own, from ``evaluated`` on."""

    def loop(config: Config, report: Report) -> Any:
        model = cnn(norm=True)
        optimizer = sgd(model)
        average, rates = AveragedModel(model), SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
        train, test = loader_of(images()), DataLoader(images(21, 5), batch_size=10)
        model, optimizer, rates, train, test = elastic.prepare(model, optimizer, rates, train, test)
        average = elastic.prepare(average) if prepared else average
        for epoch in turns(config):
            loss = epoch_of(model, optimizer, train, F.cross_entropy)
            if epoch > 0:
                average.update_parameters(model)
                rates.step()
            if epoch >= evaluated:
                update_bn(train, average)
                loss = evaluate(average, test, F.cross_entropy)
            elif epoch > 0:
                loss = evaluate(model, test, F.cross_entropy)
            report(loss)
        return weights(model)

    return loop


# -- evaluations --


class Noisy(nn.Module):
    """Returns what it draws for each sample, too, as a network does whose dropout stays on."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.body(x), F.dropout(torch.ones_like(x))


def one_ahead(batches: Any) -> Iterator[Any]:
    now = None
    for following in batches:
        if now is not None:
            yield now
        now = following
    yield now


def evaluated(batches: Callable[[Any], Any]) -> Loop:
    """``batches``: of the loader, those of an evaluation."""

    def loop(config: Config, report: Report) -> Any:
        model = Noisy()
        optimizer = sgd(model)
        train, test = loader_of(numbers(), own=3), DataLoader(numbers(24, 5), batch_size=10)
        model, optimizer, train, test = elastic.prepare(model, optimizer, train, test)

        def loss_of(out: Any, y: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(out[0], y)

        for _ in turns(config):
            epoch_of(model, optimizer, train, loss_of)
            report(evaluate(model, batches(test), loss_of))
        return weights(model)

    return loop


# -- how the batches are read --


def zipped(config: Config, report: Report) -> Any:
    """Labelled data, and unlabelled in step that is not prepared."""
    model = mlp()
    optimizer = sgd(model)
    labelled, other = loader_of(numbers(40)), loader_of(numbers(48, 5), own=4)
    model, optimizer, labelled = elastic.prepare(model, optimizer, labelled)

    def loss_of(x: Any, y: Any, u: Any) -> Any:
        return F.mse_loss(model(x), y) + 0.1 * model(u).square().mean()

    for _ in turns(config):
        report(fit(optimizer, ((*a, u) for a, (u, _) in zip(labelled, other, strict=False)), loss_of))
    return weights(model)


def steps_of(batches: Callable[[Any], Callable[[], Iterator[Any]]], steps: int = 7) -> Loop:
    """A fixed number of steps in each epoch. ``batches``: of the loader, what gives an epoch's iterator."""

    def loop(config: Config, report: Report) -> Any:
        model = mlp()
        optimizer = sgd(model)
        model, optimizer, loader = elastic.prepare(model, optimizer, loader_of(numbers(40)))
        begin = batches(loader)
        for _ in turns(config):
            meter, iterator = Meter(), begin()
            for _ in range(steps):
                try:
                    x, y = next(iterator)
                except StopIteration:
                    iterator = begin()
                    x, y = next(iterator)
                loss = F.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                meter.update(loss.item(), len(x))
            report(meter.mean)
        return weights(model)

    return loop


def one_iterator(batches: Iterator[Any]) -> Callable[[], Iterator[Any]]:
    return lambda: batches


def forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def curriculum(prepared: bool) -> Loop:
    """A new loader in each epoch, over more of the data."""

    def loop(config: Config, report: Report) -> Any:
        model, data = mlp(), numbers()
        optimizer = sgd(model)
        model, optimizer = elastic.prepare(model, optimizer)
        for epoch in turns(config):
            loader = loader_of(Subset(data, range(min(44, 16 + 8 * epoch))))
            report(epoch_of(model, optimizer, elastic.prepare(loader) if prepared else loader))
        return weights(model)

    return loop


LOOPS: dict[str, Loop] = {
    "ema, prepared": ema(prepared=True, divided=True),
    "ema": ema(prepared=False, divided=True),
    "ema, evaluated whole": ema(prepared=False, divided=False),
    "swa, prepared": swa(prepared=True),
    "swa": swa(prepared=False),
    "swa, evaluated later": swa(prepared=False, evaluated=3),
    "dropout in an evaluation": evaluated(iter),
    "an evaluation, fetched ahead": evaluated(one_ahead),
    "zipped with one not prepared": zipped,
    "a cycle for all epochs": steps_of(lambda loader: one_iterator(cycle(loader))),
    "forever, for all epochs": steps_of(lambda loader: one_iterator(forever(loader))),
    "forever, an epoch": steps_of(lambda loader: lambda: forever(loader)),
    "next by hand": steps_of(lambda loader: lambda: iter(loader)),
    "islice": steps_of(lambda loader: lambda: islice(loader, 3), 3),
    "curriculum": curriculum(prepared=False),
    "curriculum, prepared": curriculum(prepared=True),
}
