"""Trials of one architecture trained as one, against the same trials one after the other, on one core.

``python -m benchmarks.fused --json``. K trials each run the same loop for some iterations: draw a batch of 32 of 256
samples, forward, loss, backward, a step of Adam. ``ratio`` is the time one after the other divided by the time as one;
the smallest over models and K, as in the other benchmarks. Both sides are in one process with one thread of torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
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


def measure(make: Callable[[], nn.Module], count: int, iterations: int) -> dict[str, float]:
    """Iterations a second of all trials: as one, and one after the other; seconds are those of the processor."""
    loop(make, 0, 2)
    began = time.process_time()
    alone = [loop(make, number, iterations) for number in range(count)]
    apart = time.process_time() - began
    began = time.process_time()
    trials = FusedTrials()
    for number in range(count):
        trials.start(str(number), loop, make, number, iterations)
    trials.join()
    fused = time.process_time() - began
    differ = max(abs(trial.value / loss - 1) for trial, loss in zip(trials.trials, alone, strict=True))
    total = count * iterations
    return {"fused": total / fused, "alone": total / apart, "ratio": apart / fused, "worst_difference": differ}


def main() -> None:
    options = parser(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    counts, iterations = ((1, 8), 10) if options.quick else (COUNTS, 100)
    by_model: dict[str, Any] = {}
    for name, make in MODELS.items():
        by_model[name] = {str(count): measure(make, count, iterations) for count in counts}
        say(f"{name}: " + ", ".join(f"{count} {row['ratio']:.2f}x" for count, row in by_model[name].items()))
    ratio = min(row["ratio"] for rows in by_model.values() for row in rows.values())
    finish(result("fused", "cpu:1", "real", models=by_model, ratio=ratio), options.json)


if __name__ == "__main__":
    main()
