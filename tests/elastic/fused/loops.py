"""Small models and the loop that trains one of them: what is run as one of several, and alone."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional as F

from fluidtune.elastic.fused import FusedTrial, FusedTrials, current_trial
from fluidtune.elastic.random_streams import Streams, capture_streams, restore_streams

SAMPLES, BATCH = 40, 16
INPUTS = torch.randn(SAMPLES, 8, 8, generator=torch.Generator().manual_seed(5))
LABELS = torch.randint(0, 4, (SAMPLES,), generator=torch.Generator().manual_seed(6))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.GRU, **options: Any) -> None:
        super().__init__()
        self.layer = kind(8, 6, 2, batch_first=True, **options)
        self.head = nn.Linear(6 * (2 if options.get("bidirectional") else 1), 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Attentive(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.place = nn.Parameter(torch.randn(8, 8) * 0.1)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x + self.place).mean(1))


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


def perceptron(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4))


def convolution(dropout: float = 0.1) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout2d(dropout),
        nn.Conv2d(4, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(24, 4),
    )


MODELS: dict[str, Callable[..., nn.Module]] = {
    "perceptron": perceptron,
    "convolution": convolution,
    "recurrent": lambda dropout=0.1: Recurrent(nn.GRU, dropout=dropout),
    "transformer": Attentive,
}

OPTIMIZERS: dict[str, Callable[[Any, int], torch.optim.Optimizer]] = {
    "sgd": lambda p, i: torch.optim.SGD(p, lr=0.01 * (i + 1)),
    "momentum": lambda p, i: torch.optim.SGD(p, lr=0.01, momentum=0.5 + 0.1 * i, weight_decay=1e-3 * (i + 1)),
    "nesterov": lambda p, i: torch.optim.SGD(p, lr=0.01, momentum=0.5 + 0.1 * i, nesterov=True),
    "adam": lambda p, i: torch.optim.Adam(p, lr=1e-3 * (i + 1), betas=(0.9 - 0.1 * i, 0.999), amsgrad=True),
    "adamw": lambda p, i: torch.optim.AdamW(p, lr=1e-3 * (i + 1), weight_decay=0.01 * (i + 1)),
    "rmsprop": lambda p, i: torch.optim.RMSprop(p, lr=1e-3 * (i + 1)),
    "two groups": lambda p, i: torch.optim.SGD([{"params": p[:1], "lr": 0.03}, {"params": p[1:]}], lr=0.01 * (i + 1)),
}


class Broken(Exception):
    """A loop's own error."""


class Stopped(BaseException):
    """What a report raises in a loop that is to end."""


@dataclass
class Position:
    """Where a loop is. ``batches``: those of its epoch that are still to come."""

    epoch: int = 0
    iteration: int = 0
    batches: list[torch.Tensor] = field(default_factory=list)
    noise: float = 0.0
    losses: list[float] = field(default_factory=list)


@dataclass(eq=False)
class Saved:
    """What a loop that is paused leaves behind, with which another one goes on."""

    at: Position
    model: dict[str, Any]
    optimizer: dict[str, Any]
    streams: Streams


@dataclass
class Plan:
    """What one trial's loop does. ``raises``, ``ends`` and the like: before which iteration, counted from 0."""

    number: int = 0
    model: str | Callable[..., nn.Module] = "perceptron"
    optimizer: str = "sgd"
    epochs: int = 2
    batch: int = BATCH
    raises: int | None = None
    ends: int | None = None
    #: A report says there that the trial is to end.
    stops: int | None = None
    #: It leaves a `Saved` and ends; ``again`` is called with it.
    pauses: int | None = None
    #: It takes over the weights and the optimizer's state of ``donor``, and another learning rate.
    exploits: int | None = None
    donor: Saved | None = None
    again: Callable[[Saved], None] | None = None
    dropout: float = 0.0
    step: Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor], float] | None = None
    #: Called before each iteration with its number.
    before: Callable[[int, nn.Module], None] | None = None
    kept: dict[str, Any] = field(default_factory=dict)


