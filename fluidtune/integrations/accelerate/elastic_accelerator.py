"""An Accelerator for loops whose trial can have several workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType, is_compiled_module, recursively_apply
from torch.utils.data import DataLoader

from fluidtune import elastic

from ..sharded_models import sharded_because
from ..written_loop import WrittenLoop
from .divided_loader import DividedLoader


class ElasticAccelerator(Accelerator):
    """An `Accelerator`, with its parameters; outside a FluidTune worker nothing else.

    Iterate over `epochs` where the loop would iterate over `range`. The loss that `backward` gets must be a mean over
    the samples of the batch: see `fluidtune.elastic.prepare`, which says what else must hold.

    A loader that was prepared gives this worker's parts of the batches while a prepared model is in training mode, and
    whole batches while all are in evaluation mode. `gather`, `gather_for_metrics` and `reduce` are over all workers in
    the first case. In the second each worker has all, and they return what they get.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loop = WrittenLoop("Accelerate")
        self._begun = False

    def epochs(self, start: int, stop: int) -> Iterable[int]:
        """Yield start .. stop-1. Before each of them the trial can be resized; see `fluidtune.elastic.epochs`."""
        return self._loop.epochs(start, stop)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        prepared = super().prepare(*args, device_placement=device_placement)
        if elastic.current() is None or self._loop.plain:
            return prepared
        parts = prepared if isinstance(prepared, tuple) else (prepared,)
        try:
            self._refuse()
            parts = tuple(self._divided(part) for part in parts)
        except TypeError as error:
            self._loop.keep_one_worker(error)
            return prepared
        return parts if isinstance(prepared, tuple) else parts[0]

    def _refuse(self) -> None:
        if self.distributed_type != DistributedType.NO or self.num_processes > 1:
            kind = self.distributed_type.value
            raise TypeError(f"Accelerate trains in its own way over processes or devices ({kind})")
        if self.device.type not in ("cpu", "cuda"):
            raise TypeError(f"the loop trains on {self.device}, and not on a CPU or a CUDA GPU")
        if not self._begun:
            self._begun = True
            elastic.prepare(*([] if self.scaler is None else [self.scaler]), self._loop, _Steps(self))

    def _divided(self, part: Any) -> Any:
        if isinstance(part, AcceleratedOptimizer):
            elastic.prepare(part.optimizer)
        elif isinstance(part, AcceleratedScheduler):
            elastic.prepare(part.scheduler)
        elif isinstance(part, DataLoader):
            part = DividedLoader(part, self, self._loop)
            self._loop.loaders.append(part)
        elif isinstance(part, torch.nn.Module):
            if is_compiled_module(part):
                raise TypeError("a compiled model makes a step of which FluidTune sees no parts")
            if why := sharded_because(part):
                raise TypeError(why)
            elastic.prepare(part)
            self._loop.models.append(part)
        return part

    # -- what is over all processes, where there is one --

    def gather(self, tensor: Any) -> Any:
        return recursively_apply(self._loop.gathered, tensor) if self._loop.together else super().gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        if self._loop.together:
            try:  # as Accelerate finds out whether it gathers objects
                recursively_apply(lambda tensor: tensor, input_data, error_on_other_type=True)
            except TypeError:
                use_gather_object = True
            if use_gather_object:
                self._loop.cannot("gather_for_metrics() gets something else than tensors in training mode")
        return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        if not self._loop.together or reduction == "none":
            return super().reduce(tensor, reduction, scale)
        return recursively_apply(self._loop.reduced, tensor, reduction)

    # -- what one process does for all --

    @property
    def is_main_process(self) -> bool:
        return bool(super().is_main_process) and elastic.is_leader()

    @property
    def is_local_main_process(self) -> bool:
        return bool(super().is_local_main_process) and elastic.is_leader()

    def print(self, *args: Any, **kwargs: Any) -> None:
        if elastic.is_leader():
            super().print(*args, **kwargs)

    def init_trackers(self, *args: Any, **kwargs: Any) -> None:
        if elastic.is_leader():
            super().init_trackers(*args, **kwargs)

    def save(self, *args: Any, **kwargs: Any) -> None:
        if elastic.is_leader():
            super().save(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        if elastic.is_leader():
            super().save_model(*args, **kwargs)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return super().save_state(output_dir, *args, **kwargs) if elastic.is_leader() else output_dir


class _Steps:
    """How many batches an accelerator has accumulated: a part of the trial's state."""

    def __init__(self, accelerator: ElasticAccelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._accelerator.step = state["step"]
