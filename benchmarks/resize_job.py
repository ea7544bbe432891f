"""The two jobs of resize.py: one trial that is resized repeatedly, by FluidTune and by stock Ray Tune's pause.

Both jobs have the same trial: a convolutional network on a batch of digits, with one step and one checkpoint per
iteration, because a pause needs a checkpoint. ``fluidtune run`` runs `guests`: trials that end at once arrive now and
then, and each makes the long trial give up a worker and take it back. ``python`` runs `pause`: a scheduler pauses the
trial, changes its resources from one core to two or back, and lets it continue.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from typing import Any

import ray
import torch
from ray import tune
from ray.tune import Checkpoint, PlacementGroupFactory
from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher
from torch import nn
from torch.utils.data import DataLoader, Subset

from examples.digits_elastic import digits, network
from fluidtune import elastic

#: Seconds between two guests. In this time the long trial grows back and is measured.
APART = 2.0
#: Samples of a step. Enough work that two workers are faster than one; otherwise FluidTune does not grow it.
BATCH = 256
#: Samples of a step on a GPU. A GPU is done with `BATCH` samples before two of them have agreed on a sum.
GPU_BATCH = 64 * BATCH
#: Iterations between two pauses of the stock trial. Enough to reach a steady speed.
BETWEEN = 10


def train(config: dict[str, Any]) -> None:
    """One step on one batch per iteration, until the trial is stopped. A guest reports once and ends."""
    if config["guest"]:
        tune.report({"loss": 0.0})
        return
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = GPU_BATCH if device.type == "cuda" else BATCH
    known = digits()[0]
    data = Subset(known, [index % len(known) for index in range(size)])
    model = network(48).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=size, shuffle=True)
    start = 0
    checkpoint = tune.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            state = torch.load(os.path.join(directory, "state.pt"), map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"] + 1
    model, optimizer, loader = elastic.prepare(model, optimizer, loader)
    for step in elastic.epochs(start, 1_000_000):
        total, count = 0.0, 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            n = len(x)
            total, count = total + loss.item() * n, count + n
        loss_mean = total / count
        with tempfile.TemporaryDirectory() as directory:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, os.path.join(directory, "state.pt"))
            tune.report({"loss": loss_mean}, checkpoint=Checkpoint.from_directory(directory))


class Guests(Searcher):
    """Suggests the long trial, and then a guest `APART` seconds after the first result of the trial before it."""

    def __init__(self, guests: int) -> None:
        super().__init__(metric="loss", mode="min")
        self._left = guests
        self._begun = False
        #: When the next guest comes (time.monotonic); None until the newest trial has had its first result.
        self._next: float | None = None

    def over(self) -> bool:
        """Whether `APART` seconds have passed since the last guest."""
        return self._left == 0 and self._due()

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        if not self._begun:
            self._begun = True
            return {"guest": False}
        if self._left == 0 or not self._due():
            return None
        self._left -= 1
        self._next = None
        return {"guest": True}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        # The first result of the long trial or of a guest.
        if self._next is None and result["training_iteration"] == 1:
            self._next = time.monotonic() + APART

    def on_trial_complete(self, trial_id: str, result: dict | None = None, error: bool = False) -> None:
        pass

    def _due(self) -> bool:
        return self._next is not None and time.monotonic() > self._next


class UntilOver(FIFOScheduler):
    """Stops the long trial when `Guests.over`."""

    def __init__(self, guests: Guests) -> None:
        super().__init__()
        self._guests = guests

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        return TrialScheduler.STOP if self._guests.over() else TrialScheduler.CONTINUE


class Pauses(FIFOScheduler):
    """Pauses the trial after every `BETWEEN` iterations and lets it continue with the other number of devices."""

    def __init__(self, pauses: int, on_gpus: bool) -> None:
        super().__init__()
        self._left = pauses
        self._kinds = ("CPU", "GPU") if on_gpus else ("CPU",)
        self._count = 1
        self._since = 0
        self._decided: float | None = None
        #: Kind of change -> seconds from each decision to pause until the first result after it.
        self.seconds: dict[str, list[float]] = {"grow": [], "shrink": []}

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        if self._decided is not None:
            kind = "grow" if self._count == 2 else "shrink"
            self.seconds[kind].append(time.monotonic() - self._decided)
            self._decided, self._since = None, 0
        self._since += 1
        if self._since < BETWEEN:
            return TrialScheduler.CONTINUE
        if self._left == 0:
            return TrialScheduler.STOP
        self._left -= 1
        self._count = 3 - self._count
        self._decided = time.monotonic()
        return TrialScheduler.PAUSE

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        for trial in tune_controller.get_trials():
            if trial.status == Trial.PAUSED:
                trial.update_resources(PlacementGroupFactory([dict.fromkeys(self._kinds, self._count)]))
                return trial
        return super().choose_trial_to_run(tune_controller)


def main() -> None:
    parser = argparse.ArgumentParser(description="One trial, resized repeatedly.")
    parser.add_argument("how", choices=["guests", "pause"])
    parser.add_argument("--times", type=int, required=True, help="how often it grows, and shrinks")
    parser.add_argument("--gpus", type=int, default=0, choices=[0, 2], help="GPUs of the Ray cluster")
    parser.add_argument("--storage", required=True)
    parser.add_argument("--out", required=True, help="where the measurements go, JSON")
    args = parser.parse_args()
    ray.init(address="local", num_cpus=2, num_gpus=args.gpus, include_dashboard=False, log_to_driver=False)
    guests = Guests(args.times) if args.how == "guests" else None
    pauses = None if guests else Pauses(2 * args.times, bool(args.gpus))
    tune.Tuner(
        tune.with_resources(train, {"cpu": 1, "gpu": 1}) if args.gpus else train,
        param_space=None if guests else {"guest": False},
        tune_config=tune.TuneConfig(
            num_samples=args.times + 1 if guests else 1,
            search_alg=guests,
            scheduler=UntilOver(guests) if guests else pauses,
            metric="loss",
            mode="min",
        ),
        run_config=tune.RunConfig(
            name="job",
            storage_path=args.storage,
            verbose=0,
            checkpoint_config=tune.CheckpointConfig(num_to_keep=1),
        ),
    ).fit()
    with open(args.out, "w") as file:
        json.dump(pauses.seconds if pauses else {}, file)
    ray.shutdown()


if __name__ == "__main__":
    main()
