"""A stock Ray Tune script for `benchmarks.gpu`: HyperBand over a small residual network that half uses a GPU.

``--pace`` is run first: it makes the pictures, measures how fast this GPU trains alone, and writes to ``OUT/pace.json``
how many pictures an epoch has and how long it waits. Then each side is run by ``python`` or by ``fluidtune run``, with
the same configurations. It adds one line of JSON about its own run to ``OUT/searches.jsonl``; of a run under FluidTune
also what its event log says, and it copies the run's log and pictures to ``OUT/SIDE``.

The pictures are drawn: no data set needs to be there. A trial waits after each batch, as one whose data comes slowly.
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

import psutil
import ray
import torch
from ray import tune
from ray.tune import Checkpoint
from ray.tune.schedulers import HyperBandScheduler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fluidtune import elastic
from fluidtune.report import EVENT_LOG_NAME, read_events

#: Classes, and pictures that a trial is tried on. As CIFAR-10, with fewer of the latter.
CLASSES, HELD_OUT = 10, 2_000
#: The most pictures of an epoch (as CIFAR-10), those by which the pace is measured, and those of a rehearsal.
MOST, PACED, REHEARSED = 50_000, 8_192, 256
#: Channels of the first layer, on a GPU and on a core. 1.8 million parameters, a usual small network.
WIDTH, WIDTH_ON_CORE = 64, 4
#: Seconds for which the GPU computes in an epoch. The about fifty epochs of nine trials one after another,
#: with as long a wait in each, then take two minutes.
EPOCH_S = 1.0
#: The noise of a picture, where its class has about 0.6; on a core, where a trial sees few. The first leaves
#: trials with a poor learning rate behind.
NOISE, NOISE_ON_CORE = 2.0, 0.5
#: The folder in OUT in which Tune keeps a run while it lasts.
RUNS = "runs"


def pictures(count: int, seed: int, noise: float) -> TensorDataset:
    """Pictures of 32 x 32 in three colours, as bytes: noise over one of a class' 16 patterns."""
    patterns = torch.randn(CLASSES, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    patterns = nn.functional.interpolate(patterns, scale_factor=4, mode="bilinear")
    shifted = torch.stack([patterns.roll((2 * at // 4, 2 * at % 8), (2, 3)) for at in range(16)], dim=1)
    source = torch.Generator().manual_seed(seed)
    images = torch.empty(count, 3, 32, 32, dtype=torch.uint8)
    labels = torch.randint(CLASSES, (count,), generator=source)
    variants = torch.randint(16, (count,), generator=source)
    for start in range(0, count, 4096):
        part = slice(start, start + 4096)
        clear = shifted[labels[part], variants[part]]
        noisy = clear + noise * torch.randn(clear.shape, generator=source)
        images[part] = (128 + 25 * noisy).clamp(0, 255).to(torch.uint8)
    return TensorDataset(images, labels)


class Residual(nn.Module):
    """Two convolutions, and what went into them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layer(width, width), *layer(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def layer(wide: int, width: int) -> list[nn.Module]:
    return [nn.Conv2d(wide, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]


def network(width: int) -> nn.Sequential:
    """Three stages, each of half the size and twice as wide."""
    stages: list[nn.Module] = [*layer(3, width)]
    for at in range(2):
        stages += [*layer(width << at, width << (at + 1)), nn.MaxPool2d(2), Residual(width << (at + 1))]
    return nn.Sequential(*stages, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(4 * width, CLASSES))


def on_device(images: torch.Tensor, device: torch.device) -> torch.Tensor:
    moved = images.to(device, non_blocking=True, memory_format=torch.channels_last)
    return (moved.float() - 128) / 64


def train(config: dict[str, Any]) -> None:
    """Mixed precision, channels last, and a checkpoint for each epoch; on a core where there is no GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    torch.manual_seed(config["seed"])
    data = torch.load(config["data"], mmap=True)
    images, labels = data["images"][: config["images"]], data["labels"][: config["images"]]
    held_out = on_device(data["held_out"][: config["images"]], device)
    right = data["right"][: config["images"]].to(device)
    model = network(config["width"]).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"], nesterov=True)
    scaler = torch.amp.GradScaler(device.type, enabled=on_gpu)
    loader = DataLoader(
        TensorDataset(images, labels), batch_size=config["batch_size"], shuffle=True, pin_memory=on_gpu, drop_last=True
    )
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
        began, computed = time.perf_counter(), 0.0
        for x, y in loader:
            at = time.perf_counter()
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.float16, enabled=on_gpu):
                loss = nn.functional.cross_entropy(model(on_device(x, device)), y.to(device, non_blocking=True))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if on_gpu:
                torch.cuda.current_stream().synchronize()
            computed += time.perf_counter() - at
            time.sleep(config["waits"])
        idle = 1 - computed / (time.perf_counter() - began)
        model.eval()
        with torch.no_grad():
            found = torch.cat([model(part).argmax(1) for part in held_out.split(500)])
        accuracy = (found == right).float().mean().item()
        with tempfile.TemporaryDirectory() as directory:
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**state, "epoch": epoch}, os.path.join(directory, "state.pt"))
            report = {"accuracy": accuracy, "idle": idle, "computed": computed}
            tune.report(report, checkpoint=Checkpoint.from_directory(directory))


def space(pace: Mapping[str, Any], epochs: int) -> dict[str, Any]:
    """What is searched. ``pace``: what `set_pace` has written."""
    return {
        "lr": tune.loguniform(1e-3, 1.0),
        "momentum": tune.uniform(0.5, 0.95),
        "epochs": epochs,
        "seed": 0,
        **pace,
    }


def set_pace(out: Path, on_gpu: bool) -> dict[str, Any]:
    """Make the pictures, and an epoch of which a trial alone computes half; write both to ``out``."""
    count, noise = (MOST, NOISE) if on_gpu else (REHEARSED, NOISE_ON_CORE)
    seen, held_out = pictures(count, 1, noise).tensors, pictures(HELD_OUT, 2, noise).tensors
    path = out / "pictures.pt"
    torch.save({"images": seen[0], "labels": seen[1], "held_out": held_out[0], "right": held_out[1]}, path)
    pace: dict[str, Any] = {"data": str(path), "images": count, "waits": 0.0, "width": WIDTH_ON_CORE, "batch_size": 32}
    if on_gpu:
        pace |= {"images": PACED, "width": WIDTH, "batch_size": 128}
        reported: list[Mapping[str, Any]] = []
        real, tune.report = tune.report, lambda metrics, checkpoint=None: reported.append(metrics)
        try:
            # The first epoch is the one in which cuDNN looks for its kernels.
            train({**pace, "lr": 0.1, "momentum": 0.9, "epochs": 2, "seed": 0})
        finally:
            tune.report = real
        alone = reported[-1]
        batches = PACED // pace["batch_size"]
        loading = alone["computed"] / (1 - alone["idle"]) - alone["computed"]
        pace["images"] = min(MOST, max(PACED, int(PACED * EPOCH_S / alone["computed"])))
        pace["waits"] = max(0.0, alone["computed"] - loading) / batches
    (out / "pace.json").write_text(json.dumps(pace))
    return pace


def of_the_log(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What a reader wants to know of a run's event log."""
    placed: set[str] = set()
    found: dict[str, Any] = {"most_at_a_time": 0, "samples": 0, "memory_used": 0, "under_mps": 0}
    lost = dict.fromkeys(("worker_lost", "worker_killed", "room_lacking", "recovered"), 0)
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


def unfinished(side: str, run: Path, seconds: float) -> dict[str, Any]:
    """What a side had done when it was ended after ``seconds`` of its process. ``run``: its folder."""
    reported = sum(len(path.read_text().splitlines()) for path in run.glob("*/result.json"))
    found = {"side": side, "ended_after": seconds, "iterations": reported, "best": None, "idle": None, "errors": []}
    log = run / EVENT_LOG_NAME
    return {**found, **of_the_log(read_events(log) if log.exists() else [])}


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
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--side")
    what.add_argument("--pace", action="store_true", help="say what the sides train, and how long they wait")
    parser.add_argument("--out", required=True)
    parser.add_argument("--gpu", type=float, default=1.0, help="what a trial asks for; 0: a core alone")
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=9)
    args = parser.parse_args()
    if args.pace:
        print(json.dumps(set_pace(Path(args.out).resolve(), args.gpu > 0)))
        return
    pace = json.loads(Path(args.out, "pace.json").read_text())
    storage = Path(args.out, RUNS).resolve()
    gpus = {"num_gpus": 1} if args.gpu else {"num_cpus": 2}
    ray.init(address="local", include_dashboard=False, log_to_driver=False, object_store_memory=1 << 29, **gpus)
    tuner = tune.Tuner(
        tune.with_resources(train, {"cpu": 1, **({"gpu": args.gpu} if args.gpu else {})}),
        param_space=space(pace, args.epochs),
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
        "process_seconds": time.time() - psutil.Process().create_time(),
        "best": max((metrics["accuracy"] for metrics in good), default=None),
        "idle": sum(metrics["idle"] for metrics in good) / len(good) if good else None,
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
