"""Loops of Accelerate; ``config["stock"]`` runs one with Accelerate's own Accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from fluidtune import elastic
from fluidtune.integrations.accelerate import ElasticAccelerator
from tests.elastic.trials import data

Report = Any


class Batches:
    """A batch sampler; ``said``: its length, None: it has none."""

    def __init__(self, said: int | None) -> None:
        self.said = said

    def __iter__(self) -> Any:
        return iter([list(range(at, at + 10)) for at in range(0, 50, 10)])

    def __len__(self) -> int:
        if self.said is None:
            raise TypeError("no length")
        return self.said


#: By kind, what the batch sampler says its length is.
LENGTHS = {"no length": None, "too long": 6, "too short": 4}


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(data(30))


def trial(config: dict[str, Any], report: Report) -> dict[str, Any]:
    """Accumulates two batches, clips, evaluates, and gathers in both modes. Kinds: see the branches."""
    kind, folder = config["kind"], Path(config["folder"])
    torch.manual_seed(3)
    how = DataLoaderConfiguration(use_seedable_sampler=kind in ("seeded", "rereads"))
    made = Accelerator if config.get("stock") else ElasticAccelerator
    accelerator = made(cpu=True, gradient_accumulation_steps=2, dataloader_config=how)
    middle = [nn.BatchNorm1d(16)] if kind == "normed" else []
    model: Any = nn.Sequential(nn.Linear(6, 16, bias=not middle), *middle, nn.Tanh(), nn.Linear(16, 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
    training: Any = DataLoader(Stream(), batch_size=8) if kind == "stream" else DataLoader(data(53), 8, shuffle=True)
    if kind in LENGTHS:
        training = DataLoader(data(53), batch_sampler=Batches(LENGTHS[kind]))
    validation: Any = DataLoader(data(21, 1), batch_size=10)
    model, optimizer, training, validation, scheduler = accelerator.prepare(
        model, optimizer, training, validation, scheduler
    )
    stop = config.get("stop", 4)
    for _ in range(stop) if config.get("stock") else accelerator.epochs(0, stop):
        model.train()
        losses = []
        for x, y in training:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            n = len(accelerator.gather_for_metrics(x))
            losses += accelerator.gather(loss.detach().repeat(len(x))).tolist()
            total = float(accelerator.reduce(x.sum()))
            average = float(accelerator.reduce({"y": y.mean()}, "mean")["y"] + accelerator.gather(y.mean()))
            if kind == "objects" and config.get("width") == elastic.width():
                accelerator.gather_for_metrics(["a"] * len(x))
        model.eval()
        with torch.no_grad():
            wrong = [(model(x) - y).square() for x, y in (training if kind == "rereads" else validation)]
        validated = float(torch.cat(accelerator.gather_for_metrics(wrong)).mean())
        total += float(wrong[0].sum())  # of the first batch, which tells one order from another
        rate = scheduler.get_last_lr()[0]
        counted = {"total": total, "last": float(n), "mean": average}  # of the last batch, whose parts differ in size
        report({"loss": sum(losses) / len(losses), "val": validated, "rate": rate, **counted})
        accelerator.save_state(str(folder / "state"))
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "main").touch()
    weights = {name: value.double() for name, value in model.state_dict().items()}
    return {"weights": weights, "leader": accelerator.is_main_process}
