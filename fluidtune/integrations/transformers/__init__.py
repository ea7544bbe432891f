"""Trials of Hugging Face's Trainer that grow and shrink: two calls are all that changes in a script with Ray Tune.

    trainer = prepare_trainer(Trainer(..., callbacks=[ReportCallback()]))

To Transformers and Accelerate a trial is one process with one device: ``args.world_size`` is 1, at every width. The
Trainer's loop owns the epochs, and the elastic session divides beneath it what `elastic.prepare` divides:

| what | who does it |
| --- | --- |
| what the Trainer asks of itself for a batch: loader, items, loss; what is prepared | `elastic_trainer` |
| a boundary before each epoch and after the last; epochs that are done already | `epoch_boundaries` |
| the Trainer's own state for joiners and restarts | `trainer_progress` |
| files, loggers, progress bars: the leader's alone | `followers` |
| reports and checkpoints for Tune | `tune_reports` |

Evaluation and prediction are not divided: each worker does all of it, so that metrics are whole and decisions by them
are the same. What cannot be divided keeps the trial at one worker, and a line of the event log says why.
"""

from .elastic_trainer import prepare_trainer
from .tune_reports import ReportCallback

__all__ = ["ReportCallback", "prepare_trainer"]
