"""A finished run whose models are layers, for the tests of stages."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import torch
from ray import tune
from ray.tune import Checkpoint
from torch import nn

from tests.serving.runs import tuned

#: Inputs with which `Guard` fails, and ends its process.
FAILS, KILLS = [-1.0] * 8, [13.0] * 8
SAMPLES = [[0.5] * 8, [0.25] * 8]


class Guard(nn.Module):
    """Hands on what comes to it; a batch with `FAILS` or `KILLS` in it is another matter. A layer without weights."""

    def forward(self, rows):
        if (rows == KILLS[0]).all(1).any():
            os._exit(1)
        if (rows == FAILS[0]).all(1).any():
            raise ValueError("a negative row")
        return rows


class Slow(nn.Module):
    """Takes some seconds."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, rows):
        time.sleep(self.seconds)
        return rows


def network():
    """Five layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)).eval()


def train(config):
    with tempfile.TemporaryDirectory() as directory:
        torch.save(network().state_dict(), Path(directory, "weights.pt"))
        tune.report({"score": 1.0}, checkpoint=Checkpoint.from_directory(directory))


def run(storage: Path) -> Path:
    """Run one trial."""
    tuned(storage, "layers", train)
    return storage / "layers"


def load(directory, config):
    """The network as it is."""
    made = network()
    made.load_state_dict(torch.load(Path(directory, "weights.pt")))
    made.samples = SAMPLES
    return made


def load_guarded(directory, config):
    """The network with a guard before each layer, which takes a while."""
    layers = []
    for layer in load(directory, config):
        layers += [Slow(0.02), layer]
    made = nn.Sequential(Guard(), *layers)
    made.samples = SAMPLES
    return made


def whole(directory, rows):
    """What the network answers to each of the rows alone, in this process, as JSON would have it."""
    made = network()
    made.load_state_dict(torch.load(Path(directory, "weights.pt")))
    with torch.inference_mode():
        return [json.loads(json.dumps(made(torch.tensor([row])).tolist()[0])) for row in rows]
