"""Loops with something that `elastic.prepare` did not get, or that a divided batch changes: for `test_hidden_state`.

All in double precision. A loop's name in `LOOPS` says what it keeps for itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from fluidtune import elastic

Report = Callable[[float], None]
SAMPLES, BATCH = 40, 5


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x.sum(1, keepdim=True) > 0).double() + 0.1 * x[:, :1], torch.arange(SAMPLES))


class Run:
    """What a loop has. ``config["samples"]``: it counts its samples by `elastic.samples`, else by ``len``."""

    def __init__(self, config: dict[str, Any], loader: DataLoader | None = None, *more: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        loader = loader or DataLoader(data(), batch_size=BATCH, shuffle=True)
        self.model, self.optimizer, self.loader, *_ = elastic.prepare(self.model, self.optimizer, loader, *more)
        self.samples = elastic.samples if config.get("samples", True) else int
        self.stop = config["stop"]
        self.step = 0  # from 0, over all turns

    def loss(self, x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.model(x), y)

    def train(
        self,
        report: Report,
        loss_of: Callable[..., torch.Tensor] | None = None,
        after: Callable[[torch.Tensor], Any] = lambda loss: None,
        batches: Callable[[Any], Any] = iter,
    ) -> Any:
        """``loss_of``: of a batch. ``after``: called after each step. ``batches``: of the loader, those of a turn."""
        for turn in elastic.epochs(0, self.stop):
            total, count = 0.0, 0
            for i, batch in enumerate(batches(self.loader)):
                self.step = turn * len(self.loader) + i
                self.optimizer.zero_grad()
                loss = (loss_of or self.loss)(*batch)
                loss.backward()
                self.optimizer.step()
                n = self.samples(len(batch[0]))
                total, count = total + loss.item() * n, count + n
                after(loss)
            report(elastic.mean(total, count))
        return self.model.state_dict()


def counter(config: dict[str, Any], report: Report, prepared: bool = False) -> Any:
    """The weight of a penalty follows a counter of steps, as the annealing of a KL term does."""
    progress = elastic.state(steps=0) if prepared else SimpleNamespace(steps=0)
    run = Run(config)

    def loss_of(x: torch.Tensor, y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        progress.steps += 1
        out = run.model(x)
        return F.mse_loss(out, y) + min(1.0, progress.steps / 60) * out.square().mean()

    return run.train(report, loss_of)


def choice(draw: Callable[[], float], *prepared: Any) -> Callable[[dict[str, Any], Report], Any]:
    """One random choice a batch, before and after the model."""

    def loop(config: dict[str, Any], report: Report) -> Any:
        run = Run(config, None, *prepared)

        def loss_of(x: torch.Tensor, y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            if draw() < 0.5:
                x = x.flip(1)
            out = run.model(x)
            loss = F.mse_loss(out, y)
            return loss + out.abs().mean() if draw() < 0.5 else loss

        return run.train(report, loss_of)

    return loop


def own_choice(kind: str) -> Callable[[dict[str, Any], Report], Any]:
    """One choice a batch from a generator of the loop's own, which it prepares."""

    def loop(config: dict[str, Any], report: Report) -> Any:
        if kind == "numpy":
            generator: Any = numpy.random.default_rng(3)
            return choice(generator.random, generator)(config, report)
        generator = torch.Generator().manual_seed(3)
        return choice(lambda: torch.rand((), generator=generator).item(), generator)(config, report)

    return loop


