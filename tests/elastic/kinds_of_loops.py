"""Training loops as people write them, put together from parts: what `test_kinds_of_loops` mixes.

Each part is a *kind*; a `Mix` names one kind for each of its fields. All is in double precision, so that the order of a
sum cannot be seen in a result.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim import lr_scheduler as lrs
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler, TensorDataset, random_split

from fluidtune import elastic

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Mix:
    model: str = "mlp"
    optimizer: str = "sgd"
    schedule: str = "none"
    data: str = "ragged"
    step: str = "plain"
    extra: str = "nothing"


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- models: 6 numbers to one --


class Net(nn.Module):
    """``front`` to 8 numbers, ``head`` to one."""

    def __init__(self, *front: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.front = nn.Sequential(*front)
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.front(x))


class Tied(nn.Module):
    """One layer is used twice, its weight a third time, and another one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)
        self.outer = nn.Linear(6, 6, bias=False)
        self.outer.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(self.inner(x)))).sum(1, keepdim=True)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(2, 5, batch_first=True), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x.view(len(x), 3, 2))[0][:, -1])


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x.view(len(x), 3, 2)).sum((1, 2)).unsqueeze(1)


class Routed(nn.Module):
    """Samples go through one of two layers; a share may have none for one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, out = x[:, 0] < 0, torch.zeros(len(x), 1, dtype=x.dtype)
        for part, chosen in ((self.low, low), (self.high, ~low)):
            if chosen.any():
                out = out.masked_scatter(chosen.unsqueeze(1), part(x[chosen]))
        return out


class Convolved(nn.Module):
    """Channels last: optimizers with kernels of their own pair numbers by their place in memory."""

    def __init__(self) -> None:
        super().__init__()
        middle = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 2)
        self.front, self.parts = nn.Linear(6, 48), nn.Sequential(*middle)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.front(x).view(-1, 3, 4, 4).to(memory_format=torch.channels_last)
        return self.parts(image).mean((1, 2, 3)).unsqueeze(1)


class Speaking(nn.Module):
    """The words' weights are those that score them, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.scores = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
        self.scores.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = self.words((x[:, :4].abs() * 3).long().clamp(max=8)).mean(1)
        return self.scores(torch.tanh(self.inner(words))).square().mean(1, keepdim=True)


def frozen() -> nn.Module:
    model = Net(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh())
    for p in model.front.parameters():
        p.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: Net(nn.Linear(6, 8), nn.Tanh()),
    "batch norm": lambda: Net(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU()),
    "image": lambda: Net(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.Flatten()),
    "layer norm": lambda: Net(nn.Linear(6, 8), nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.GELU()),
    "dropout": lambda: Net(nn.Linear(6, 8), nn.Dropout(0.0), nn.Tanh()),
    "tied": Tied,
    "frozen": frozen,
    "recurrent": Recurrent,
    "attention": Attentive,
    "routed": Routed,
    "parametrised": lambda: Net(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh()),
    "spectral": lambda: Net(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Tanh()),
    "channels last": Convolved,
    "words": Speaking,
}

# -- optimizers and schedules --

OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "two groups": lambda p: torch.optim.SGD([{"params": p[:1], "lr": 0.01}, {"params": p[1:]}], lr=0.05),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    # It decides by the loss that its closure returns, which is a worker's.
    "line search": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4, line_search_fn="strong_wolfe"),
    "rate in a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
}

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda o: None,
    "by epoch": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o, 0.3, 1.0, 2), lrs.StepLR(o, 1, 0.5)], [2]),
    "cosine": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "lambda": lambda o: lrs.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "by step": lambda o: lrs.OneCycleLR(o, 0.05, total_steps=40, cycle_momentum=False),
    "lr by hand": lambda o: None,
}

# -- data --


class Samples(Dataset):
    """``n`` samples; the label depends on the sample."""

    def __init__(self, n: int, seed: int = 0) -> None:
        self.x = torch.randn(n, 6, generator=seeded(seed), dtype=torch.float64)
        self.y = (self.x.sum(1, keepdim=True) > 0).double() + 0.1 * self.x[:, :1]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Batch:
        return self.x[index], self.y[index]


