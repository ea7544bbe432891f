"""Lightning trials of many kinds; ``config["stock"]`` runs one as without FluidTune, with Lightning's own strategy.

A trial reports what Lightning has in its ``callback_metrics`` after each epoch.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from ray import tune
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics.classification import BinaryAccuracy

from fluidtune import elastic
from fluidtune.integrations.lightning import ElasticStrategy, ReportCallback

Report = Any


def data(samples: int = 53, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator)
    return TensorDataset(x, (x.sum(1, keepdim=True) > 0).float() + 0.1 * x[:, :1])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data(30))


class Batches:
    """An iterable that is no DataLoader."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        return iter(self.loader)


class Module(pl.LightningModule):
    """``kind``: see `KINDS`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        middle = [nn.BatchNorm1d(16)] if kind == "batch norm" else []
        self.net = nn.Sequential(nn.Linear(6, 16, bias=not middle), *middle, nn.Tanh(), nn.Linear(16, 1))
        if kind == "sparse":
            self.words = nn.Embedding(4, 2, sparse=True)
        if kind == "metric":
            self.accuracy = BinaryAccuracy()
        self.validated: list[torch.Tensor] = []
        self.automatic_optimization = kind != "two optimizers"

    def loss(self, batch: Any) -> torch.Tensor:
        if self.kind == "two loaders":
            return self.loss_of(*batch["a"]) + 0.5 * self.loss_of(*batch["b"])
        return self.loss_of(*batch)

    def loss_of(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(x), y, reduction="sum" if self.kind == "summed" else "mean")

    def training_step(self, batch: Any, index: int) -> torch.Tensor | None:
        if self.kind == "two optimizers":
            for optimizer in self.optimizers():
                loss = self.loss(batch)
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, 0.5, "norm")
                optimizer.step()
            self.lr_schedulers().step()
        else:
            loss = self.loss(batch)
        size = 8 if self.kind == "two loaders" else None
        if self.kind == "counted otherwise":
            size = batch[0].numel()
        self.log("last", loss)
        self.log("train", loss, on_step=True, on_epoch=True, batch_size=size)
        if self.kind != "two loaders":
            x = batch[0]
            self.log_dict({"samples": float(len(x))}, on_step=False, on_epoch=True, reduce_fx="sum")
            self.log("largest", x.max(), on_step=False, on_epoch=True, reduce_fx=torch.max)
        if self.kind == "metric":
            self.accuracy(self.net(batch[0]), (batch[1] > 0.5).int())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("epoch", float(self.current_epoch))

    def validation_step(self, batch: Any, index: int) -> None:
        loss = self.loss_of(*batch)
        self.validated.append(loss)
        self.log("val", loss, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("mean_of_val", torch.stack(self.validated).mean())
        self.validated.clear()

    def configure_optimizers(self) -> Any:
        if self.kind == "two optimizers":
            parts = list(self.net.parameters())
            first, second = torch.optim.SGD(parts[:2], lr=0.05), torch.optim.Adam(parts[2:], lr=0.01)
            return [first, second], [torch.optim.lr_scheduler.StepLR(second, 5, 0.7)]
        if self.kind in ("batch norm", "double"):
            optimizer: Any = torch.optim.Adam(self.parameters(), lr=0.01)
            steps = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=int(steps))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        parameters = self.net.parameters() if self.kind == "sparse" else self.parameters()
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        if self.kind == "stopping":
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val", "frequency": 2}}
        return optimizer


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.epochs = 0

    def train_dataloader(self) -> DataLoader:
        return DataLoader(data(), batch_size=8, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(data(21, 1), batch_size=10)


class Told(pl.Callback):
    """Reports what Lightning says of an epoch. ``widths``: the trial's, in the epochs that this worker has run."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.widths: list[int] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.widths.append(elastic.width())
        values = {name: value.item() for name, value in trainer.callback_metrics.items()}
        values["lr"] = trainer.optimizers[0].param_groups[0]["lr"]
        values["step"] = trainer.global_step
        self.report(values)


#: Kind -> what its Trainer is told beside. All batches but one have 8 samples, the last of an epoch 5.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch norm": {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2},
    "double": {"precision": "64-true", "val_check_interval": 0.5},
    "stopping": {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0},
    "two optimizers": {},
    "two loaders": {},
    "data module": {"limit_val_batches": 1},
    "processes": {"limit_train_batches": 5, "max_steps": 18},
}
#: Kinds whose losses depend on the width: that cannot be divided, and that are rounded.
MORE: dict[str, dict[str, Any]] = {"summed": {"gradient_clip_val": 0.3}, "mixed": {"precision": "bf16-mixed"}}
#: Kind -> what it is told beside, and a part of the line that says why it stays at one worker.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "stream": ({}, "IterableDataset"),
    "iterable": ({}, "the training data is a Batches"),
    "sparse": ({}, "sparse gradients"),
    "metric": ({}, "metric of torchmetrics"),
    "averaged": ({}, "StochasticWeightAveraging"),
    "reloaded": ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
    "counted otherwise": ({}, "batch_size=48 for a batch of 8 samples"),
}


