"""Keras 3 in trials, on each of its backends: reports and checkpoints at the end of epochs, and going on from one.

Ray's own callback for Keras imports TensorFlow. This one imports Keras only.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
from ray import tune

from .metric_names import MetricNames, reported

__all__ = ["ReportCallback", "restored"]

#: What a checkpoint holds: the model as Keras saves it, its optimizer's state included, and the epochs that are done.
_MODEL, _EPOCHS = "model.keras", "epochs.json"


class ReportCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Reports to Ray Tune at the end of epochs, with a checkpoint of the model.

    Args:
        metrics: what of Keras' logs is reported: None: all of them; a name or names; or a mapping from the name that
            Tune sees to Keras' own.
        every: epochs from one report to the next; it also reports after the last epoch.
        checkpoint: whether each report comes with a checkpoint. `restored` reads it.

    Raises:
        ValueError: ``every`` is less than 1; at the end of an epoch: Keras has not logged one of ``metrics``.
    """

    def __init__(self, metrics: MetricNames = None, *, every: int = 1, checkpoint: bool = True) -> None:
        super().__init__()
        if every < 1:
            raise ValueError(f"every={every}: give a number of epochs, at least 1")
        self._metrics, self._every, self._checkpoint = metrics, every, checkpoint
        #: The last epoch that is done, from 1 on, with its logs, if it is not reported.
        self._waits: tuple[int, dict[str, Any]] | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Keras calls it."""
        self._waits = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Keras calls it. ``epoch`` counts from 0."""
        done = epoch + 1
        self._waits = done, dict(logs or {})
        if not done % self._every or done == self.params.get("epochs"):
            self._report()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Keras calls it, also where another callback has ended the training early."""
        if self._waits is not None:
            self._report()

    def _report(self) -> None:
        assert self._waits is not None
        (done, logs), self._waits = self._waits, None
        found = self._reported(logs)
        if not self._checkpoint:
            tune.report(found)
            return
        with tempfile.TemporaryDirectory() as folder:
            self.model.save(Path(folder, _MODEL))
            Path(folder, _EPOCHS).write_text(json.dumps(done))
            tune.report(found, checkpoint=tune.Checkpoint.from_directory(folder))

    def _reported(self, logs: dict[str, Any]) -> dict[str, float]:
        names = reported(self._metrics, logs)
        missing = [name for name in names.values() if name not in logs]
        if missing:
            logged = ", ".join(logs) or "nothing"
            raise ValueError(f"Keras has not logged {', '.join(missing)} in this epoch, but {logged}")
        return {name: float(logs[own]) for name, own in names.items()}


def restored(build: Callable[[], keras.Model], **options: Any) -> tuple[keras.Model, int]:
    """Return the model with which a trial goes on, and the number of epochs that it has done.

    A trial that begins has ``build()``, and 0. One that Tune has paused, or that lost its process, has the model of its
    last checkpoint, with the optimizer's state::

        model, start = restored(lambda: network(config))
        model.fit(x, y, initial_epoch=start, epochs=config["epochs"], callbacks=[ReportCallback()])

    Args:
        build: makes and compiles the model.
        options: further arguments of ``keras.saving.load_model``, such as ``custom_objects``.
    """
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return build(), 0
    with checkpoint.as_directory() as folder:
        return keras.saving.load_model(Path(folder, _MODEL), **options), json.loads(Path(folder, _EPOCHS).read_text())
