"""What a training loop may use besides plain steps, in two trials that share one process by lanes.

Each trial has the losses that it has alone, to the last bit, whether its lane is its own or shared; with torch.compile
only in a shared lane, where one trial computes at a time. No GPU is needed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from salus_share import Need
from salus_share.streams import InProcessLanes, LaneJob
from tests.salus.processes import home
from tests.salus.test_streams import Alone

pytestmark = pytest.mark.slow  # torch's optimizers import its compiler, which takes seconds

Batch = tuple[torch.Tensor, torch.Tensor]


def batches(source: torch.Generator, **options: Any) -> Iterator[Batch]:
    x = torch.randn(24, 3, 8, 8, generator=source)
    y = torch.randint(0, 4, (24,), generator=source)
    yield from DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, generator=source, **options)


def network(source: torch.Generator) -> nn.Module:
    """Made without torch's global random stream, which the trials of a process share."""
    model = nn.utils.skip_init(nn.Conv2d, 3, 8, 3, padding=1), nn.utils.skip_init(nn.Linear, 8, 4)
    with torch.no_grad():
        for part in model:
            for parameter in part.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=source) * 0.1)
    return nn.Sequential(model[0], nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), model[1])


def train(job: Any, seed: int, feature: str) -> list[float]:
    source = torch.Generator().manual_seed(seed)
    model = network(source)
    if feature == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    called: Callable[[torch.Tensor], torch.Tensor] = model
    if feature == "compile":
        called = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=feature == "scaler")
    half = {"bfloat16": torch.bfloat16, "scaler": torch.float16}.get(feature)
    options = {"pinned": {"pin_memory": True}, "workers": {"num_workers": 1}}.get(feature, {})
    found = []
    for _ in range(2):
        for x, y in batches(source, **options):
            with job.iteration():
                if feature == "channels_last":
                    x = x.to(memory_format=torch.channels_last)
                optimizer.zero_grad()
                with torch.autocast("cpu", half) if half else contextlib.nullcontext():
                    loss = nn.functional.cross_entropy(called(x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                assert half is None or not torch.is_autocast_enabled("cpu")
                found.append(loss.item())
    return found


FEATURES = ("bfloat16", "scaler", "channels_last", "pinned", "workers")
#: How much a trial needs beside what stays: two of the first fit at once, and so have lanes of their own.
OWN, SHARED = 10, 60


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found")
@pytest.mark.parametrize(
    ("feature", "ephemeral"),
    [*((feature, lane) for feature in FEATURES for lane in (OWN, SHARED)), ("compile", SHARED)],
)
def test_two_trials_of_a_process_have_the_losses_they_have_alone(feature: str, ephemeral: int) -> None:
    with home() as directory:
        lanes = InProcessLanes("cpu", "device", capacity=100, policy="FAIR", directory=directory)
        need = Need(5, ephemeral)
        started = [lanes.start(f"t{seed}", lambda job, s=seed: train(job, s, feature), need) for seed in range(2)]
        shared = [future.result(120) for future in started]
    if feature == "compile":
        torch._dynamo.reset()  # what was compiled for the trials in lanes
    assert shared == [train(Alone(), seed, feature) for seed in range(2)]
    assert shared[0] != shared[1] and torch.tensor(shared).isfinite().all()


@pytest.mark.parametrize("neighbour", [True, False], ids=["beside another", "alone"])
def test_a_trial_that_compiles_beside_others_is_named(neighbour: bool, caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    compiled = threading.Event()

    def compiles(job: LaneJob) -> None:
        called = torch.compile(lambda x: x + 1, backend="eager")
        for _ in range(2):
            with job.iteration():
                called(torch.ones(2))
        compiled.set()

    def waits(job: LaneJob) -> None:
        with job.iteration():
            compiled.wait(120)

    with home() as directory, caplog.at_level(logging.WARNING, "salus_share"):
        lanes = InProcessLanes("cpu", "device", capacity=100, policy="FAIR", directory=directory)
        others = [lanes.start("waits", waits, Need(5, OWN))] if neighbour else []
        lanes.start("compiles", compiles, Need(5, OWN)).result(120)
        for future in others:
            future.result(120)
    said = [record.getMessage() for record in caplog.records if record.name == "salus_share.streams"]
    assert len(said) == neighbour and all("torch.compile" in line and "process of its own" in line for line in said)
