"""Trials for the tests, written as users write them, and the host's side of them in a worker process.

The functions below ``Hosted`` are sent to a `PeerProcess`. A trial calls ``report(loss)`` at the end of each turn; in a
leader that call waits until the test allows the next turn. So a test decides what happens at which boundary.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # the first optimizer would: seconds, which the fork server spares each worker
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fluidtune import elastic
from fluidtune.elastic import CommitStore, ElasticSession, GroupLost, LoopThread, Reform
from fluidtune.elastic.alike import digests, likeness
from fluidtune.elastic.commits.committable import CommittableState
from fluidtune.elastic.data import gradients, trial_state
from fluidtune.elastic.transport import CollectiveBackend, backend_class
from tests.contracts.collective_backends import SECRET

Report = Callable[[float], None]


def data(samples: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator)
    return TensorDataset(x, (x.sum(1, keepdim=True) > 0).float() + 0.1 * x[:, :1])


def one_epoch(model: Any, optimizer: Any, loader: Any, n_of: Callable[[int], int] = elastic.samples) -> float:
    """One pass over the data; the mean loss. ``n_of``: how a batch's samples are counted, by its length."""
    total, count = 0.0, 0
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        n = n_of(len(x))
        total, count = total + loss.item() * n, count + n
    return elastic.mean(total, count)


def mlp(config: dict[str, Any], report: Report) -> dict[str, torch.Tensor]:
    """SGD with momentum, shuffled from the process' own random stream, a ragged last batch."""
    torch.manual_seed(config.get("seed", 1))
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    processes = config.get("processes", 0)
    kept = {"num_workers": processes, "persistent_workers": config.get("persist", True)} if processes else {}
    loader = DataLoader(data(51), batch_size=16, shuffle=True, **kept)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader)
    for _ in elastic.epochs(0, config.get("stop", 4)):
        report(one_epoch(model, optimizer, loader))
    return dict(model.state_dict())


def normed(config: dict[str, Any], report: Report) -> dict[str, torch.Tensor]:
    """Batch norm, Adam, StepLR, clipping, accumulation over two batches, a generator of its own.

    No bias before batch norm: its gradient is rounding errors, which Adam would turn into steps.
    """
    torch.manual_seed(config.get("seed", 1))
    model = nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)
    loader = DataLoader(data(53), batch_size=10, shuffle=True, generator=torch.Generator().manual_seed(7))
    model, optimizer, scheduler, loader = elastic.prepare(model, optimizer, scheduler, loader)
    for _ in elastic.epochs(0, config.get("stop", 4)):
        total, count = 0.0, 0
        for step, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            if step % 2 or step == len(loader) - 1:
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
            n = elastic.samples(len(x))
            total, count = total + loss.item() * n, count + n
        scheduler.step()
        report(elastic.mean(total, count))
    return dict(model.state_dict())


