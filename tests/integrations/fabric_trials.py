"""Loops of Lightning's Fabric; ``config["stock"]`` runs one with Fabric itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from fluidtune.integrations.lightning import ElasticFabric
from tests.elastic.trials import data

Report = Any


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(data(30))


class Noisy(Dataset):
    """Draws a number for each sample, in the loader's process."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        x, y = data(48)[index]
        return x + torch.rand(()), y


def training_data(kind: str) -> DataLoader:
    if kind == "stream":
        return DataLoader(Stream(), batch_size=8)
    if kind == "noisy":
        return DataLoader(Noisy(), batch_size=8, num_workers=1)
    if kind in ("sampler", "rereads"):  # seeded by the epoch, which Fabric counts
        return DataLoader(data(53), batch_size=8, sampler=DistributedSampler(data(53), num_replicas=1, rank=0))
    return DataLoader(data(53), batch_size=8, shuffle=True)


def trial(config: dict[str, Any], report: Report) -> dict[str, Any]:
    """Accumulates two batches, clips, evaluates, reduces and gathers. Kinds: see the branches."""
    kind, folder = config["kind"], Path(config["folder"])
    told: dict[str, Any] = {"accelerator": "cpu", "precision": "64-true" if kind == "double" else "32-true"}
    logger = CSVLogger(folder / "logs", flush_logs_every_n_steps=1)
    fabric = (Fabric if config.get("stock") else ElasticFabric)(devices=1, loggers=logger, **told)
    fabric.seed_everything(3, verbose=False)
    middle = [nn.BatchNorm1d(16)] if kind == "double" else []
    model: Any = nn.Sequential(nn.Linear(6, 16, bias=not middle), *middle, nn.Tanh(), nn.Linear(16, 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
    if kind == "sampler":
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(optimizer)
    elif kind == "compiled":
        model, optimizer = fabric.setup(torch.compile(model, backend="eager"), optimizer)
    else:
        model, optimizer, scheduler = fabric.setup(model, optimizer, scheduler=scheduler)
    training, validation = fabric.setup_dataloaders(training_data(kind), DataLoader(data(21, 1), batch_size=10))
    stop = config.get("stop", 4)
    for epoch in range(stop) if config.get("stock") else fabric.epochs(0, stop):
        model.train()
        total, count, largest, seen = 0.0, 0, 0.0, 0.0
        for number, (x, y) in enumerate(training):
            loss = nn.functional.mse_loss(model(x), y)
            fabric.backward(loss)
            if number % 2:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
                if kind != "sampler":
                    scheduler.step()
            rows = fabric.all_gather(y)
            count += len(rows)
            total += float(fabric.all_reduce(loss.detach())) * len(rows)
            largest = max(largest, float(fabric.all_reduce(x.max(), reduce_op="max")))
            seen += float(fabric.all_gather({"sum": fabric.all_reduce(y.sum(), reduce_op="sum")})["sum"])
            if kind == "joined" and number == 1:
                fabric.all_gather(y, sync_grads=True)
        model.eval()
        with torch.no_grad():
            wrong = torch.cat([(model(x) - y).square() for x, y in (training if kind == "rereads" else validation)])
        values = {"loss": total / count, "count": count, "largest": largest, "seen": seen}
        values["val"] = float(fabric.all_reduce(wrong.mean()))
        values["first"] = float(wrong[:8].sum())  # tells one order from another
        values["epoch"] = float(fabric.broadcast(epoch))
        report(values)
        fabric.log_dict(values, step=epoch)
        fabric.save(folder / "state.ckpt", {"model": model, "optimizer": optimizer})
    if fabric.global_rank == 0:
        (folder / "main").touch()
    return {
        "weights": {name: value.double() for name, value in model.state_dict().items()},
        "leader": fabric.is_global_zero,
        "files": sorted(path.name for path in folder.rglob("*") if path.is_file()),
    }
