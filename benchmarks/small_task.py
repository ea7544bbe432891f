"""The trainable of a search over small models, as many people's first search is: a perceptron on scikit-learn's digits.

An epoch of 1,437 samples takes 10 to 40 ms alone on a core. The loop has the five lines of `fluidtune.elastic`, which
do nothing under stock Ray Tune, so every side runs the same code.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from ray import tune
from ray.tune import Checkpoint
from torch import nn
from torch.utils.data import DataLoader

from examples.digits_elastic import digits
from fluidtune import elastic


def small_space(epochs: int) -> dict[str, Any]:
    """The search space of the job."""
    return {
        "lr": tune.loguniform(1e-3, 1.0),
        "momentum": tune.uniform(0.0, 0.95),
        "width": tune.choice([16, 32, 64]),
        "batch_size": tune.choice([32, 64, 128]),
        "epochs": epochs,
        "seed": 0,
    }


def perceptron(width: int) -> nn.Module:
    """Three layers, of which the first two have ``width`` units."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def train(config: dict[str, Any]) -> None:
    """One trial: an epoch, the accuracy on the test set, a checkpoint and a report in each iteration."""
    torch.manual_seed(config["seed"])
    train_set, test_set = digits()
    model = perceptron(config["width"])
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])
    loader = DataLoader(train_set, batch_size=config["batch_size"], shuffle=True)
    images, labels = test_set.tensors
    start = 0
    checkpoint = tune.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            state = torch.load(os.path.join(directory, "state.pt"))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        start = state["epoch"] + 1
    model, optimizer, loader = elastic.prepare(model, optimizer, loader)
    for epoch in elastic.epochs(start, config["epochs"]):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(images).argmax(1) == labels).float().mean().item()
        with tempfile.TemporaryDirectory() as directory:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "rng": torch.get_rng_state(),
                "epoch": epoch,
            }
            torch.save(state, os.path.join(directory, "state.pt"))
            tune.report({"accuracy": accuracy}, checkpoint=Checkpoint.from_directory(directory))