class Permuted(nn.Module):
    """Its columns come in an order that is a parameter of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.arange(6).flip(0), requires_grad=False)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x[:, self.order])


def permuted(config: dict[str, Any], report: Report) -> dict[str, torch.Tensor]:
    """The order of a joiner's columns is another one until it has got the leader's."""
    torch.manual_seed(config.get("seed", 1))
    model = Permuted()
    if Hosted.now is not None and not Hosted.now.session.leader:
        model.order.data = torch.arange(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(data(51), batch_size=16, shuffle=True)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader)
    for _ in elastic.epochs(0, config.get("stop", 4)):
        report(one_epoch(model, optimizer, loader))
    return dict(model.state_dict())


def unfreezing(config: dict[str, Any], report: Report) -> dict[str, torch.Tensor]:
    """Its first layer learns from the second turn on, and a step takes five batches, of which a turn has four."""
    torch.manual_seed(config.get("seed", 1))
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    loader = DataLoader(data(51), batch_size=16, shuffle=True)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader)
    for epoch in elastic.epochs(0, config.get("stop", 4)):
        if epoch == 1:
            model[0].requires_grad_(True)
        total, count = 0.0, 0
        for batch, (x, y) in enumerate(loader, start=4 * epoch + 1):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            if batch % 5 == 0:
                optimizer.step()
                optimizer.zero_grad()
            n = elastic.samples(len(x))
            total, count = total + loss.item() * n, count + n
        report(elastic.mean(total, count))
    return dict(model.state_dict())


def warming(config: dict[str, Any], report: Report) -> dict[str, torch.Tensor]:
    """A warm-up that counts its steps itself; or ``what`` else a worker can have for itself.

    The workers' weights are compared at every boundary, however short its turns are. With "seldom" a digest takes so
    long that they never are for its price.
    """
    if config.get("seldom"):
        slow = mock.patch.object(trial_state, "digest_of_tensors", _slowly)
        with slow, mock.patch.object(likeness, "EACH_BATCH", 0):
            return _warming(config, report)
    with mock.patch.object(likeness, "SHARE", math.inf):
        return _warming(config, report)


def _slowly(tensors: Any) -> float:
    time.sleep(0.3)
    return digests.digest_of_tensors(tensors)


def _warming(config: dict[str, Any], report: Report) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 1))
    model.register_buffer("seen", torch.zeros(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(data(40), batch_size=10)
    steps, what = 0, config.get("what", "warm-up")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    model, optimizer, scheduler, loader = elastic.prepare(model, optimizer, scheduler, loader)
    follows = Hosted.now is not None and not Hosted.now.session.leader
    for epoch in elastic.epochs(0, config["stop"]):
        for x, y in loader:
            steps += 1
            if what == "warm-up":
                for group in optimizer.param_groups:
                    group["lr"] = 0.05 * min(1.0, steps / 20)
            if what == "late" and epoch > 2 and steps % 4 == 3:
                for group in optimizer.param_groups:
                    group["lr"] = 0.01 if follows else 0.02
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        if what == "buffer":
            model.seen += x.sum().detach()
        if what == "once" and follows and epoch == 2:
            with torch.no_grad():
                model[0].weight *= 1.01
        if what == "scheduler" and follows:
            scheduler.step()
        if what == "rounding" and follows:
            with torch.no_grad():
                model[0].weight *= 1 + 1e-7
        if what == "step" and follows:
            optimizer.step()
        report(0.0)
    return {name: value.clone() for name, value in model.state_dict().items()}


def skipping(config: dict[str, Any], report: Report) -> None:
    """Leaves out what has fewer than two samples; its last batch has three, of which the second worker gets one."""
    torch.manual_seed(2)
    norm = [nn.BatchNorm1d(16)] if config.get("norm") else []
    model = nn.Sequential(nn.Linear(6, 16), *norm, nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(data(53), batch_size=10, generator=torch.Generator().manual_seed(3), shuffle=True)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader)
    for _ in elastic.epochs(0, config["stop"]):
        total, count = 0.0, 0
        for x, y in loader:
            if len(x) < 2:
                continue
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            total, count = total + loss.item() * len(x), count + len(x)
        report(elastic.mean(total, count) if config.get("mean") else total / count)


def nested(config: dict[str, Any], report: Report) -> int:
    """`elastic.epochs` for both loops. Returns how many turns the inner one had."""
    elastic.prepare(nn.Linear(6, 1))
    turns = 0
    for _ in elastic.epochs(0, config["stop"]):
        for _ in elastic.epochs(0, 2):
            turns += 1
        report(float(turns))
    return turns


def keeping(config: dict[str, Any], report: Report) -> None:
    """Two batches a turn, from one iterator for all turns, or from a new one that it does not read to its end."""
    torch.manual_seed(2)
    model = nn.Linear(6, 1)
    loader = DataLoader(data(51), batch_size=16, shuffle=True)
    model, loader = elastic.prepare(model, loader)
    batches = iter(loader)
    for _ in elastic.epochs(0, config["stop"]):
        if config.get("renews"):
            batches = iter(loader)
        for _ in range(2):
            try:
                x, _ = next(batches)
            except StopIteration:
                batches = iter(loader)
                x, _ = next(batches)
        report(x.sum().item())


def extending(config: dict[str, Any], report: Report) -> list[int]:
    """Its optimizer gets a second group of parameters in the second turn. Returns the sizes of its groups."""
    torch.manual_seed(2)
    model, head = nn.Linear(6, 6), nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, head, optimizer = elastic.prepare(model, head, optimizer)
    x, y = next(iter(DataLoader(data(16), batch_size=16)))
    for epoch in elastic.epochs(0, config["stop"]):
        if epoch == 1:
            optimizer.add_param_group({"params": head.parameters(), "lr": 0.1})
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(head(model(x)), y)
        loss.backward()
        optimizer.step()
        report(loss.item())
    return [len(group["params"]) for group in optimizer.param_groups]


def capturing(config: dict[str, Any], report: Report) -> None:
    """Its first backward pass becomes part of a CUDA graph, as far as `gradients` can see."""
    torch.manual_seed(2)
    model, (x, y) = nn.Linear(6, 1), next(iter(DataLoader(data(16), batch_size=16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = elastic.prepare(model, optimizer)
    for epoch in elastic.epochs(0, config["stop"]):
        with mock.patch.object(gradients, "is_captured", lambda _, now=epoch == 0: now):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
        optimizer.step()
        report(loss.item())


def stubborn(config: dict[str, Any], report: Report) -> None:
    """Catches the exceptions of its training steps."""
    model = nn.Linear(6, 1)
    model, loader = elastic.prepare(model, DataLoader(data(32), batch_size=8))
    for _ in elastic.epochs(0, config["stop"]):
        report(0.0)
        try:
            for x, y in loader:
                nn.functional.mse_loss(model(x), y).backward()
        except Exception as error:
            raise AssertionError("the loop's end came as an Exception") from error


def failing(config: dict[str, Any], report: Report) -> None:
    elastic.prepare(nn.Linear(6, 1))
    for epoch in elastic.epochs(0, config["stop"]):
        report(0.0)
        if epoch == 1 and here().session.leader:
            raise ValueError("the user's own mistake")


def two_loops(config: dict[str, Any], report: Report) -> None:
    """Train, then fine-tune with another optimizer that is prepared in between."""
    torch.manual_seed(3)
    model = nn.Linear(6, 1)
    model, loader = elastic.prepare(model, DataLoader(data(36), batch_size=9, shuffle=True))
    for lr in (0.1, 0.01):
        optimizer = elastic.prepare(torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))
        for _ in elastic.epochs(0, 2):
            report(one_epoch(model, optimizer, loader, int))
        assert elastic.mean(6.0, 2.0) == 3.0  # also in a joiner that only passes by here


def stepping(config: dict[str, Any], report: Report) -> None:
    """`mlp` as a class trainable and its host would run it."""
    torch.manual_seed(config.get("seed", 1))
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(data(51), batch_size=16, shuffle=True)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader)
    session = here().session
    while True:
        if session.boundary() == 3 and session.leader:
            session.leave()
        report(one_epoch(model, optimizer, loader, int))


class Count(CommittableState):
    """A state of the trial's own: a number, and the one that was saved last."""

    own_streams = True

    def __init__(self) -> None:
        self.value = self.saved = 0

    def capture(self) -> dict[str, Any]:
        return {"value": self.saved}

    def load(self, state: dict[str, Any], *, with_streams: bool) -> None:
        self.value = self.saved = state["value"]

    def broadcast(self, backend: CollectiveBackend) -> None:
        self.value = self.saved = backend.broadcast_object(self.saved)


