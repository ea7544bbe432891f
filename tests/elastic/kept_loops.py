"""Training loops: three that keep something of their own from epoch to epoch, and those that have prepared all of it.

Each takes ``report`` and returns what it has in the end. In the name of each of the three stands what it keeps.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from fluidtune import elastic

Report = Callable[..., None]
EPOCHS = 9


def data(samples: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def net(inputs: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, 1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any, extra: Any = 0.0) -> float:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y) + extra
    loss.backward()
    optimizer.step()
    return loss.item()


def parts(rate: float = 0.05, **more: Any) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    model = net()
    return (
        model,
        torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9),
        DataLoader(data(), 8, shuffle=True, **more),
    )


# -- the three --


def own_counter(report: Report) -> Any:
    model, optimizer, loader = elastic.prepare(*parts())
    steps = 0
    for _ in elastic.epochs(0, EPOCHS):
        for x, y in loader:
            steps += 1
            weight = min(1.0, steps / 20)  # annealed
            loss = step(model, optimizer, x, y, weight * sum(p.square().sum() for p in model.parameters()))
        report(loss=loss)
    return model.state_dict()


def optimizer_made_anew(report: Report) -> Any:
    model, optimizer, loader = elastic.prepare(*parts())
    for epoch in elastic.epochs(0, EPOCHS):
        if epoch == 3:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for x, y in loader:
            loss = step(model, optimizer, x, y)
        report(loss=loss)
    return model.state_dict()


def patience(report: Report) -> Any:
    model, optimizer, loader = elastic.prepare(*parts(0.5))
    best, bad, kept = float("inf"), 0, copy.deepcopy(model.state_dict())
    for _ in elastic.epochs(0, EPOCHS):
        loss = sum(step(model, optimizer, x, y) for x, y in loader)
        if loss < best:
            best, bad, kept = loss, 0, copy.deepcopy(model.state_dict())
        else:
            bad += 1
        if bad == 2:
            bad = 0
            model.load_state_dict(kept)
            optimizer.param_groups[0]["lr"] /= 2
        report(loss=loss, best=best)
    return model.state_dict()


#: Each of the three, with what the line names.
INCOMPLETE = [
    (own_counter, "steps"),
    (optimizer_made_anew, "the optimizer"),
    (patience, "best"),
]


# -- all prepared --


def momentum(report: Report) -> Any:
    model, optimizer, loader = elastic.prepare(*parts())
    for _ in elastic.epochs(0, EPOCHS):
        report(loss=sum(step(model, optimizer, x, y) for x, y in loader))
    return model.state_dict()


def counters_in_state(report: Report) -> Any:
    """And gradients, of two of three batches when an epoch ends; and a parameter that belongs to no module."""
    (model, optimizer, loader), shift = parts(), nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [shift]})
    elastic.prepare(model, optimizer, loader)
    progress = elastic.state(steps=0, best=float("inf"), history=[])
    for _ in elastic.epochs(0, EPOCHS):
        total = 0.0
        for x, y in loader:
            progress.steps += 1
            loss = nn.functional.mse_loss(model(x) + shift, y) / 2
            loss = loss + min(1.0, progress.steps / 20) * model[0].weight.square().sum()
            loss.backward()
            total += loss.item()
            if progress.steps % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
        progress.best = min(total, progress.best)
        progress.history.append(total)
        report(loss=total, best=progress.best, mean=sum(progress.history) / len(progress.history))
    return model.state_dict()


def draws_of_all_kinds(report: Report) -> Any:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, amsgrad=True)
    loader = DataLoader(data(), 8, shuffle=True, generator=torch.Generator().manual_seed(3))
    views, own = list(model.parameters()), numpy.random.default_rng(1)  # the views stand for what was prepared
    elastic.prepare(model, optimizer, loader, own)
    for _ in elastic.epochs(0, EPOCHS):
        loss = 0.0
        for x, y in loader:
            noise = torch.from_numpy(numpy.random.normal(size=x.shape) * own.random() * random.random()).float()
            loss += step(model, optimizer, x + noise, y)
        norm = sum(view.norm().item() for view in views)
        report(loss=loss, draw=torch.rand(()).item(), norm=norm, nan=float("nan"))
    return model.state_dict()


def weighted_sampler(report: Report) -> Any:
    model, optimizer, _ = parts()
    sampler = WeightedRandomSampler(torch.ones(24), 24)
    loader = DataLoader(data(), 8, sampler=sampler)
    elastic.prepare(model, optimizer, loader)
    x, y = data().tensors
    for _ in elastic.epochs(0, EPOCHS):
        loss = sum(step(model, optimizer, *batch) for batch in loader)
        with torch.no_grad():
            sampler.weights = sampler.weights * 0.5 + (model(x) - y).abs().flatten()
        report(loss=loss)
    return model.state_dict()


def two_phases(report: Report) -> Any:
    model, optimizer, loader = elastic.prepare(*parts())
    for _ in elastic.epochs(0, 4):
        report(loss=sum(step(model, optimizer, x, y) for x, y in loader))
    for _ in elastic.epochs(0, EPOCHS - 4):
        report(loss=sum(step(model, optimizer, x, -y) for x, y in loader))
    return model.state_dict()


def reports_twice(report: Report) -> Any:
    """With times, of which none is twice the same; and the loader's processes persist."""
    model, optimizer, loader = elastic.prepare(*parts(num_workers=1, persistent_workers=True))
    for _ in elastic.epochs(0, EPOCHS):
        report(loss=sum(step(model, optimizer, x, y) for x, y in loader), epoch_s=numpy.random.bytes(4).hex())
        report(norm=sum(p.norm().item() for p in model.parameters()), trainTime=id(object()), samples_per_second=id([]))
    return model.state_dict()


WHOLE = [momentum, counters_in_state, draws_of_all_kinds, weighted_sampler, two_phases, reports_twice]
