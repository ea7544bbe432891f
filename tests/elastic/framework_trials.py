"""Trials whose loop is owned by a framework: it calls `elastic.boundary`, and asks what it needs to know."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from fluidtune import elastic

from .trials import Report, data


def owned(config: dict[str, Any], report: Report) -> dict[str, Any]:
    """`trials.mlp`, by a framework that ends its loop early where all agree to. Returns its weights, and the epochs."""
    torch.manual_seed(config.get("seed", 1))
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(data(51), batch_size=16, shuffle=True)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader)
    ran, stop = [], config.get("stop", 4)
    for loop in range(config.get("loops", 1)):
        epoch: int | None = 0
        while epoch is not None and epoch < stop and not (config.get("early") and epoch == config["early"]):
            epoch = elastic.boundary(epoch, stop)
            if epoch is None or epoch >= stop:
                break
            total, count = 0.0, 0
            for x, y in loader:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                n = elastic.samples(len(x))
                total, count = total + loss.item() * n, count + n
            ran.append((loop, epoch, elastic.width()))
            report(elastic.mean(total, count))
            epoch += 1
        else:
            if epoch is not None:
                elastic.boundary(epoch, epoch)
    return {**model.state_dict(), "ran": ran}


def inside(config: dict[str, Any], report: Report) -> None:
    """A framework's loop inside `elastic.epochs`."""
    elastic.prepare(nn.Linear(6, 1))
    for _ in elastic.epochs(0, config["stop"]):
        for epoch in range(2):
            assert elastic.boundary(epoch, 2) == epoch
        report(0.0)


def refusing(config: dict[str, Any], report: Report) -> None:
    """Finds in epoch ``at`` that it must have one worker."""
    model, loader = elastic.prepare(nn.Linear(6, 1), DataLoader(data(32), batch_size=8))
    epoch = -1
    while epoch + 1 < config["stop"]:
        reached = elastic.boundary(epoch + 1, config["stop"])
        assert reached is not None
        epoch = reached
        if epoch == config["at"]:
            elastic.one_worker("its layers are on several devices")
        for x, y in loader:
            nn.functional.mse_loss(model(x), y).backward()
        report(0.0)


def ahead(config: dict[str, Any], report: Report) -> dict[str, Any]:
    """Fetches two batches before it computes with the first, of 8 and 3 samples at last.

    Its loss is a sum over the items of both, of which samples have 1 to 3, as Hugging Face's Trainer counts tokens.
    """
    torch.manual_seed(config.get("seed", 1))
    model = nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(data(59), batch_size=8, shuffle=True)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader)
    divided = []
    epoch: int | None = 0
    while epoch is not None and epoch < config.get("stop", 4):
        epoch = elastic.boundary(epoch, config.get("stop", 4))
        if epoch is None:
            break
        total = 0.0
        batches = elastic.parts(loader)
        while both := list(islice(batches, 2)):
            divided += [part is not None and part.weight < 1.0 for _, part in both]
            rows = [x for (x, _), part in both if part is None or part.weight]
            items = float(elastic.reduce(torch.tensor(sum(float(counts(x).sum()) for x in rows), dtype=torch.float64)))
            for (x, y), part in both:
                elastic.work_on(part)
                loss = (counts(x) * nn.functional.mse_loss(model(x), y, reduction="none")).sum() / items
                weight = part.weight if part is not None else 1.0
                (loss / (weight or 1.0)).backward()
                total += float(elastic.reduce(loss.double() if weight else torch.zeros((), dtype=torch.float64)))
            optimizer.step()
            optimizer.zero_grad()
        report(total)
        epoch += 1
    elastic.boundary(config.get("stop", 4), config.get("stop", 4))
    return {**model.state_dict(), "divided": divided}


def counts(x: torch.Tensor) -> torch.Tensor:
    """The items of each sample: 1 to 3."""
    return 1.0 + (x[:, :1] > 0) + (x[:, 1:2] > 0)


def everything() -> dict[str, Any]:
    """What each of the functions gives, from numbers that depend on the rank."""
    rank = elastic.rank()
    two = torch.tensor([[1.0, -2.0]]) * (rank + 1)
    own = two.clone()
    gives = {
        "rank": rank,
        "width": elastic.width(),
        "reduced": {op: elastic.reduce(two, op).tolist() for op in ("sum", "mean", "min", "max")},
        "integers": [elastic.reduce(torch.tensor(rank + 1), op) for op in ("sum", "mean", "max")],
        "gathered": elastic.gather(two.bfloat16()).tolist(),
        "flags": elastic.gather(torch.tensor([rank == 0, True])).tolist(),
        "columns": elastic.gather(torch.arange(6).reshape(2, 3).t() + rank).tolist(),
        "heard": elastic.broadcast({"from": rank}),
        "agreed": [elastic.agreed(wish, by) for wish in (rank == 0, True, False) for by in ("all", "any")],
        "scalar": elastic.reduce(torch.tensor(2.0, requires_grad=True)).requires_grad,
    }
    elastic.barrier()
    assert torch.equal(two, own), "an argument was changed"
    return gives