class Augmented(Samples):
    """Draws for each sample; what it draws does not matter."""

    def __getitem__(self, index: int) -> Batch:
        return self.x[index] + 0.0 * torch.randn(6, dtype=torch.float64), self.y[index]


DATA: dict[str, Callable[[], DataLoader]] = {
    "ragged": lambda: DataLoader(Samples(27), batch_size=8, shuffle=True),
    "drop last": lambda: DataLoader(Samples(27), batch_size=8, shuffle=True, drop_last=True),
    "one by one": lambda: DataLoader(Samples(5), shuffle=True),
    "fewer than workers": lambda: DataLoader(Samples(8), batch_size=2, shuffle=True),
    "own generator": lambda: DataLoader(Samples(27), batch_size=8, shuffle=True, generator=seeded(3)),
    "sampler with generator": lambda: DataLoader(
        Samples(19), batch_size=6, sampler=RandomSampler(range(19), generator=seeded(4))
    ),
    "buckets": lambda: DataLoader(Samples(20), batch_sampler=[[0, 1, 2], [3, 4, 5, 6, 7], [8, 9]]),
    "unseeded split": lambda: DataLoader(random_split(Samples(27), [20, 7])[0], batch_size=6, shuffle=True),
    "augmented": lambda: DataLoader(Augmented(27), batch_size=8, shuffle=True, generator=seeded(3)),
    "processes": lambda: DataLoader(Samples(27), batch_size=8, shuffle=True, num_workers=2, persistent_workers=True),
    "processes of a turn": lambda: DataLoader(Augmented(19), batch_size=8, num_workers=2, generator=seeded(3)),
    "tensors": lambda: DataLoader(
        TensorDataset(*vars(Samples(27)).values()), batch_size=8, sampler=SequentialSampler(range(27))
    ),
}


# -- the loop --


@dataclass
class Run:
    """What a loop has at hand; ``total`` and ``count`` are of the turn, ``steps`` are of the trial."""

    mix: Mix
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    loader: Any
    other: Any
    scaler: torch.amp.GradScaler
    more: dict[str, Any] = field(default_factory=dict)
    total: float = 0.0
    count: int = 0
    epoch: int = 0

    def batches(self, loader: Any = None) -> Iterator[Batch]:
        for batch in self.loader if loader is None else loader:
            yield tuple(batch)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(self.model(x), y)
        n = elastic.samples(len(x))
        self.total, self.count = self.total + loss.item() * n, self.count + n
        return loss

    def step(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.stepped()

    def stepped(self) -> None:
        self.optimizer.step()
        if self.mix.schedule == "by step":
            self.scheduler.step()


def plain(run: Run) -> None:
    for x, y in run.batches():
        run.step(run.loss(x, y))


def clip_norm(run: Run) -> None:
    for x, y in run.batches():
        run.optimizer.zero_grad()
        run.loss(x, y).backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.2)
        run.stepped()


def clip_value(run: Run) -> None:
    for x, y in run.batches():
        run.optimizer.zero_grad()
        run.loss(x, y).backward()
        nn.utils.clip_grad_value_(run.model.parameters(), 0.05)
        run.stepped()


def scaled(run: Run) -> None:
    for x, y in run.batches():
        run.optimizer.zero_grad()
        run.scaler.scale(run.loss(x, y)).backward()
        run.scaler.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.2)
        run.scaler.step(run.optimizer)
        run.scaler.update()