def sampler(config: dict[str, Any], report: Report) -> Any:
    """After each step the sampler's weights follow the losses that this worker saw."""
    weights = WeightedRandomSampler(torch.ones(SAMPLES, dtype=torch.float64), SAMPLES)
    run = Run(config, DataLoader(data(), batch_size=BATCH, sampler=weights))

    def loss_of(x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        losses = (run.model(x) - y).square().squeeze(1)
        weights.weights[index] = losses.detach() + 0.1
        return losses.mean()

    return run.train(report, loss_of)


def slow_weights(config: dict[str, Any], report: Report, every: int = 5) -> Any:
    """Every few steps the weights go half the way back to slow ones, which are in a list."""
    run = Run(config)
    slow = [p.detach().clone() for p in run.model.parameters()]

    @torch.no_grad()
    def after(_: torch.Tensor) -> None:
        if run.step % every == every - 1:
            for kept, p in zip(slow, run.model.parameters(), strict=True):
                kept.lerp_(p, 0.5)
                p.copy_(kept)

    return run.train(report, after=after)


class Heavy(torch.optim.Optimizer):
    """Momentum that is not in ``state``."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.velocity: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                velocity = self.velocity.get(p, torch.zeros_like(p)) * 0.9 + p.grad
                self.velocity[p] = velocity
                p -= group["lr"] * velocity


def outside_state(config: dict[str, Any], report: Report) -> Any:
    run = Run(config)
    run.optimizer = elastic.prepare(Heavy(run.model.parameters(), 0.02))
    return run.train(report)


def plateau(config: dict[str, Any], report: Report) -> Any:
    """A scheduler that gets the loss of each batch."""
    run = Run(config)
    scheduler = elastic.prepare(torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer, factor=0.7, patience=2))
    return run.train(report, after=lambda loss: scheduler.step(loss.item()))


def renormalising(config: dict[str, Any], report: Report) -> Any:
    """A layer that writes its weights while it is read."""
    run = Run(config)
    words = elastic.prepare(nn.Embedding(SAMPLES, 6, max_norm=0.5).double())
    optimizer = elastic.prepare(torch.optim.SGD(words.parameters(), lr=0.05))

    def loss_of(x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        return F.mse_loss(run.model(x + words(index)), y)

    return run.train(report, loss_of, after=lambda _: optimizer.step())


def running_mean(config: dict[str, Any], report: Report) -> Any:
    """A mean of outputs, kept by hand, that the loss is relative to."""
    run, kept = Run(config), SimpleNamespace(mean=torch.zeros((), dtype=torch.float64))

    def loss_of(x: torch.Tensor, y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        out = run.model(x)
        kept.mean = 0.9 * kept.mean + 0.1 * out.detach().mean()
        return F.mse_loss(out - kept.mean, y)

    return run.train(report, loss_of)


def sliced(config: dict[str, Any], report: Report) -> Any:
    """Nobody draws the end of its iterator."""
    return Run(config).train(report, batches=lambda loader: islice(loader, len(loader)))


LOOPS: dict[str, Callable[[dict[str, Any], Report], Any]] = {
    "a counter": counter,
    "a prepared counter": partial(counter, prepared=True),
    "a choice of Python's": choice(random.random),
    "a choice of torch's": choice(lambda: torch.rand(()).item()),
    "a choice of its own numpy generator": own_choice("numpy"),
    "a choice of its own torch generator": own_choice("torch"),
    "a sampler that learns": sampler,
    "slow weights in a list": slow_weights,
    "slow weights, later": partial(slow_weights, every=7),
    "an optimizer with state outside": outside_state,
    "a plateau scheduler a batch": plateau,
    "an embedding with max_norm": renormalising,
    "a running mean": running_mean,
    "a slice of a loader": sliced,
}
#: Those that a rehearsal refuses, before a worker joins.
REHEARSED = {
    "a plateau scheduler a batch": "ReduceLROnPlateau",
    "an embedding with max_norm": "max_norm",
    "a running mean": "the gradient of",
}
#: Those of them that nothing else finds before it has changed a result.
ONLY_REHEARSED = ("a plateau scheduler a batch", "an embedding with max_norm")
#: Those that go on with one worker, and the line that says why.
REFUSED = {
    "a counter": "a new worker does not compute what the leader does: its gradient of",
    "a sampler that learns": "the sampler of DataLoader 0",
    "slow weights in a list": "a new worker does not compute what the leader does",
    "slow weights, later": "a new worker does not compute what the leader does",
    "an optimizer with state outside": "a new worker does not compute what the leader does: its gradient of",
    "a running mean": "a new worker does not compute what the leader does: its gradient of",
}


def named(config: dict[str, Any], report: Report) -> Any:
    """The loop of this name."""
    return LOOPS[config["loop"]](config, report)
