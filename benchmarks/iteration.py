"""Where an iteration of a small model goes, with torch's loader and with batches that are fetched at once.

``python -m benchmarks.iteration --json [--repeats N]``. A perceptron of three layers, 32 wide, is trained on
scikit-learn's digits by SGD with momentum, in one thread, in this process. Each part of its iteration is measured in
microseconds of the processor's time: ``load`` (by the user's own DataLoader over a `TensorDataset`, and ``at_once`` as
`elastic.prepare` reads it), ``zero_grad``, ``forward``, ``loss``, ``backward`` and ``step``. ``ratio`` is the whole
iteration with the first loader divided by that with the second one, the smallest over the sizes of a batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import torch
from fluidtune.elastic.data.whole_batches import reader_of
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import finish, parser, result, say

#: Samples in a batch.
SIZES = (32, 64, 128)

def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))


class Clock:
    """The processor's time by part, of each iteration."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = {}
        self._since = time.thread_time_ns()

    def start(self) -> None:
        """What follows belongs to the next part."""
        self._since = time.thread_time_ns()

    def note(self, part: str) -> None:
        """A part has ended."""
        now = time.thread_time_ns()
        self.parts.setdefault(part, []).append((now - self._since) / 1e3)
        self.start()


def train(batches: Iterable[Any], model: nn.Module, optimizer: torch.optim.Optimizer, clock: Clock) -> None:
    """One epoch, in which each part of an iteration is measured."""
    clock.start()
    for x, y in batches:
        clock.note("load")
        optimizer.zero_grad()
        clock.note("zero_grad")
        predicted = model(x)
        clock.note("forward")
        loss = F.cross_entropy(predicted, y)
        clock.note("loss")
        loss.backward()
        clock.note("backward")
        optimizer.step()
        clock.note("step")


def measure(size: int, epochs: int) -> dict[str, dict[str, float]]:
    """By side the median microseconds of each part, and of the whole iteration."""
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    loader = DataLoader(data, batch_size=size, shuffle=True)
    sides: dict[str, Callable[[], Iterable[Any]]] = {"loader": lambda: loader, "at_once": lambda: reader_of(loader)}
    clocks = {name: Clock() for name in sides}
    torch.manual_seed(0)
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(epochs + 1):
        for name, batches in sides.items():
            train(batches(), model, optimizer, clocks[name] if epoch else Clock())  # the first epoch warms up
    found = {name: {part: median(times) for part, times in clock.parts.items()} for name, clock in clocks.items()}
    return {name: {**parts, "whole": sum(parts.values())} for name, parts in found.items()}


def main() -> None:
    options = parser(__doc__.splitlines()[0], repeats=True).parse_args()
    torch.set_num_threads(1)
    epochs = 2 if options.quick else 20 * options.repeats
    by_size = {size: measure(size, epochs) for size in SIZES}
    for size, sides in by_size.items():
        shown = {name: {part: round(us) for part, us in parts.items()} for name, parts in sides.items()}
        say(f"batches of {size}: {shown}")
    ratio = min(sides["loader"]["whole"] / sides["at_once"]["whole"] for sides in by_size.values())
    finish(result("iteration", "cpu:1", "real", sizes=by_size, ratio=ratio), options.json)


if __name__ == "__main__":
    main()