def closure(run: Run) -> None:
    for x, y in run.batches():

        def again(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            run.optimizer.zero_grad()
            loss = F.mse_loss(run.model(x), y)
            loss.backward()
            return loss

        run.loss(x, y)
        run.optimizer.step(again)


def penalty(run: Run) -> None:
    for x, y in run.batches():
        x = x.clone().requires_grad_(True)
        loss = run.loss(x, y)
        (slope,) = torch.autograd.grad(run.model(x).sum(), x, create_graph=True)
        run.step(loss + 0.1 * (slope.norm(dim=1) - 1).square().mean())


def two_passes(run: Run) -> None:
    for x, y in run.batches():
        run.optimizer.zero_grad()
        out = run.model(x)
        F.mse_loss(out, y).backward(retain_graph=True)
        (0.1 * out.abs().mean()).backward()
        run.stepped()
        run.loss(x, y)


def regularised(run: Run) -> None:
    for x, y in run.batches():
        run.step(run.loss(x, y) + 1e-2 * sum(p.square().sum() + p.abs().sum() for p in run.model.parameters()))


def recomputed(run: Run) -> None:
    for i, (x, y) in enumerate(run.batches()):
        x = x.clone().requires_grad_(True)
        run.step(F.mse_loss(checkpoint(run.model, x, use_reentrant=bool(i % 2)), y))
        run.loss(x, y)


def by_gradient(run: Run) -> None:
    """Its own update from the gradients that backward() has accumulated."""
    for x, y in run.batches():
        run.model.zero_grad()
        run.loss(x, y).backward()
        with torch.no_grad():
            for p in run.model.parameters():
                if p.grad is not None:
                    p -= 0.03 * p.grad


def adversarial(run: Run) -> None:
    maker, judge, optimizer = run.more["maker"], run.model, run.more["optimizer"]
    for x, y in run.batches():
        made = maker(x.flip(1))
        run.step(run.loss(x, y) + judge(made.detach()).square().mean())
        optimizer.zero_grad()
        (1 - judge(made)).square().mean().backward()
        optimizer.step()


def prefetching(run: Run) -> None:
    batches = run.batches()
    coming = next(batches, None)
    while coming is not None:
        now, coming = coming, next(batches, None)
        run.step(run.loss(*now))


def summed(run: Run) -> None:
    batches = list(run.batches())
    run.step(sum(run.loss(x, y) for x, y in batches) / len(batches))


def in_step(run: Run) -> None:
    for (x, y), (a, _) in zip(run.batches(), run.batches(run.other), strict=False):
        run.step(run.loss(x, y) + 0.1 * run.model(a).square().mean())


def in_a_cycle(run: Run) -> None:
    for (x, y), (a, _) in zip(run.batches(), cycle(run.batches(run.other)), strict=False):
        run.step(run.loss(x, y) + 0.1 * run.model(a).square().mean())


def alternating(run: Run) -> None:
    plain(run)
    for x, _ in run.batches(run.other):
        run.step(0.1 * run.model(x).square().mean())


def left_early(run: Run) -> None:
    for i, (x, y) in enumerate(run.batches()):
        run.step(run.loss(x, y))
        if i == 1:
            break


def twice(run: Run) -> None:
    plain(run)
    plain(run)


def short_batches_left_out(run: Run) -> None:
    for x, y in run.batches():
        if len(x) < 2:
            continue
        run.step(run.loss(x, y))


def short_batches_end_the_turn(run: Run) -> None:
    """As before a recurrent network whose hidden state has the shape of a whole batch."""
    for x, y in run.batches():
        if len(x) != run.loader.batch_size:
            break
        run.step(run.loss(x, y))


def evaluated(run: Run) -> None:
    """An evaluation in the middle, as it should be written, and one at the end, as people write it."""
    for i, (x, y) in enumerate(run.batches()):
        run.step(run.loss(x, y))
        if i == 1:
            run.model.eval()
            with torch.no_grad():
                for a, b in run.batches(run.other):
                    run.loss(a, b)
            run.model.train()
    for a, b in run.batches(run.other):
        with torch.no_grad():
            run.loss(a, b)


def frozen_statistics(run: Run) -> None:
    run.model.eval()
    plain(run)
    run.model.train()


STEPS: dict[str, Callable[[Run], None]] = {
    step.__name__.replace("_", " "): step
    for step in (
        plain,
        clip_norm,
        clip_value,
        scaled,
        closure,
        penalty,
        two_passes,
        regularised,
        recomputed,
        by_gradient,
        adversarial,
        prefetching,
        summed,
        in_step,
        in_a_cycle,
        alternating,
        left_early,
        twice,
        short_batches_left_out,
        short_batches_end_the_turn,
        evaluated,
        frozen_statistics,
    )
}

EXTRAS = (
    "nothing",
    "best model kept",
    "stops early",
    "learns from the second turn on",
    "group added",
    "warm-up by its own count",
    "saves its weights",
    "saves its model",
    "writes a history",
    "prunes its weights",
)


def trial(config: dict[str, Any], report: Callable[[float], None]) -> dict[str, Any]:
    """``config``: "mix", "stop" and "folder". Returns "model", its weights, and the leader's "own"."""
    mix: Mix = config["mix"]
    model = MODELS[mix.model]().double()
    if mix.extra == "learns from the second turn on":
        next(model.parameters()).requires_grad_(False)
    if mix.extra == "prunes its weights":
        prune.l1_unstructured(model.head, "weight", amount=0.1)
    known = list(model.parameters())
    optimizer = OPTIMIZERS[mix.optimizer](known[:-1] if mix.extra == "group added" else known)
    scheduler = SCHEDULES[mix.schedule](optimizer)
    run = Run(mix, model, optimizer, scheduler, DATA[mix.data](), None, torch.amp.GradScaler("cpu", init_scale=8.0))
    run.model, run.optimizer, run.loader, run.other = elastic.prepare(
        model, optimizer, run.loader, DataLoader(Samples(16, 2), batch_size=8)
    )
    elastic.prepare(run.scaler, *([] if scheduler is None else [scheduler]))
    if mix.step == "adversarial":
        maker = nn.Linear(6, 6).double()
        run.more["maker"], run.more["optimizer"] = elastic.prepare(maker, torch.optim.Adam(maker.parameters(), lr=0.01))
    for epoch in elastic.epochs(0, config["stop"]):
        run.epoch, run.total, run.count = epoch, 0.0, 0
        _before_turn(run)
        STEPS[mix.step](run)
        loss = elastic.mean(run.total, run.count)
        _after_turn(run, loss, config["folder"])
        report(loss)
        if mix.extra == "stops early" and epoch == config["stop"] - 2:
            break
    own = {name: part.state_dict() for name, part in run.more.items() if hasattr(part, "state_dict")}
    return {"model": dict(model.state_dict()), "own": own}


def _before_turn(run: Run) -> None:
    mix, epoch, optimizer = run.mix, run.epoch, run.optimizer
    if mix.schedule == "lr by hand":
        for group in optimizer.param_groups:
            rate = 0.05 / (1 + epoch)
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], torch.Tensor) else rate
    if mix.extra == "learns from the second turn on" and epoch == 1:
        next(run.model.parameters()).requires_grad_(True)
    if mix.extra == "group added" and epoch == 1:
        optimizer.add_param_group({"params": [list(run.model.parameters())[-1]]})
    if mix.extra == "warm-up by its own count":
        run.more["turns"] = run.more.get("turns", 0) + 1
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min(run.more["turns"], 3)


def _after_turn(run: Run, loss: float, folder: str) -> None:
    mix = run.mix
    if mix.schedule == "plateau":
        run.scheduler.step(loss)
    elif mix.schedule not in ("none", "by step", "lr by hand"):
        run.scheduler.step()
    if mix.extra == "best model kept" and loss < run.more.get("least", float("inf")):
        run.more["least"], run.more["best"] = loss, copy.deepcopy(run.model)
    if mix.extra == "prunes its weights":
        prune.l1_unstructured(run.model.head, "weight", amount=0.2)
    if mix.extra == "saves its weights":
        torch.save(run.model.state_dict(), os.path.join(folder, f"{run.epoch}.pt"))
    if mix.extra == "saves its model":
        torch.save(run.model, os.path.join(folder, "model.pt"))
    if mix.extra == "writes a history":
        with open(os.path.join(folder, "history"), "a") as file:
            file.write(f"{run.epoch} {loss:.6f}\n")
