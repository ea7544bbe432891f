"""The jobs of growth_frameworks.py: a small network of Lightning or Transformers, whose training gets a second core.

`lightning` and `transformers` are run by ``fluidtune run``: short trials come and go, as in resize_job.py, and the
long trial grows each time. `train_v2` is the Lightning module in a ``TorchTrainer`` with ``num_workers=(1, 2)`` in a
cluster of one core; a second node of one core joins when the first worker has trained for a while. `restart` is the
same module under Lightning alone: a process is asked to save its checkpoint and end, and one with two devices goes on
from it.

An epoch is one step. Each step of the first worker adds a line to a file: when it was done (seconds), and the width.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import ray
import torch
from ray import tune
from ray.cluster_utils import Cluster
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.resize_job import BATCH, Guests, UntilOver
from examples.digits_elastic import digits, network

#: Steps of a rival with one worker before it is to have two. Enough to reach a steady speed.
BEFORE = 20
#: Seconds between two looks at what a job has written. Small beside a second.
LOOK_S = 0.01
#: Seconds between two looks of Ray Train at what the cluster has for another worker. Ray's default is 60; this is the
#: shortest interval at which it asks (ElasticScalingPolicy.GET_RESERVED_RESOURCES_INTERVAL_S).
TRAIN_LOOKS_S = 1.0
#: More epochs than anyone waits for.
EPOCHS = 100_000


def data() -> TensorDataset:
    known = digits()[0]
    return TensorDataset(*known[:BATCH])


class Module(pl.LightningModule):
    """The network of resize_job.py."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network(48)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Noted(pl.Callback):
    """Notes each step, and ends the training, with a checkpoint, when there is a file "stop"."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 0:
            with (self._place / "steps").open("a") as file:
                file.write(f"{time.time()} {trainer.world_size}\n")

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.strategy.broadcast((self._place / "stop").exists()):
            trainer.save_checkpoint(self._place / "saved.ckpt")
            trainer.should_stop = True


def fit(ckpt_path: str | None = None, batch: int = BATCH, **told: Any) -> None:
    torch.manual_seed(0)
    told = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, **told}
    trainer = pl.Trainer(max_epochs=EPOCHS, accelerator="cpu", enable_checkpointing=False, **told)
    trainer.fit(Module(), DataLoader(data(), batch_size=batch, shuffle=True), ckpt_path=ckpt_path)


# --- under FluidTune


def with_lightning(config: dict[str, Any]) -> None:
    from ray.tune.integration.pytorch_lightning import TuneReportCheckpointCallback

    if config["guest"]:
        tune.report({"loss": 0.0})
        return
    fit(devices=1, callbacks=[TuneReportCheckpointCallback(["loss"], on="train_epoch_end")])


def with_transformers(config: dict[str, Any]) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(48)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            scores = self.net(x)
            return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}

    class Report(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **more: Any) -> None:
            tune.report(dict(logs))

    if config["guest"]:
        tune.report({"loss": 0.0})
        return
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir="trainer",
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        logging_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = [{"x": x, "labels": y} for x, y in data()]
    Trainer(model=Network(), args=args, train_dataset=rows, callbacks=[Report()]).train()


def under_fluidtune(how: str, times: int, storage: str) -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    guests = Guests(times)
    searched = tune.TuneConfig(
        num_samples=times + 1, search_alg=guests, scheduler=UntilOver(guests), metric="loss", mode="min"
    )
    kept = tune.CheckpointConfig(num_to_keep=1)
    run = tune.RunConfig(name="job", storage_path=storage, verbose=0, checkpoint_config=kept)
    train = with_lightning if how == "lightning" else with_transformers
    tune.Tuner(train, tune_config=searched, run_config=run).fit()


# --- the rivals


def steps(place: Path) -> list[tuple[float, int]]:
    """When each step was done, and with how many workers."""
    noted = place / "steps"
    lines = noted.read_text().splitlines() if noted.exists() else []
    return [(float(when), int(width)) for when, width in (line.split() for line in lines)]


def await_width(place: Path, width: int, count: int) -> list[tuple[float, int]]:
    """The steps, when there are so many with this width."""
    while True:
        found = steps(place)
        if sum(of == width for _, of in found) >= count:
            return found
        time.sleep(LOOK_S)


def figures(place: Path, ordered: float) -> dict[str, float]:
    """Seconds of one growth: from the order to the first step with two workers, and the longest time without a step."""
    found = await_width(place, 2, 2)
    first = next(when for when, width in found if width == 2)
    times = [when for when, _ in found if when <= first]
    pause = max(after - before for before, after in itertools.pairwise(times) if after > ordered)
    return {"grow": first - ordered, "stall": pause}


def in_a_worker(config: dict[str, Any]) -> None:
    from ray import train
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback

    checkpoint = train.get_checkpoint()
    fit(
        ckpt_path=None if checkpoint is None else os.path.join(checkpoint.to_directory(), "checkpoint.ckpt"),
        batch=BATCH // train.get_context().get_world_size(),
        devices="auto",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback(), Noted(Path(config["place"]))],
    )


def train_v2(place: Path) -> dict[str, float]:
    """One growth of a group of Ray Train."""
    from ray import train
    from ray.train.torch import TorchTrainer

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    scaling = train.ScalingConfig(num_workers=(1, 2), elastic_resize_monitor_interval_s=TRAIN_LOOKS_S)
    run = train.RunConfig(storage_path=str(place), checkpoint_config=train.CheckpointConfig(num_to_keep=1))
    config = {"place": str(place)}
    trainer = TorchTrainer(in_a_worker, train_loop_config=config, scaling_config=scaling, run_config=run)
    thread = threading.Thread(target=trainer.fit)
    thread.start()
    await_width(place, 1, BEFORE)
    cluster.add_node(num_cpus=1)
    found = figures(place, time.time())
    (place / "stop").touch()
    thread.join()
    ray.shutdown()
    cluster.shutdown()
    return found


def restart(place: Path) -> dict[str, float]:
    """One growth by Lightning's own means: end, and begin with two devices from the checkpoint."""
    command = [sys.executable, "-m", "benchmarks.growth_job", "alone", "--storage", str(place), "--devices"]
    one = subprocess.Popen([*command, "1"])
    await_width(place, 1, BEFORE)
    ordered = time.time()
    (place / "stop").touch()
    one.wait()
    (place / "stop").unlink()
    two = subprocess.Popen([*command, "2"])
    found = figures(place, ordered)
    (place / "stop").touch()
    two.wait()
    return found


def alone(place: Path, devices: int) -> None:
    """A process of `restart`."""
    saved = place / "saved.ckpt"
    path = str(saved) if saved.exists() else None
    told = {"strategy": "ddp"} if devices > 1 else {}
    fit(ckpt_path=path, batch=BATCH // devices, devices=devices, callbacks=[Noted(place)], **told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("how", choices=["lightning", "transformers", "train_v2", "restart", "alone"])
    parser.add_argument("--times", type=int, default=1, help="how often it grows")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--out", help="where the measurements of a rival go, JSON")
    args = parser.parse_args()
    if args.how == "alone":
        alone(Path(args.storage), args.devices)
        return
    if args.how in ("lightning", "transformers"):
        under_fluidtune(args.how, args.times, args.storage)
        return
    grown = {"train_v2": train_v2, "restart": restart}[args.how]
    found = [grown(Path(tempfile.mkdtemp(dir=args.storage))) for _ in range(args.times)]
    Path(args.out).write_text(json.dumps({key: [each[key] for each in found] for key in ("grow", "stall")}))


if __name__ == "__main__":
    main()
