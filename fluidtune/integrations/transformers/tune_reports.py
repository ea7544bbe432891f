"""Reports to Tune what the Trainer evaluates, logs and saves, once for each place in its loop."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any

from ray import tune
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

#: The folder in a checkpoint of Tune's, as Ray's own callback for Transformers calls it.
CHECKPOINT_NAME = "checkpoint"


class ReportCallback(TrainerCallback):
    """Calls ``tune.report`` for each evaluation while the Trainer trains; with every Trainer.

    A report has the metrics of the evaluation, the values that were logged last (``loss``, ``learning_rate``),
    ``epoch`` and ``step``. If the Trainer saves there, the report has a checkpoint: its folder "checkpoint" is one for
    ``trainer.train(resume_from_checkpoint=...)``. A Trainer that never evaluates reports what it logs, and one that
    saves elsewhere reports there as well.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._due = False
        self._training = False
        self._saved: str | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._values, self._due, self._saved, self._training = {}, False, None, True

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        if "train_loss" in logs:  # the last log of a training
            self.report(state)
        elif "loss" in logs and self._training:
            self._values.update(logs)
            self._due = self._due or args.eval_strategy == IntervalStrategy.NO

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: dict[str, Any], **_: Any
    ) -> None:
        if self._training:  # one of several data sets, perhaps
            self._values.update(metrics)
            self._due = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._saved = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        self._due = True

    def _next_place(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.report(state)

    on_step_begin = on_epoch_begin = on_epoch_end = _next_place

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.report(state)
        self._training = False

    def report(self, state: TrainerState) -> None:
        """Report what has come together since the last report: the Trainer's loop goes on to its next place."""
        if not self._due:
            return
        saved, self._saved, self._due = self._saved, None, False
        values = {**self._values, "epoch": state.epoch, "step": state.global_step}
        if saved is None:
            tune.report(values)
            return
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(saved, os.path.join(folder, CHECKPOINT_NAME))
            tune.report(values, checkpoint=tune.Checkpoint.from_directory(folder))
