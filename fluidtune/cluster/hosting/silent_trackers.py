"""Has trackers record nothing of a follower, also where the trial's code itself names a mode or a place.

Weights & Biases is disabled, which is its own mode for a run that records nothing. MLflow and TensorBoard write into
the follower's folder, which is removed with it. What scripts call is replaced where its module is imported already or
is on the fork server's shelf, else as soon as the trial imports it.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from fluidtune.cluster.forks.shelf import shelf_here

#: Module -> what scripts call there -> the parameter that is overruled.
_CALLS = {
    "wandb": {"init": "mode"},
    "mlflow": {"set_tracking_uri": "uri"},
    "mlflow.tracking": {"set_tracking_uri": "uri"},
    "mlflow.tracking.client": {"MlflowClient.__init__": "tracking_uri"},
    "torch.utils.tensorboard.writer": {"SummaryWriter.__init__": "log_dir"},
    "tensorboardX.writer": {"SummaryWriter.__init__": "logdir"},
}


@contextmanager
def silent(folder: str) -> Iterator[None]:
    """Trackers of this process record nothing outside ``folder`` meanwhile."""
    with ExitStack() as meanwhile:
        silence = _Silence(folder, meanwhile)
        sys.meta_path.insert(0, silence)  # type: ignore[arg-type]
        meanwhile.callback(sys.meta_path.remove, silence)
        shelf = shelf_here()
        for name in _CALLS:
            module = sys.modules.get(name) or (None if shelf is None else shelf.module(name))
            if module is not None:
                silence.over(name, module)
        yield


class _Silence:
    """A finder in front of all others. What it replaces is put back when ``meanwhile`` ends.

    The process' environment, which it changes, is put back when the worker is unloaded (`ProcessBaseline`).
    """

    def __init__(self, folder: str, meanwhile: ExitStack) -> None:
        place = Path(folder, "mlruns").as_uri()
        self._values = {"mode": "disabled", "uri": place, "tracking_uri": place, "log_dir": folder, "logdir": folder}
        self._meanwhile, self._looking = meanwhile, False
        # MLflow 3 keeps files only if it is allowed to; a database would need a further library, and seconds.
        os.environ.update(WANDB_MODE="disabled", MLFLOW_TRACKING_URI=place, MLFLOW_ALLOW_FILE_STORE="true")

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """A finder's part of an import."""
        shelf = shelf_here()
        if name not in _CALLS or self._looking or (shelf is not None and shelf.module(name) is not None):
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_and_replace(module: ModuleType) -> None:
                execute(module)
                self.over(name, module)

            loader.exec_module = execute_and_replace
        return spec

    def over(self, name: str, module: ModuleType) -> None:
        """Overrule what scripts call in this module."""
        for path, parameter in _CALLS[name].items():
            *owners, last = path.split(".")
            owner = functools.reduce(getattr, owners, module)
            before, value = getattr(owner, last), self._values[parameter]
            if name == "mlflow.tracking" and name in sys.modules:
                before(value)  # a module of the trial's may have named a place when it was imported
            setattr(owner, last, _overruled(before, parameter, value))
            self._meanwhile.callback(setattr, owner, last, before)


def _overruled(function: Callable[..., Any], parameter: str, value: str) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def overruled(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.arguments[parameter] = value
        return function(*given.args, **given.kwargs)

    return overruled
