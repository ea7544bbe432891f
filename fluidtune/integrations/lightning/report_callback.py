"""Reports to Tune what Lightning has logged, with a checkpoint, once an epoch of training."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from ray import tune

from ..metric_names import MetricNames, reported

#: The file of the checkpoint, as Ray's own callbacks for Lightning call it.
CHECKPOINT_NAME = "checkpoint.ckpt"


class ReportCallback(Callback):
    """Calls ``tune.report`` at the end of each epoch, when its validation is done; with every strategy.

    The checkpoint's file is "checkpoint.ckpt", for ``trainer.fit(model, ckpt_path=...)``. What a module logs in its own
    ``on_train_epoch_end`` comes after the report, and is in the next one.

    Args:
        metrics: what is reported of `Trainer.callback_metrics`: names; or a dict, a reported name to Lightning's; None:
            all of it. A metric that is not there in an epoch is left out of its report. ``epoch``, from 0, and
            ``step``, the optimizer steps so far, are always in it.
    """

    def __init__(self, metrics: MetricNames = None) -> None:
        self._metrics = metrics

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = trainer.callback_metrics
        wanted = reported(self._metrics, found).items()
        report: dict[str, Any] = {name: found[of].item() for name, of in wanted if of in found}
        report.update(epoch=trainer.current_epoch, step=trainer.global_step)
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(os.path.join(folder, CHECKPOINT_NAME))
            tune.report(report, checkpoint=tune.Checkpoint.from_directory(folder))
