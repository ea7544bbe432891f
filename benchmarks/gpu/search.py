"""A stock Ray Tune script for `benchmarks.gpu`: HyperBand over a small network that leaves a GPU idle much of the time.

Run by ``python`` or by ``fluidtune run``, with the same configurations. It adds one line of JSON about its own run to
``OUT/searches.jsonl``; of a run under FluidTune also what its event log says, and it copies the run's log and pictures
to ``OUT/SIDE``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune
from ray.tune import Checkpoint
from ray.tune.schedulers import HyperBandScheduler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.job import digits_space
from examples.digits_elastic import digits, network
from fluidtune import elastic
from fluidtune.report import EVENT_LOG_NAME, read_events

#: Seconds of an iteration in which a trial computes nothing, as one that waits for its data. Judgement: about as long
#: as the GPU computes, so that two trials fit into the time of one.
WAITS_S = 0.2
#: The folder in OUT in which Tune keeps a run while it lasts.
RUNS = "runs"


def train(config: dict[str, Any]) -> None:
    """Digits, with mixed precision and a checkpoint for each epoch; on a core where there is no GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    torch.manual_seed(config["seed"])
    seen, held_out = digits()
    images, labels = (tensor.to(device) for tensor in held_out.tensors)
    repeated = TensorDataset(*(tensor.repeat(config["repeat"], *[1] * (tensor.dim() - 1)) for tensor in seen.tensors))
    model = network(config["width"]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])
    scaler = torch.amp.GradScaler(device.type, enabled=on_gpu)
    loader = DataLoader(repeated, batch_size=config["batch_size"], shuffle=True, pin_memory=on_gpu)
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    start = 0
    checkpoint = tune.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            state = torch.load(os.path.join(directory, "state.pt"), map_location=device)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        start = state["epoch"] + 1
    model, optimizer, scaler, loader = elastic.prepare(model, optimizer, scaler, loader)
    for epoch in elastic.epochs(start, config["epochs"]):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.float16, enabled=on_gpu):
                loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        time.sleep(config["waits"])
        model.eval()
        with torch.no_grad():
            accuracy = (model(images).argmax(1) == labels).float().mean().item()
        with tempfile.TemporaryDirectory() as directory:
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**state, "epoch": epoch}, os.path.join(directory, "state.pt"))
            tune.report({"accuracy": accuracy}, checkpoint=Checkpoint.from_directory(directory))


def of_the_log(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What a reader wants to know of a run's event log."""
    placed: set[str] = set()
    found: dict[str, Any] = {"most_at_a_time": 0, "samples": 0, "memory_used": 0, "under_mps": 0}
    lost = dict.fromkeys(("worker_lost", "worker_replaced", "room_lacking", "recovered"), 0)
    busy = []
    for event in events:
        name = event["event"]
        if name == "trial_started":
            placed.add(event["trial"])
            found["most_at_a_time"] = max(found["most_at_a_time"], len(placed))
        elif name in ("trial_ended", "trial_suspended"):
            placed.discard(event["trial"])
        elif name == "worker_started":
            found["under_mps"] += bool(event.get("mps"))
        elif name == "device_sample":
            found["samples"] += 1
            found["memory_used"] = max(found["memory_used"], event["memory_used"])
            busy += [] if event["utilisation"] is None else [event["utilisation"]]
        elif name in lost:
            lost[name] += 1
    return {**found, "utilisation": sum(busy) / len(busy) if busy else None, "lost": lost}


def keep_run(run: Path, kept: Path) -> None:
    """Copy the event log, the summary and the pictures of a run under FluidTune, if there is one, to ``kept``."""
    files = [run / EVENT_LOG_NAME, run / "summary.json", *run.glob("*.png")]
    if files[0].exists():
        kept.mkdir(exist_ok=True)
        for path in files:
            if path.exists():
                shutil.copy(path, kept)


def main() -> None:
    parser = argparse.ArgumentParser(description="One side of the search of benchmarks.gpu.")
    parser.add_argument("--side", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--gpu", type=float, default=1.0, help="what a trial asks for; 0: a core alone")
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--repeat", type=int, default=24, help="how often an epoch sees the digits")
    args = parser.parse_args()
    storage = Path(args.out, RUNS).resolve()
    gpus = {"num_gpus": 1} if args.gpu else {"num_cpus": 2}
    ray.init(address="local", include_dashboard=False, log_to_driver=False, object_store_memory=1 << 29, **gpus)
    tuner = tune.Tuner(
        tune.with_resources(train, {"cpu": 1, **({"gpu": args.gpu} if args.gpu else {})}),
        param_space={
            **digits_space(args.epochs),
            "repeat": args.repeat,
            "waits": WAITS_S if args.gpu else 0.0,
        },
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            num_samples=args.trials,
            scheduler=HyperBandScheduler(max_t=args.epochs, reduction_factor=3),
            search_alg=tune.search.BasicVariantGenerator(random_state=0),
        ),
        run_config=tune.RunConfig(name="search", storage_path=str(storage), verbose=0),
    )
    began = time.time()
    grid = tuner.fit()
    seconds = time.time() - began
    good = [found.metrics for found in grid if "accuracy" in (found.metrics or {})]
    found = {
        "side": args.side,
        "fit_seconds": seconds,
        "best": max((metrics["accuracy"] for metrics in good), default=None),
        "iterations": sum(metrics["training_iteration"] for metrics in good),
        "trials": len(grid),
        "errors": [str(error)[-500:] for error in grid.errors],
    }
    run = storage / "search"
    if (run / EVENT_LOG_NAME).exists():
        found |= of_the_log(read_events(run / EVENT_LOG_NAME))
    keep_run(run, Path(args.out, args.side))
    with open(Path(args.out, "searches.jsonl"), "a") as file:
        file.write(json.dumps(found) + "\n")
    ray.shutdown()
    shutil.rmtree(storage)


if __name__ == "__main__":
    main()