def train(plan: Plan, saved: Saved | None = None) -> dict[str, Any] | Saved:
    """Train as people do, from ``saved`` on; returns `_ending`, or a `Saved` if it is paused."""
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(plan.number)
    make = MODELS[plan.model] if isinstance(plan.model, str) else plan.model
    model = make(plan.dropout) if isinstance(plan.model, str) else make()
    optimizer = OPTIMIZERS[plan.optimizer](list(model.parameters()), plan.number)
    trial = current_trial()
    if trial is not None:
        trial.prepare(model, optimizer)
    at = Position()
    if saved is not None:
        at = copy.deepcopy(saved.at)
        model.load_state_dict(saved.model)
        optimizer.load_state_dict(copy.deepcopy(saved.optimizer))
        restore_streams(saved.streams)
    try:
        while at.epoch < plan.epochs:
            model.train()
            if not at.batches:
                at.noise = random.random() + numpy.random.randn()
                at.batches = list(torch.randperm(SAMPLES).split(plan.batch))
            while at.batches:
                if at.iteration == plan.ends:
                    return _ending(model, optimizer, at.losses)
                if at.iteration == plan.raises:
                    raise Broken(str(at.iteration))
                if at.iteration == plan.stops:
                    with nullcontext() if trial is None else trial.apart():
                        raise Stopped(str(at.iteration))
                if at.iteration == plan.pauses and saved is None:
                    return _paused(plan, at, model, optimizer)
                if at.iteration == plan.exploits and plan.donor is not None:
                    model.load_state_dict(plan.donor.model)
                    optimizer.load_state_dict(copy.deepcopy(plan.donor.optimizer))
                    for group in optimizer.param_groups:
                        group["lr"] *= 0.7
                if plan.before is not None:
                    plan.before(at.iteration, model)
                chosen = at.batches.pop(0)
                x, y = INPUTS[chosen] + 1e-3 * at.noise, LABELS[chosen]
                at.losses.append((plan.step or plain)(model, optimizer, x, y))
                at.iteration += 1
            model.eval()
            with torch.no_grad():
                at.losses.append(F.cross_entropy(model(INPUTS), LABELS).item())
            at.epoch += 1
        return _ending(model, optimizer, at.losses)
    finally:
        plan.kept.update(model=model, optimizer=optimizer, losses=at.losses)


def _paused(plan: Plan, at: Position, model: nn.Module, optimizer: torch.optim.Optimizer) -> Saved:
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    left = Saved(copy.deepcopy(at), weights, copy.deepcopy(optimizer.state_dict()), capture_streams())
    if plan.again is not None:
        plan.again(left)
    return left


def alone(plan: Plan) -> dict[str, Any] | BaseException:
    """What the trial is alone, to its end: what it returns or raises. `Plan.kept` has its losses."""
    try:
        value = train(plan)
        ended = train(plan, value) if isinstance(value, Saved) else value
        assert not isinstance(ended, Saved)
        return ended
    except (Exception, Stopped) as error:
        return error


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def _ending(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]) -> dict[str, Any]:
    return {
        "losses": losses,
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": [
            {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
            for state in optimizer.state_dict()["state"].values()
        ],
        "drawn": (random.random(), numpy.random.randn(), torch.rand(2)),
    }


def together(plans: list[Plan]) -> list[FusedTrial]:
    """Train these at once; fails if a loop does not end."""
    trials, all_there = FusedTrials(), threading.Event()
    trials.start("gate", all_there.wait)  # keeps the baton, so that they begin together
    started = [trials.start(str(plan.number), train, plan) for plan in plans]
    all_there.set()
    assert all(trial.join(60) for trial in started)
    trials.join()
    return started


def same(ours: Any, alone: Any) -> None:
    """As the issue wants it: 1e-4 relative. Absolute for what is near 0."""
    torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-5)


def compare(plans: list[Plan], *, fused: bool = True) -> list[FusedTrial]:
    """AssertionError unless each trial of these is what it is alone."""
    of_each = [alone(plan) for plan in plans]
    trials = together(plans)
    for trial, expected in zip(trials, of_each, strict=True):
        if isinstance(expected, BaseException):
            assert repr(trial.error) == repr(expected)
            continue
        if trial.error is not None:
            raise trial.error
        same(trial.value, expected)
        assert not fused or trial.reasons == [], trial.reasons
    return trials
