"""Loops with several models or losses, or with optimizers of popular repositories: see `tutorial_loops`."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fluidtune import elastic

from .tutorial_loops import (
    Config,
    Loop,
    Meter,
    Report,
    fit,
    images,
    loader_of,
    mlp,
    numbers,
    sgd,
    turns,
    weights,
)

# -- graphs and pairs --


def as_graph(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each sample's six numbers are nodes in a ring; the batch is one graph."""
    n, number = 6 * len(samples), torch.arange(6)
    here = torch.cat([6 * i + number for i in range(len(samples))])
    there = torch.cat([6 * i + (number + 1) % 6 for i in range(len(samples))])
    edges = torch.stack([torch.cat([here, there]), torch.cat([there, here])])
    ones = torch.ones(edges.shape[1], dtype=torch.float64)
    adjacency = torch.sparse_coo_tensor(edges, ones, (n, n), check_invariants=False).coalesce()
    nodes = torch.cat([x for x, _ in samples]).unsqueeze(1)
    return nodes, adjacency, torch.arange(len(samples)).repeat_interleave(6), torch.stack([y for _, y in samples])


def graphs(config: Config, report: Report) -> Any:
    torch.manual_seed(1)
    model = nn.ModuleList([nn.Linear(1, 5), nn.Linear(5, 1)]).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader_of(numbers(), collate_fn=as_graph))
    for _ in turns(config):
        meter = Meter()
        for nodes, adjacency, graph, y in loader:
            hidden = torch.relu(torch.sparse.mm(adjacency, model[0](nodes)))
            pooled = torch.zeros(len(y), 5, dtype=torch.float64).index_add_(0, graph, hidden) / 6
            loss = F.mse_loss(model[1](pooled), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meter.update(loss.item(), len(y))
        report(meter.mean)
    return weights(model)


# -- several models and losses --


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder, self.mean, self.log, self.decoder = (
            nn.Linear(36, 10), nn.Linear(10, 3), nn.Linear(10, 3), nn.Linear(3, 36)
        )  # fmt: skip
        self.double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.encoder(x.flatten(1)))
        mean, log = self.mean(hidden), self.log(hidden)
        z = mean + 0.0 * torch.randn_like(log) * torch.exp(0.5 * log)
        return torch.sigmoid(self.decoder(z)), mean, log


def vae(sums: bool) -> Loop:
    """pytorch/examples/vae. ``sums``: its loss is a sum over the batch, as there."""

    def loop(config: Config, report: Report) -> Any:
        model = Vae()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        model, optimizer, loader = elastic.prepare(model, optimizer, loader_of(images(), own=3))

        def loss_of(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            out, mean, log = model(x)
            likely = F.binary_cross_entropy(out, x.flatten(1).sigmoid(), reduction="sum")
            apart = -0.5 * torch.sum(1 + log - mean.pow(2) - log.exp())
            return (likely + apart) / (1 if sums else len(x))

        for _ in turns(config):
            report(fit(optimizer, loader, loss_of))
        return weights(model)

    return loop


def dynamic_weights(config: Config, report: Report, shared: bool = False) -> Any:
    """The weights of two losses follow their means in the last two epochs (DWA). ``shared``: those of all workers."""
    model, head = mlp(), nn.Linear(6, 1).double()
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.05)
    means = elastic.state(of=[]) if shared else type("Means", (), {"of": []})()
    model, head, optimizer, loader = elastic.prepare(model, head, optimizer, loader_of(numbers()))
    for _ in turns(config):
        share = torch.ones(2, dtype=torch.float64)
        if len(means.of) > 1:
            share = 2 * F.softmax(torch.tensor(means.of[-1]) / torch.tensor(means.of[-2]) / 0.5, 0)
        meters = [Meter(), Meter()]
        for x, y in loader:
            losses = [F.mse_loss(model(x), y), F.l1_loss(head(x), x.sum(1, keepdim=True))]
            optimizer.zero_grad()
            (share[0] * losses[0] + share[1] * losses[1]).backward()
            optimizer.step()
            for meter, loss in zip(meters, losses, strict=True):
                meter.update(loss.item(), len(x))
        whole = [meter.mean for meter in meters]
        means.of.append(whole if shared else [meter.total / meter.count for meter in meters])
        report(sum(whole))
    return weights(model, head)


