"""The boundaries between the epochs of a Trainer, and what of its state a worker needs that joins there."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader
from torchmetrics import Metric

from fluidtune import elastic

from .late_iterators import LateIterators


class EpochBoundaries(Callback):
    """The first of the Trainer's callbacks: others begin their epoch with the state that a joiner has got.

    ``plain``: the fit keeps one worker. It has no boundaries then, and so no commits: not all of it is prepared.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.state = TrainerState(trainer)
        self.plain = False
        #: The user's DataLoaders that are trained on.
        self.loaders: list[DataLoader] = []
        self.iterators = LateIterators()
        #: The batch that a step trains on; None between epochs.
        self.batch: Any = None
        #: An epoch of training runs, its validations included: all workers are at the same place of Lightning's loops.
        self.in_epoch = False
        self._counts: bool | None = None
        #: The module's metrics of torchmetrics, and how often each had been updated before this step.
        self._metrics: list[Metric] = []
        self._updates: list[int] = []

    @property
    def together(self) -> bool:
        """Whether several workers are in the same epoch."""
        return self.in_epoch and elastic.width() > 1

    @property
    def counts(self) -> bool:
        """Whether this worker's samples of the batch count, and are not also another worker's."""
        if self._counts is None:
            self._counts = elastic.samples(1) > 0
        return self._counts

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.plain:
            return
        self.in_epoch = False  # the boundary itself is in no step of Lightning's
        self.iterators.end()
        limit = trainer.max_epochs
        reached = elastic.boundary(trainer.current_epoch, None if limit is None or limit < 0 else limit)
        if reached is None or self.state.over:
            self.state.over = True
            raise StopIteration  # the loop over the epochs ends at that, as at its last epoch
        self.in_epoch = True
        for loader in self.loaders:  # Lightning did so for the epoch that this worker began with
            set_epoch(loader, reached)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.batch, self._counts = batch, None
        if batch_idx == 0:
            self._metrics = [part for part in pl_module.modules() if isinstance(part, Metric)]
        self._updates = [metric.update_count for metric in self._metrics]

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.plain:
            return
        self._counts = self.counts  # asked once a batch, so that the session knows that the loop counts samples
        if self._updates != [metric.update_count for metric in self._metrics]:
            elastic.one_worker(
                "Lightning: a training step updates a metric of torchmetrics, which would see the samples of one "
                "worker: log what the step computes, or update the metric in validation"
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.batch, self._counts = None, None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        began, self.in_epoch = self.in_epoch, False
        if began:
            self.state.over = True
            self.iterators.end()
            elastic.boundary(trainer.current_epoch, trainer.current_epoch)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.in_epoch = False  # the other workers are elsewhere


class TrainerState:
    """What a joiner needs of the Trainer itself, beside model, optimizers and schedulers: a part of the trial's state.

    ``over``: the fit has run its last epoch.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.over = False

    def state_dict(self) -> dict[str, Any]:
        """As plain values and tensors."""
        trainer = self._trainer
        return {
            "loops": trainer.fit_loop.state_dict(),
            "callbacks": [
                (callback.state_key, getattr(callback, "dirpath", None), callback.state_dict())
                for callback in self._callbacks()
            ],
            "data": {} if trainer.datamodule is None else trainer.datamodule.state_dict(),
            "metrics": dict(trainer.callback_metrics),
            "should_stop": trainer.should_stop,
            "over": self.over,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the Trainer stand where the other one stands, before an epoch: its loops begin it as any epoch."""
        trainer = self._trainer
        loop = trainer.fit_loop
        loop.load_state_dict(state["loops"])
        epoch = loop.epoch_loop
        for each in (loop, epoch, epoch.val_loop, epoch.automatic_optimization, epoch.manual_optimization):
            each.on_iteration_done()  # else they would go on in the middle of an epoch
        for callback, (key, folder, part) in zip(self._callbacks(), state["callbacks"], strict=True):
            if callback.state_key != key:
                raise ValueError(f"this state has the callback {key} where this Trainer has {callback.state_key}")
            if folder is not None and not elastic.is_leader():
                callback.dirpath = folder  # the leader writes there; the others know of its files
            if part:
                callback.load_state_dict(part)
        if state["data"]:
            trainer.datamodule.load_state_dict(state["data"])
        device = trainer.strategy.root_device
        trainer.callback_metrics.update({name: value.to(device) for name, value in state["metrics"].items()})
        trainer.should_stop, self.over = state["should_stop"], state["over"]

    def _callbacks(self) -> list[Callback]:
        return [callback for callback in self._trainer.callbacks if not isinstance(callback, EpochBoundaries)]


def set_epoch(loader: DataLoader, epoch: int) -> None:
    """Say to the samplers that are seeded by an epoch which one begins."""
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if callable(say := getattr(sampler, "set_epoch", None)):
            say(epoch)
