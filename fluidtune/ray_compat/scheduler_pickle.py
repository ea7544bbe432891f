"""A scheduler of Tune as bytes: trials are in it by their ids, and nothing of Tune's controller is.

A restored driver has other objects for the same trials. Where it unpickles the scheduler, it puts these in.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

from ray import cloudpickle
from ray.train._internal.session import _FutureTrainingResult
from ray.tune.execution.tune_controller import TuneController
from ray.tune.experiment import Trial


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, scheduler: Any, owners: dict[int, str]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        #: HyperBand's attributes have functions that know it.
        self._scheduler = scheduler
        #: The trial of each checkpoint that was being saved, by the future's identity.
        self._owners = owners

    def persistent_id(self, obj: Any) -> tuple[str, str | None] | None:
        """What is in the place of the scheduler, a trial, a checkpoint that was being saved, and the driver's own."""
        if obj is self._scheduler:
            return "scheduler", None
        if isinstance(obj, Trial):
            return "trial", obj.trial_id
        if isinstance(obj, _FutureTrainingResult):
            return "checkpoint", self._owners.get(id(obj))
        if isinstance(obj, TuneController) or type(obj).__name__ == "TrialRunnerWrapper":
            return "nothing", None
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, scheduler: Any, trial_called: Callable[[str], Trial]) -> None:
        super().__init__(file)
        self._scheduler, self._trial_called = scheduler, trial_called

    def persistent_load(self, pid: tuple[str, str | None]) -> Any:
        kind, name = pid
        if name is None:
            return self._scheduler if kind == "scheduler" else None
        trial = self._trial_called(name)
        return trial if kind == "trial" else trial.checkpoint


def pickled(scheduler: Any, more: Any) -> bytes:
    """The scheduler's attributes, and ``more``. Raises whatever an attribute raises that cannot be pickled."""
    states = getattr(scheduler, "_trial_state", None)  # PBT's; the median stopping rule has an empty one
    futures = states.items() if isinstance(states, dict) else ()
    owners = {id(kept.last_checkpoint): t.trial_id for t, kept in futures if hasattr(kept, "last_checkpoint")}
    file = io.BytesIO()
    _Pickler(file, scheduler, owners).dump((vars(scheduler), more))
    return file.getvalue()


def unpickled(content: bytes, scheduler: Any, trial_called: Callable[[str], Trial]) -> tuple[dict[str, Any], Any]:
    """The attributes and ``more`` of `pickled`, for this ``scheduler``. ``trial_called``: the trial with an id."""
    attributes, more = _Unpickler(io.BytesIO(content), scheduler, trial_called).load()
    return attributes, more


def trial_gone(name: str) -> Trial:
    """Stands for a trial that the scheduler knows and the restored run has not: it began anew under another id."""
    trial = Trial("", stub=True, trial_id=name)
    trial.status = Trial.TERMINATED
    return trial


def perturbations(scheduler: Any) -> int:
    """How often a population has given a trial another one's state. Its iterations are counted anew then."""
    return getattr(scheduler, "_num_perturbations", 0)
