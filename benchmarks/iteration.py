"""Where an iteration of a small model goes, with torch's loader and with batches that are fetched at once.

``python -m benchmarks.iteration --json [--repeats N]``. A perceptron of three layers, 32 wide, is trained on
scikit-learn's digits by SGD with momentum, in one thread, in this process. Each part of its iteration is measured in
microseconds of the processor's time: ``load`` (by the user's own DataLoader over a `TensorDataset`, and ``at_once`` as
`elastic.prepare` reads it), ``zero_grad``, ``forward``, ``loss``, ``backward`` and ``step``. ``ratio`` is the whole
iteration with the first loader divided by that with the second one, the smallest over the sizes of a batch.

``fusing`` says what K trials trained as one could gain over the iteration ``at_once`` of a trial alone (docs/fused.md).
``common`` is a trial's part of one forward and one backward pass over stacked parameters, without any bookkeeping.
``own`` is what each loop keeps: its batch, ``zero_grad``, ``loss`` with its own backward pass, and ``step``.
``handovers`` are two changes of the thread that runs. ``bound`` is ``whole`` of the trial alone divided by their sum.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import finish, parser, result, say
from benchmarks.fused import perceptron
from fluidtune.elastic.whole_batches import reader_of

#: Samples in a batch.
SIZES = (32, 64, 128)
#: Trials that are trained as one.
COUNTS = (2, 4, 8, 16)


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


def microseconds(work: Callable[[], object], times: int) -> float:
    """The median of the processor's time of one call."""
    clock = Clock()
    for _ in range(times):
        clock.start()
        work()
        clock.note("work")
    return median(clock.parts["work"])


def common_work(size: int, count: int, times: int) -> float:
    """One trial's part of a forward and a backward pass of ``count`` perceptrons with stacked parameters."""
    layers = [
        (torch.randn(count, into, out, requires_grad=True), torch.randn(count, 1, out, requires_grad=True))
        for into, out in ((64, 32), (32, 32), (32, 10))
    ]
    samples, gradient = torch.randn(count, size, 64), torch.randn(count, size, 10)

    def work() -> None:
        x = samples
        for number, (weight, bias) in enumerate(layers):
            x = torch.baddbmm(bias, x.relu() if number else x, weight)
        x.backward(gradient)

    return microseconds(work, times) / count


def own_loss(size: int, times: int) -> float:
    """A trial's loss and the backward pass that ends at its model's result."""
    predicted, labels = torch.randn(size, 10, requires_grad=True), torch.randint(0, 10, (size,))
    return microseconds(lambda: F.cross_entropy(predicted, labels).backward(), times)


def handover(times: int) -> float:
    """The processor's time, of the whole process, to let another thread run that waits for a lock."""
    locks = [threading.Lock(), threading.Lock()]
    for lock in locks:
        lock.acquire()

    def other() -> None:
        for _ in range(times):
            locks[0].acquire()
            locks[1].release()

    thread = threading.Thread(target=other)
    thread.start()
    started = time.process_time_ns()
    for _ in range(times):
        locks[0].release()
        locks[1].acquire()
    spent = time.process_time_ns() - started
    thread.join()
    return spent / 1e3 / (2 * times)


def fusing(size: int, alone: dict[str, float], times: int) -> dict[str, dict[str, float]]:
    """By number of trials, the microseconds of a trial's iteration if they are trained as one, and the bound."""
    own = alone["load"] + alone["zero_grad"] + alone["step"] + own_loss(size, times)
    handovers = 2 * handover(times)
    rows = {}
    for count in COUNTS:
        common = common_work(size, count, times)
        bound = alone["whole"] / (own + common + handovers)
        rows[str(count)] = {"common": common, "own": own, "handovers": handovers, "bound": bound}
    return rows


def main() -> None:
    options = parser(__doc__.splitlines()[0], repeats=True).parse_args()
    torch.set_num_threads(1)
    epochs, times = (2, 50) if options.quick else (20 * options.repeats, 500 * options.repeats)
    by_size = {size: measure(size, epochs) for size in SIZES}
    gains = {size: fusing(size, sides["at_once"], times) for size, sides in by_size.items()}
    for size, sides in by_size.items():
        shown = {name: {part: round(us) for part, us in parts.items()} for name, parts in sides.items()}
        bounds = {count: {part: round(x, 2) for part, x in row.items()} for count, row in gains[size].items()}
        say(f"batches of {size}: {shown}; trained as one at best {bounds}")
    ratio = min(sides["loader"]["whole"] / sides["at_once"]["whole"] for sides in by_size.values())
    finish(result("iteration", "cpu:1", "real", sizes=by_size, fusing=gains, ratio=ratio), options.json)


if __name__ == "__main__":
    main()
