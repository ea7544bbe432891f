"""The boundaries between the epochs of a Trainer, and how its loop comes to the epoch at which a worker begins."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fluidtune import elastic
from fluidtune.elastic.random_streams import Streams, capture_streams, restore_streams

from .followers import NeverSaves
from .trainer_progress import TrainerProgress
from .tune_reports import ReportCallback


class EpochBoundaries(TrainerCallback):
    """The first of the Trainer's callbacks: others begin with the state that a joiner has got.

    A Trainer counts its epochs from 0 or from a checkpoint, and asks nobody. So the epochs that are done already, when
    a worker joins or goes on from a commit, pass without a batch, and no other callback hears of them.

    ``prepare``: hands the Trainer's objects to `elastic.prepare`; False if the training keeps one worker. It has no
    boundaries then, and so no commits. ``of_all``: what all workers count of the batch that a step was about.
    """

    def __init__(self, trainer: Trainer, prepare: Callable[[], bool], of_all: Callable[[int], int]) -> None:
        self._trainer, self._prepare, self._of_all = trainer, prepare, of_all
        self.progress = TrainerProgress(trainer)
        #: The epoch at which the Trainer stands, and the one that this worker begins with.
        self._epoch = self._first = 0
        #: The training has boundaries, and has not come to its last one.
        self._runs = False
        #: An epoch that is done already passes.
        self.passing = False
        self._hidden: list[TrainerCallback] = []
        self._streams: Streams | None = None
        self._evaluates_first = False
        #: Tokens that the Trainer had seen before this batch.
        self._tokens = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl | None:
        self.progress.over = self.passing = False
        self._runs = elastic.current() is not None and self._prepare()
        if not self._runs:
            return None
        self._epoch = state.global_step // self._steps_of_epoch()
        reached = elastic.boundary(self._epoch, state.num_train_epochs)
        if reached is None or reached >= state.num_train_epochs:
            self.progress.over = True
        self._first = self._epoch if reached is None else reached
        self._runs = not self.progress.over
        self._evaluates_first = args.eval_on_start
        if self._first > self._epoch or self.progress.over:
            args.eval_on_start = False
            self._streams = capture_streams()  # a Trainer that resumes from a checkpoint takes those of the checkpoint
        return None if elastic.is_leader() else NeverSaves(**vars(control))

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        callbacks = self._trainer.callback_handler.callbacks
        self.passing = self.progress.over or (self._runs and self._epoch < self._first)
        if self.passing:
            self._hidden += callbacks[1:]
            del callbacks[1:]
            control.should_epoch_stop = True
            logging.getLogger("transformers.trainer").addFilter(_no_empty_epoch)
            return
        self._tokens = state.num_input_tokens_seen
        if not self._runs:
            return
        if self._epoch > self._first:
            self._report(state)  # of the epoch before, which a commit here must not lose
            elastic.boundary(self._epoch, state.num_train_epochs)
        self._stop_passing(args)

    def _after_batch(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._runs and args.include_num_input_tokens_seen != "no":
            self._tokens += self._of_all(state.num_input_tokens_seen - self._tokens)
            state.num_input_tokens_seen = self._tokens

    on_substep_end = on_step_end = _after_batch

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._epoch += 1
        if self.passing:
            control.should_epoch_stop = False
            control.should_training_stop = self.progress.over

    def _stop_passing(self, args: TrainingArguments) -> None:
        self.passing = False
        # The handler goes through its list now: so the others hear of this.
        hidden, self._hidden = self._hidden, []
        self._trainer.callback_handler.callbacks.extend(hidden)
        logging.getLogger("transformers.trainer").removeFilter(_no_empty_epoch)
        args.eval_on_start = self._evaluates_first
        if self._streams is not None:
            restore_streams(self._streams)
            self._streams = None

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        if "train_loss" not in logs:
            return
        if self.passing:
            self._stop_passing(args)
        if not self._runs:
            return
        # The last log, before the Trainer loads its best model: until here all workers have the same one.
        self._report(state)
        self._runs = False
        self.progress.over = True
        elastic.boundary(self._epoch, self._epoch)
        if not elastic.is_leader():
            state.best_model_checkpoint = None  # it is among the leader's files

    def _report(self, state: TrainerState) -> None:
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, ReportCallback):
                callback.report(state)

    def _steps_of_epoch(self) -> int:
        """As `Trainer.set_initial_training_values` counts them."""
        batches = len(self._trainer.callback_handler.train_dataloader)
        return max(-(-batches // self._trainer.args.gradient_accumulation_steps), 1)


def _no_empty_epoch(record: logging.LogRecord) -> bool:
    """Whether a line of the Trainer's is not about an epoch that passed without a batch."""
    return "not to be a single sample" not in str(record.msg)