def trial(config: dict[str, Any], report: Report) -> dict[str, Any]:
    """One fit. Returns how it ended, seen from this worker."""
    kind = config["kind"]
    leader = elastic.is_leader()
    folder = Path(config["folder"]) / ("leader" if leader else f"follower-{os.getpid()}")
    pl.seed_everything(3, workers=kind == "processes")
    told = Told(report)
    callbacks: list[pl.Callback] = [told, ModelCheckpoint(folder / "best", monitor="val", save_top_k=2)]
    if kind == "stopping":
        callbacks.append(EarlyStopping("val", patience=1, min_delta=0.2))
    if kind == "averaged":
        callbacks.append(StochasticWeightAveraging(1e-2))
    settings = {**KINDS, **MORE, **{name: told for name, (told, _) in REFUSED.items()}}[kind]
    trainer = pl.Trainer(
        max_epochs=config.get("stop", 8 if kind == "stopping" else 4),
        accelerator="cpu",
        devices=1,
        strategy="auto" if config.get("stock") else ElasticStrategy(),
        logger=CSVLogger(str(folder), name="logs", flush_logs_every_n_steps=1),
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=2,
        default_root_dir=str(folder),
        **settings,
    )
    module = Module(kind)
    if kind == "data module":
        trainer.fit(module, datamodule=Data())
    else:
        trainer.fit(module, training_data(kind), DataLoader(data(21, 1), batch_size=10))
    return {
        "weights": {name: value.double() for name, value in module.state_dict().items()},
        "epochs": trainer.current_epoch,
        "widths": told.widths,
        "best": Path(trainer.checkpoint_callback.best_model_path).name,
        "files": sorted(path.name for path in folder.rglob("*") if path.is_file()),
        "log": (folder / "logs" / "version_0" / "metrics.csv").read_text() if leader else "",
    }


def training_data(kind: str) -> Any:
    if kind == "two loaders":
        return {
            "a": DataLoader(data(48), batch_size=8, shuffle=True),
            "b": DataLoader(data(32, 5), batch_size=8, shuffle=True),
        }
    if kind == "stream":
        return DataLoader(Stream(), batch_size=8)
    loader = DataLoader(data(), batch_size=8, shuffle=True, num_workers=int(kind == "processes"))
    return Batches(loader) if kind == "iterable" else loader


def two_fits(config: dict[str, Any], report: Report) -> dict[str, Any]:
    """Trains, trains on with another Trainer, and tests."""
    pl.seed_everything(3)
    module = Module("plain")
    loader = DataLoader(data(), batch_size=8, shuffle=True)
    for _ in range(2):
        trainer = pl.Trainer(
            max_epochs=2,
            accelerator="cpu",
            strategy="auto" if config.get("stock") else ElasticStrategy(),
            logger=False,
            enable_checkpointing=False,
            callbacks=[Told(report)],
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader, DataLoader(data(21, 1), batch_size=10))
    (tested,) = trainer.validate(module, DataLoader(data(30, 2), batch_size=10), verbose=False)
    return {"weights": {name: value.double() for name, value in module.state_dict().items()}, "tested": tested["val"]}


class Slow(pl.Callback):
    """A step takes ``step`` seconds for each of its samples; a worker's process dies once, where it is told to.

    ``dies``: (at the start of this epoch, whether in the leader, the file that says that it has).
    """

    def __init__(self, step: float, dies: tuple[int, bool, str] | None) -> None:
        self.step, self.dies = step, dies

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        time.sleep(self.step * len(batch[0]))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if self.dies is None or trainer.current_epoch < self.dies[0] or Path(self.dies[2]).exists():
            return
        if elastic.width() > 1 and elastic.is_leader() == self.dies[1]:
            Path(self.dies[2]).touch()
            os.kill(os.getpid(), signal.SIGKILL)


def searched(config: dict[str, Any]) -> None:
    """A trial of Ray Tune, with or without a session."""
    pl.seed_everything(3)
    trainer = pl.Trainer(
        max_epochs=config["epochs"],
        accelerator="cpu",
        strategy=ElasticStrategy(),
        logger=False,
        enable_checkpointing=False,
        callbacks=[ReportCallback(), Slow(config["step"], config.get("dies"))],
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
    )
    checkpoint = tune.get_checkpoint()
    trainer.fit(
        Module("plain"),
        DataLoader(data(), batch_size=8, shuffle=True),
        DataLoader(data(21, 1), batch_size=10),
        ckpt_path=f"{checkpoint.to_directory()}/checkpoint.ckpt" if checkpoint else None,
    )
