"""Trials of one architecture trained as one, one after the other in a process, and packed as a process each.

``python -m benchmarks.fused --json``. K trials each run the same loop for some iterations: draw a batch of 32 of 256
samples, forward, loss, backward, a step of Adam. As one and one after the other take one core; the packed processes
share all cores, as FluidTune's workers do. The three run in turn ``--repeats`` times, and medians are compared.
``ratio`` is the processor's time one after the other divided by that as one; the smallest over models and K, as in the
other benchmarks. The processor's time tells more than the clock's where other processes compute. Each process has one
thread of torch. Starting processes and importing torch is not in the time of the packed ones.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.common import finish, parser, result, say
from fluidtune.elastic.fused import FusedTrials, current_trial

#: How many trials are trained at once.
COUNTS = (1, 2, 4, 8, 16, 32)
INPUTS = torch.randn(256, 8, 8, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(0, 10, (256,), generator=torch.Generator().manual_seed(2))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(8, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0][:, -1])  # type: ignore[no-any-return]


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.first, self.head = nn.Linear(8, 32), nn.Linear(32, 10)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.first(x)).mean(1))  # type: ignore[no-any-return]


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(256, 10),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": perceptron,
    "convolution": convolution,
    "recurrent": Recurrent,
    "transformer": Attentive,
}


def loop(make: Callable[[], nn.Module], number: int, iterations: int) -> float:
    """One trial; returns its last loss."""
    torch.manual_seed(number)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trial = current_trial()
    if trial is not None:
        trial.prepare(model, optimizer)
    loss = torch.zeros(())
    for _ in range(iterations):
        chosen = torch.randint(0, len(INPUTS), (32,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(INPUTS[chosen]), LABELS[chosen])
        loss.backward()
        optimizer.step()
    return loss.item()


Times = tuple[float, float, list[float]]


def one_after_the_other(make: Callable[[], nn.Module], count: int, iterations: int) -> Times:
    """Seconds of the clock, of the processor, and the trials' last losses; as `as_one` and `packed`."""
    clock, computed = time.perf_counter(), time.process_time()
    losses = [loop(make, number, iterations) for number in range(count)]
    return time.perf_counter() - clock, time.process_time() - computed, losses


def as_one(make: Callable[[], nn.Module], count: int, iterations: int) -> Times:
    clock, computed = time.perf_counter(), time.process_time()
    trials = FusedTrials()
    for number in range(count):
        trials.start(str(number), loop, make, number, iterations)
    trials.join()
    times = time.perf_counter() - clock, time.process_time() - computed
    for trial in trials.trials:
        if trial.error is not None:
            raise trial.error
    return *times, [trial.value for trial in trials.trials]


def packed(make: Callable[[], nn.Module], count: int, iterations: int) -> Times:
    context = multiprocessing.get_context("fork")  # torch is imported, and no thread of this process is left
    together, answers = context.Barrier(count + 1), context.SimpleQueue()

    def worker(number: int) -> None:
        together.wait()
        computed = time.process_time()
        loss = loop(make, number, iterations)
        answers.put((number, time.process_time() - computed, loss))

    processes = [context.Process(target=worker, args=(number,)) for number in range(count)]
    for process in processes:
        process.start()
    together.wait()
    clock = time.perf_counter()
    got = sorted(answers.get() for _ in range(count))
    passed = time.perf_counter() - clock
    for process in processes:
        process.join()
    return passed, sum(computed for _, computed, _ in got), [loss for _, _, loss in got]


SIDES = {"fused": as_one, "alone": one_after_the_other, "packed": packed}


def measure(make: Callable[[], nn.Module], count: int, iterations: int, repeats: int) -> dict[str, float]:
    """Iterations a second of all trials on each side: by the processor's time, and ``_wall`` by the clock's."""
    loop(make, 0, 2)
    runs = [{name: side(make, count, iterations) for name, side in SIDES.items()} for _ in range(repeats)]
    total = count * iterations
    row: dict[str, float] = {}
    for name in SIDES:
        row[name] = total / median(run[name][1] for run in runs)
        row[f"{name}_wall"] = total / median(run[name][0] for run in runs)
    row["ratio"] = median(run["alone"][1] / run["fused"][1] for run in runs)
    row["packed_ratio"] = median(run["packed"][1] / run["fused"][1] for run in runs)
    row["worst_difference"] = max(
        abs(ours / loss - 1) for run in runs for ours, loss in zip(run["fused"][2], run["alone"][2], strict=True)
    )
    return row


def main() -> None:
    options = parser(__doc__.splitlines()[0], repeats=True).parse_args()
    torch.set_num_threads(1)
    counts, iterations = ((1, 8), 10) if options.quick else (COUNTS, 100)
    by_model: dict[str, Any] = {}
    for name, make in MODELS.items():
        by_model[name] = {str(count): measure(make, count, iterations, options.repeats) for count in counts}
        gains = [f"{n} {row['ratio']:.2f}x (packed {row['packed_ratio']:.2f}x)" for n, row in by_model[name].items()]
        say(f"{name}: {', '.join(gains)}")
    ratio = min(row["ratio"] for rows in by_model.values() for row in rows.values())
    finish(result("fused", f"cpu:{os.cpu_count()}", "real", models=by_model, ratio=ratio), options.json)


if __name__ == "__main__":
    main()
