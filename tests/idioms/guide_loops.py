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
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def time_sequence(config: dict[str, Any], report: Report) -> Weights:
    """Example: time_sequence_prediction, with LBFGS over all data and no DataLoader."""
    torch.manual_seed(2)
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
    torch.manual_seed(2)
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
    torch.manual_seed(2)
    model = mlp()
    prune.l1_unstructured(model[0], "weight", amount=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = elastic.prepare(model, optimizer, DataLoader(samples(), 8, shuffle=True))
    for _ in elastic.epochs(0, config["stop"]):
        total, count = 0.0, 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            n = elastic.samples(len(x))
            total, count = total + loss.item() * n, count + n
        prune.l1_unstructured(model[0], "weight", amount=0.2)
        report(elastic.mean(total, count))
    return dict(model.state_dict())


def quantized(config: dict[str, Any], report: Report) -> Weights:
    """Tutorial: quantization-aware training; its observers keep the range of all values that they see."""
    from torch.ao import quantization

    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    model.qconfig = quantization.get_default_qat_qconfig("onednn")
    quantization.prepare_qat(model.train(), inplace=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = elastic.prepare(model, optimizer, DataLoader(samples(), 8, shuffle=True))
    for _ in elastic.epochs(0, config["stop"]):
        total, count = 0.0, 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x.float()), y.float())
            loss.backward()
            optimizer.step()
            n = elastic.samples(len(x))
            total, count = total + loss.item() * n, count + n
        report(elastic.mean(total, count))
    return {name: value for name, value in model.state_dict().items() if value.is_floating_point()}


def data_parallel(config: dict[str, Any], report: Report) -> Weights:
    """Tutorial: DataParallel around the model, prepared as the tutorial's loop has it."""
    torch.manual_seed(2)
    model = nn.DataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = elastic.prepare(model, optimizer, DataLoader(samples(), 8, shuffle=True))
    for _ in elastic.epochs(0, config["stop"]):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        x, y = loader.dataset.tensors
        report(F.mse_loss(model(x), y).item())
    return dict(model.module.state_dict())


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


def metric_of_epoch(config: dict[str, Any], report: Report) -> Weights:
    """MNIST's accuracy: ``correct / len(loader.dataset)``, with the evaluation's loader not prepared."""
    torch.manual_seed(2)
    model, held_back = mlp(), samples(20)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    loader = DataLoader(samples(), 8, shuffle=True)
    model, optimizer, scheduler, loader = elastic.prepare(model, optimizer, scheduler, loader)
    for _ in elastic.epochs(0, config["stop"]):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        model.eval()
        loss, correct = 0.0, 0
        with torch.no_grad():
            for x, y in DataLoader(held_back, 7):
                out = model(x)
                loss += F.mse_loss(out, y, reduction="sum").item()
                correct += (out.sign() == y.sign()).sum().item()
        scheduler.step()
        report(loss / len(held_back) + correct / len(held_back))
    return dict(model.state_dict())


def tensor_rate(config: dict[str, Any], report: Report) -> Weights:
    """A capturable optimizer's habit: the learning rate is a tensor, changed in place by a schedule of its own."""
    torch.manual_seed(2)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))
    model, optimizer, loader = elastic.prepare(model, optimizer, DataLoader(samples(), 8, shuffle=True))
    for epoch in elastic.epochs(0, config["stop"]):
        optimizer.param_groups[0]["lr"].fill_(0.01 * 0.5 * (1 + math.cos(math.pi * epoch / 8)))
        total, count = 0.0, 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            n = elastic.samples(len(x))
            total, count = total + loss.item() * n, count + n
        report(elastic.mean(total, count))
    return dict(model.state_dict())


def in_backward(config: dict[str, Any], report: Report) -> Weights:
    """Tutorial: the optimizer's step fused into the backward pass, by hooks on accumulated gradients."""
    torch.manual_seed(2)
    model = mlp()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    model, loader = elastic.prepare(model, DataLoader(samples(), 8, shuffle=True))
    for _ in elastic.epochs(0, config["stop"]):
        total, count = 0.0, 0
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            n = elastic.samples(len(x))
            total, count = total + loss.item() * n, count + n
        report(elastic.mean(total, count))
    return dict(model.state_dict())


#: Each with what must come of it: "same", or the words of the refusal.
LOOPS: dict[Callable[[dict[str, Any], Report], Weights], str] = {
    time_sequence: "the loop has prepared no DataLoader",
    lbfgs_in_batches: "same",
    pruned: "same",
    quantized: "off by",
    data_parallel: "same",
    sparse: "sparse",
    metric_of_epoch: "same",
    tensor_rate: "same",
    in_backward: "off by",
}
