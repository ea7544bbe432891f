"""Milliseconds of a training step alone, divided by FluidTune, and under DDP, at widths 2 and 3.

``python -m benchmarks.divided --json [--only MODEL ...] [--widths 2 3] [--quick]``. Each model is trained by plain
PyTorch with one thread a process, on batches that lie ready. ``alone``: one process. ``divided``: the same loop in one
process, with followers that are attached before its first step (`fluidtune.elastic.divided`); steps in which a call is
checked are not counted. ``ddp``: `torch.nn.parallel.DistributedDataParallel` over gloo, a part of the batch in each
process. ``data_parallel``: what `torch.nn.DataParallel` does at each call, on the same transport: all weights go out
anew, also those that have not changed. Sides are run in turn, and medians of all turns are compared.

The models: convolutional nets of 16 to 128 channels (from some ms to some 0.5 s a step on one core), ``wide_input``
(inputs of 12 MB and little to compute), ``wide_output`` (a language head whose outputs are 20 MB), ``frozen_base`` (all
but the head is frozen). ``speed``: ``ddp`` divided by ``divided``: .95 says that a divided step takes 1.05 times as
long as DDP's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.common import finish, parser, result, say
from fluidtune.elastic.divided.follower import Follower
from fluidtune.elastic.divided.leader import DataParallelLeader
from fluidtune.group_facts import GroupFacts

#: Steps of one run, and how many of the first ones are not counted: they warm up, and calls are checked in them.
STEPS, WARM = 14, 5
SIDES = ("alone", "divided", "ddp", "data_parallel")
_SECRET = b"benchmarks.divided" * 2


def convolutions(width: int, batch: int) -> tuple[nn.Module, Any, Any]:
    """A net over images of 16 x 16."""
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * width, 10),
    )
    return model, torch.randn(batch, 3, 16, 16), torch.randint(10, (batch,))


def wide_input(batch: int = 64) -> tuple[nn.Module, Any, Any]:
    model = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(3 * 16 * 16, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, torch.randn(batch, 3, 128, 128), torch.randint(10, (batch,))


class Language(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(words, 96), nn.GRU(96, 192, batch_first=True)
        self.head = nn.Linear(192, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(x))[0])


def wide_output(batch: int = 32, words: int = 5000) -> tuple[nn.Module, Any, Any]:
    x = torch.randint(words, (batch, 32))
    return Language(words), x, x.roll(-1, 1)


def frozen_base() -> tuple[nn.Module, Any, Any]:
    model, x, y = convolutions(64, 64)
    for layer in list(model.children())[:-1]:
        layer.requires_grad_(False)
    return model, x, y


MODELS: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {
    "convolutions_16": lambda: convolutions(16, 32),
    "convolutions_32": lambda: convolutions(32, 48),
    "convolutions_64": lambda: convolutions(64, 64),
    "convolutions_96": lambda: convolutions(96, 128),
    "convolutions_128": lambda: convolutions(128, 256),
    "wide_input": wide_input,
    "wide_output": wide_output,
    "frozen_base": frozen_base,
}


def loss_of(model: nn.Module, x: Any, y: Any) -> torch.Tensor:
    out = model(x)
    return F.cross_entropy(out.flatten(0, -2), y.flatten()) if y.dim() > 1 else F.cross_entropy(out, y)


def steps(model: nn.Module, x: Any, y: Any, before: Callable[[], Any] = int) -> list[float]:
    """Seconds of each step. ``before``: called before each."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01, momentum=0.9)
    found = []
    for _ in range(STEPS):
        before()
        started = time.perf_counter()
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
        found.append(time.perf_counter() - started)
    return found[WARM:]


def run(side: str, name: str, width: int) -> list[float]:
    """Seconds of the counted steps."""
    torch.manual_seed(0)
    model, x, y = MODELS[name]()
    if side == "alone":
        return steps(model, x, y)
    if side == "ddp":
        return under_ddp(model, x, y, width)
    division = DataParallelLeader("benchmark", _SECRET, None, pays=False, patient=True)
    context = multiprocessing.get_context("fork")
    attached = context.Semaphore(0)
    followers = [context.Process(target=follow, args=(division.address, attached)) for _ in range(width - 1)]
    for each in followers:
        each.start()
    try:
        for _ in followers:
            attached.acquire()
        weights = list(model.parameters())

        def anew() -> None:
            with torch.no_grad():
                for weight in weights:
                    weight.mul_(1.0 + 1e-7)

        found = steps(model, x, y, anew if side == "data_parallel" else division.begin_iteration)
        if not division.followers.divided:
            raise SystemExit(f"{name} was not divided: {division.facts(GroupFacts())}")
        return found
    finally:
        division.close()
        for each in followers:
            each.join()


def follow(address: Any, attached: Any) -> None:
    torch.set_num_threads(1)
    follower = Follower("benchmark", f"follower {os.getpid()}", _SECRET)
    follower.attach(address)
    attached.release()
    follower.run()


def under_ddp(model: nn.Module, x: Any, y: Any, width: int) -> list[float]:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with tempfile.TemporaryDirectory(prefix="fluidtune-benchmark-") as folder:
        args = (queue, str(Path(folder) / "meet"), model, x, y, width)
        processes = [context.Process(target=ddp_rank, args=(rank, *args)) for rank in range(width)]
        for each in processes:
            each.start()
        found: list[float] = queue.get()
        for each in processes:
            each.join()
    return found


def ddp_rank(rank: int, queue: Any, meet: str, model: nn.Module, x: Any, y: Any, width: int) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=width)
    found = steps(nn.parallel.DistributedDataParallel(model), x.chunk(width)[rank], y.chunk(width)[rank])
    if rank == 0:
        queue.put(found)
    torch.distributed.destroy_process_group()


def in_process(side: str, name: str, width: int) -> list[float]:
    """`run` in a process of its own."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_put, args=(queue, side, name, width))
    process.start()
    found: list[float] | None = queue.get()
    process.join()
    if found is None:
        raise SystemExit(f"{side} of {name} at width {width} failed")
    return found


def _put(queue: Any, side: str, name: str, width: int) -> None:
    torch.set_num_threads(1)
    found = None
    try:
        found = run(side, name, width)
    finally:
        queue.put(found)


def main() -> None:
    options = parser(__doc__.partition("\n")[0], repeats=True)
    options.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), help="models")
    options.add_argument("--widths", nargs="+", type=int, default=[2, 3], help="workers")
    args: argparse.Namespace = options.parse_args()
    names, widths = (args.only[:2], args.widths[:1]) if args.quick else (args.only, args.widths)
    found: dict[str, dict[str, list[float]]] = {}
    for turn in range(1 if args.quick else args.repeats):
        for name in names:
            for width in widths:
                own = found.setdefault(f"{name} at {width}", {side: [] for side in SIDES})
                for side in SIDES:
                    own[side].append(1000 * median(in_process(side, name, width)))
                say(f"[{turn + 1}] {name} at {width}: {json.dumps({s: round(v[-1], 1) for s, v in own.items()})}")
    cases = {}
    for case, sides in found.items():
        ms = {side: median(values) for side, values in sides.items()}
        cases[case] = {**ms, "speed": ms["ddp"] / ms["divided"], "gain": ms["alone"] / ms["divided"], "all": sides}
    slow = [case["speed"] for case in cases.values() if case["alone"] >= 30]
    finish(result("divided", "cpu:2", "real", models=cases, ratio=min(slow, default=None)), args.json)


if __name__ == "__main__":
    main()