def hard_examples(config: Config, report: Report, begin: int = 0, collect: int = 0) -> Any:
    """The worst samples of the last epoch, from ``collect`` on, come once more, from epoch ``begin`` + 1 on."""
    model, hard = mlp(), []
    optimizer = sgd(model)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader_of(numbers()))
    for epoch in turns(config):
        meter, seen = Meter(), []
        for x, y in loader:
            losses = (model(x) - y).square().squeeze(1)
            loss = losses.mean()
            if hard and epoch > begin:
                a, b = random.choice(hard)
                loss = loss + F.mse_loss(model(a.unsqueeze(0)), b.unsqueeze(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += zip(losses.tolist(), x, y, strict=True) if epoch >= collect else ()
            meter.update(loss.item(), len(x))
        hard = [(x, y) for _, x, y in sorted(seen, key=lambda each: -each[0])[:5]]
        report(meter.mean)
    return weights(model)


# -- optimizers of popular repositories --


class Sam(torch.optim.Optimizer):
    """davda54/sam."""

    def __init__(self, params: Any, base: Callable[..., torch.optim.Optimizer], rho: float = 0.05, **more: Any) -> None:
        super().__init__(params, {"rho": rho, **more})
        self.base_optimizer = base(self.param_groups, **more)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * group["rho"] / (norm + 1e-12))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:
        closure = torch.enable_grad()(closure)
        self.first_step()
        closure()
        self.second_step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


def sam(by_closure: bool, momentum: float = 0.0) -> Loop:
    """``momentum``: in the inner optimizer, which is not prepared."""

    def loop(config: Config, report: Report) -> Any:
        model = mlp()
        optimizer = Sam(model.parameters(), torch.optim.SGD, lr=0.05, momentum=momentum)
        model, optimizer, loader = elastic.prepare(model, optimizer, loader_of(numbers()))
        for _ in turns(config):
            meter = Meter()
            for x, y in loader:

                def again(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                    loss = F.mse_loss(model(x), y)
                    loss.backward()
                    return loss

                loss = again()
                if by_closure:
                    optimizer.step(again)
                else:
                    optimizer.first_step()
                    again()
                    optimizer.second_step()
                meter.update(loss.item(), len(x))
            report(meter.mean)
        return weights(model)

    return loop


class Lookahead(torch.optim.Optimizer):
    """lonePatient/lookahead_pytorch: without hooks, and with names of its own in its ``state_dict``."""

    def __init__(self, optimizer: torch.optim.Optimizer, k: int = 5, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups = optimizer.param_groups
        self.defaults, self.state, self.fast_state = optimizer.defaults, defaultdict(dict), optimizer.state
        for group in self.param_groups:
            group["counter"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            group["counter"] += 1
            if group["counter"] % self.k == 0:
                for p in group["params"]:
                    slow = self.state[p].setdefault("slow_param", p.data.clone())
                    slow += (p.data - slow) * self.alpha
                    p.data.copy_(slow)
        return loss

    def state_dict(self) -> dict[str, Any]:
        fast = self.optimizer.state_dict()
        numbers = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        slow = {numbers[p]: value for p, value in self.state.items()}
        return {"fast_state": fast["state"], "slow_state": slow, "param_groups": fast["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        self.optimizer.load_state_dict({"state": state_dict["fast_state"], "param_groups": groups})
        self.param_groups, self.fast_state = self.optimizer.param_groups, self.optimizer.state
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.state = defaultdict(dict)
        for i, value in state_dict["slow_state"].items():
            self.state[parameters[i]] = {"slow_param": value["slow_param"].clone()}


class TimmLookahead(Lookahead):
    """timm's: it has hooks, and its slow weights are in the inner state."""

    def __init__(self, optimizer: torch.optim.Optimizer, k: int = 5, alpha: float = 0.5) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        super().__init__(optimizer, k, alpha)
        self.state = optimizer.state

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state


def lookahead(kind: type[Lookahead], inner: bool = False) -> Loop:
    """``inner``: the loop prepares the inner optimizer alone."""

    def loop(config: Config, report: Report) -> Any:
        model = mlp()
        fast = sgd(model)
        optimizer = kind(fast)
        model, loader = elastic.prepare(model, loader_of(numbers()))
        elastic.prepare(fast if inner else optimizer)
        for _ in turns(config):
            meter = Meter()
            for x, y in loader:
                model.zero_grad()  # the optimizer's would look for hooks
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                meter.update(loss.item(), len(x))
            report(meter.mean)
        return weights(model)

    return loop


def own_mean(config: Config, report: Report, batches: bool) -> Any:
    """A mean as ``running_loss / len(loader)``, each batch counted once, or over the size of the whole data set."""
    model = mlp()
    optimizer = sgd(model)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader_of(numbers()))
    for _ in turns(config):
        running = 0.0
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.item() if batches else loss.item() * elastic.samples(len(x))
        report(elastic.mean(running, len(loader if batches else loader.dataset)))
    return weights(model)


LOOPS: dict[str, Loop] = {
    "graphs": graphs,
    "vae, a sum": vae(sums=True),
    "vae, a mean": vae(sums=False),
    "dynamic weights of losses": dynamic_weights,
    "dynamic weights, of all workers": partial(dynamic_weights, shared=True),
    "hard examples": hard_examples,
    "hard examples, later": partial(hard_examples, begin=2),
    "hard examples, collected later": partial(hard_examples, begin=9, collect=2),
    "sam": sam(by_closure=False),
    "sam by a closure": sam(by_closure=True),
    "sam with momentum": sam(by_closure=False, momentum=0.9),
    "lookahead": lookahead(Lookahead),
    "lookahead of timm": lookahead(TimmLookahead),
    "lookahead, inner prepared": lookahead(Lookahead, inner=True),
    "mean of batches": partial(own_mean, batches=True),
    "size of the data set": partial(own_mean, batches=False),
}