def counting(config: dict[str, Any], report: Report) -> list[int]:
    """Brings its own state, which it saves in every turn, and goes on in place when another worker dies.

    Returns the number of workers in each turn.
    """
    session, count, widths = here().session, Count(), []
    session.use_own_state(count)
    if not session.first_boundary():
        return []
    session.save()
    while count.value < config["stop"]:
        try:
            workers = torch.ones(1)
            session.backend.allreduce_(workers)
            widths.append(int(workers))
            count.value += 1
            count.saved = count.value
            report(float(count.value))
            session.save()
            session.boundary()
        except GroupLost:
            try:
                session.recover_in_place()
            except GroupLost:
                if not session.leader:
                    session.commit_as_heir()
                raise
            count.value = count.saved
    return widths


def plain(trial: Callable[..., Any], config: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The trial outside any session: (its reports, its weights)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        reports: list[float] = []
        return reports, trial(config, reports.append)
    finally:
        torch.set_num_threads(threads)


class Hosted:
    """One trial's worker in this process."""

    now: Hosted | None = None

    def __init__(self, trial: Callable[..., Any], config: dict[str, Any], leader: bool, name: str) -> None:
        self.reports: list[float] = []
        #: The differences that `difference` has returned.
        self.differences = 0
        self.turns = threading.Semaphore(0 if leader and not config.get("free") else 10**9)
        folder = config.get("commits")
        commits = None
        if folder:
            place = folder if leader else f"{folder}/heir-{name}"
            commits = CommitStore(place, budget=config.get("budget", 1e9))
        self.session = ElasticSession(
            trial="trial",
            worker=name,
            leader=leader,
            backend=backend_class(config.get("backend", "torch"))(secret=SECRET),
            commits=commits,
            resume=config.get("resume") or (commits.load() if commits is not None and leader else None),
            fingerprint="f",
            note=lambda: len(self.reports),
            brief=lambda note: note,
            rewind=self._back_to,
        )
        elastic.use(self.session)
        Hosted.now = self
        self.loop = LoopThread(self.session, self._gated, trial, config).start()

    def _gated(self, trial: Callable[..., Any], config: dict[str, Any]) -> Any:
        return trial(config, self._report)

    def _back_to(self, reports: int) -> None:
        del self.reports[reports:]

    def _report(self, loss: float) -> None:
        self.reports.append(loss)
        self.turns.acquire()


def here() -> Hosted:
    assert Hosted.now is not None
    return Hosted.now


def start(trial: Callable[..., Any], config: dict[str, Any], leader: bool, name: str) -> None:
    elastic.use(None)
    Hosted(trial, config, leader, name)


def address() -> Any:
    return here().session.facts().address


def reports() -> list[float]:
    return list(here().reports)


def allow(turns: int = 1) -> None:
    for _ in range(turns):
        here().turns.release()


def direct(reform: Reform | None) -> None:
    here().session.direct(reform)


def ready() -> bool:
    return here().session.wait_ready(30)


def enter(reform: Reform) -> bool:
    if not ready():
        return False
    here().session.enter(reform)
    return True


def announced(generation: int, ranks: list[int]) -> bool:
    return here().session._member._group.joiners_announced(generation, ranks)


def refused() -> tuple[float | None, str | None]:
    """(the generation that the leader has refused, why the trial cannot grow)."""
    facts = here().session.facts()
    return facts.refused, facts.ungrowable


def difference() -> str | None:
    """What the workers have differed in since the last call."""
    facts, seen = here().session.facts(), here().differences
    here().differences = facts.differences
    return facts.difference if facts.differences > seen else None


def leave() -> None:
    here().session.leave()


def facts() -> dict[str, Any]:
    session = here().session
    known = session.facts()
    return {
        "is_elastic": known.is_elastic,
        "iteration": session.iteration,
        "generation": session.generation,
        "last_reform": known.last_reform,
        "width": known.width,
    }


def outcome(timeout: float = 30.0) -> tuple[str, Any]:
    """How the loop ended: (kind, value or the error's text); ("runs", None) if it has not."""
    found = here().loop.join(timeout)
    if found is None:
        return "runs", None
    return found.kind, found.value if found.kind == "returned" else repr(found.error)
