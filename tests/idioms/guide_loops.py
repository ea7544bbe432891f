"""Loops of PyTorch's tutorials and examples with the changed lines of `fluidtune.elastic`, and no others.

Each is ``loop(config, report)``; it returns the weights that count. All is in double precision, so that the order of a
sum cannot be seen in a result. What a guide draws for each sample (dropout) is left out, because it differs with the
width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

from fluidtune import elastic

Report = Callable[[float], None]
Weights = dict[str, torch.Tensor]


def samples(n: int = 27) -> TensorDataset:
    x = torch.randn(n, 6, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


def mlp() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def epoch_of(model: Any, optimizer: Any, loader: Any) -> float:
    """Train for one epoch, and return the mean loss. ``optimizer``: None if the loop steps otherwise."""
    total, count = 0.0, 0
    for x, y in loader:
        if optimizer is not None:
            optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        n = elastic.samples(len(x))
        total, count = total + loss.item() * n, count + n
    return elastic.mean(total, count)


def time_sequence(config: dict[str, Any], report: Report) -> Weights:
    """Example: time_sequence_prediction, with LBFGS over all data and no DataLoader."""
    model, (x, y) = mlp(), samples().tensors
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=3)
    model, optimizer = elastic.prepare(model, optimizer)
    for _ in elastic.epochs(0, config["stop"]):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        report(optimizer.step(closure).item())
    return dict(model.state_dict())


def lbfgs_in_batches(config: dict[str, Any], report: Report) -> Weights:
    """LBFGS's closure over a batch: the optimizer decides by the loss that the closure returns, which is a worker's."""
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    model, optimizer, loader = elastic.prepare(model, optimizer, DataLoader(samples(), 9, shuffle=True))
    for _ in elastic.epochs(0, config["stop"]):
        total, count = 0.0, 0
        for x, y in loader:

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            n = elastic.samples(len(x))
            total, count = total + loss.item() * n, count + n
        report(elastic.mean(total, count))
    return dict(model.state_dict())


def pruned(config: dict[str, Any], report: Report) -> Weights:
    """Tutorial: iterative pruning; the masks are buffers that come while it trains."""
    model = mlp()
    prune.l1_unstructured(model[0], "weight", amount=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = elastic.prepare(model, optimizer, DataLoader(samples(), 8, shuffle=True))
    for _ in elastic.epochs(0, config["stop"]):
        loss = epoch_of(model, optimizer, loader)
        prune.l1_unstructured(model[0], "weight", amount=0.2)
        report(loss)
    return dict(model.state_dict())


def sparse(config: dict[str, Any], report: Report) -> Weights:
    """Docs of nn.Embedding: sparse gradients and SparseAdam."""
    torch.manual_seed(2)
    model = nn.Embedding(10, 6, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.01)
    model, optimizer, loader = elastic.prepare(model, optimizer, DataLoader(torch.randint(10, (32,)), 8))
    for _ in elastic.epochs(0, config["stop"]):
        for words in loader:
            optimizer.zero_grad()
            model(words).square().mean().backward()
            optimizer.step()
        report(0.0)
    return dict(model.state_dict())


def tensor_rate(config: dict[str, Any], report: Report) -> Weights:
    """A capturable optimizer's habit: the learning rate is a tensor, changed in place by a schedule of its own."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))
    model, optimizer, loader = elastic.prepare(model, optimizer, DataLoader(samples(), 8, shuffle=True))
    for epoch in elastic.epochs(0, config["stop"]):
        optimizer.param_groups[0]["lr"].fill_(0.01 * 0.5 * (1 + math.cos(math.pi * epoch / 8)))
        report(epoch_of(model, optimizer, loader))
    return dict(model.state_dict())


def in_backward(config: dict[str, Any], report: Report) -> Weights:
    """Tutorial: the optimizer's step fused into the backward pass, by hooks on accumulated gradients."""
    model = mlp()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    model, loader = elastic.prepare(model, DataLoader(samples(), 8, shuffle=True))
    for _ in elastic.epochs(0, config["stop"]):
        report(epoch_of(model, None, loader))
    return dict(model.state_dict())


#: Each with what must come of it: "same", or the words of the refusal.
LOOPS: dict[Callable[[dict[str, Any], Report], Weights], str] = {
    time_sequence: "the loop has prepared no DataLoader",
    lbfgs_in_batches: "same",
    pruned: "same",
    sparse: "sparse",
    tensor_rate: "same",
    in_backward: "off by",
}
