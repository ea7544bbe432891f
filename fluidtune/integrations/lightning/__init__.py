"""Lightning trials that grow and shrink: a strategy and a callback are all that changes in a script with Ray Tune.

    trainer = L.Trainer(strategy=ElasticStrategy(), callbacks=[ReportCallback()])

To Lightning a trial is one process with one device: its world size is 1, at every width. Lightning's loops own the
epochs, and the elastic session divides beneath them what `elastic.prepare` divides:

| what | who does it |
| --- | --- |
| the device; what is prepared: training data, weights, optimizers, schedulers, the scaler | `elastic_strategy` |
| a boundary before each epoch and after the last; the Trainer's own state for joiners | `trainer_epochs` |
| ``self.log``: each value is combined over the batch, the same in all workers | `whole_values` |
| decisions to stop or to save: the leader's, or those of all | `elastic_strategy` |
| files, loggers, progress bars: the leader's alone | ``is_global_zero`` of the strategy |
| reports and checkpoints for Tune | `report_callback` |

Validation, test and prediction are not divided: each worker does all of it, so that metrics and what a module collects
are whole. What cannot be divided keeps the trial at one worker, and a line of the event log says why.

A loop of Fabric has an `ElasticFabric` in the place of its `Fabric` (`elastic_fabric`).
"""

from .elastic_fabric import ElasticFabric
from .elastic_strategy import ElasticStrategy
from .report_callback import ReportCallback

__all__ = ["ElasticFabric", "ElasticStrategy", "ReportCallback"]
