"""Lightning's Fabric for loops whose trial can have several workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import SingleDeviceStrategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader

from fluidtune import elastic

from ..sharded_models import sharded_because
from ..written_loop import WrittenLoop
from .trainer_epochs import set_epoch


class ElasticFabric(Fabric):
    """A `Fabric`, with its parameters; outside a FluidTune worker nothing else.

    Iterate over `epochs` where the loop would iterate over `range`. The loss that `backward` gets must be a mean over
    the samples of the batch: see `fluidtune.elastic.prepare`, which says what else must hold. Set the models up before
    a loader is read.

    A loader that was set up gives this worker's parts of the batches while such a model is in training mode, and whole
    batches while all are in evaluation mode. To Fabric the trial is one process: in training `all_gather`, `all_reduce`
    and `broadcast` give each worker what one with the whole batch has; in evaluation they return what they get.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._loop = WrittenLoop("Fabric")
        self._begun = False
        self._sets_up_loaders = False
        super().__init__(**kwargs)

    def epochs(self, start: int, stop: int) -> Iterable[int]:
        """Yield start .. stop-1. Before each of them the trial can be resized; see `fluidtune.elastic.epochs`."""
        return self._loop.epochs(start, stop)

    # -- what is prepared --

    def setup(self, module: torch.nn.Module, *optimizers: Any, **kwargs: Any) -> Any:
        made = super().setup(module, *optimizers, **kwargs)
        scheduler = kwargs.get("scheduler")
        self._begin_with(made[0] if isinstance(made, tuple) else made, module)
        self._prepare(*optimizers, *([] if scheduler is None else [scheduler]))
        return made

    def setup_module(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        made = super().setup_module(module, *args, **kwargs)
        self._begin_with(made, module)
        return made

    def setup_optimizers(self, *optimizers: Any) -> Any:
        made = super().setup_optimizers(*optimizers)
        self._prepare(*optimizers)
        return made

    def setup_dataloaders(self, *dataloaders: DataLoader, **kwargs: Any) -> Any:
        self._sets_up_loaders = True
        try:
            made = super().setup_dataloaders(*dataloaders, **kwargs)
        finally:
            self._sets_up_loaders = False
        stock = made if isinstance(made, list) else [made]
        prepared = self._prepare(*dataloaders)
        if prepared is None:
            return made
        divided = [_DividedLoader(*each, self) for each in zip(stock, dataloaders, prepared, strict=True)]
        self._loop.loaders += divided
        return divided if isinstance(made, list) else divided[0]

    def _begin_with(self, made: Any, given: torch.nn.Module) -> None:
        """``made``: Fabric's module around the one that was ``given``."""
        why = sharded_because(made.module)
        if type(given).__name__ == "OptimizedModule":
            why = "a compiled model makes a step of which FluidTune sees no parts"
        if self._prepare(made.module, refused=why) is not None:
            self._loop.models.append(made.module)

    def _prepare(self, *parts: Any, refused: str | None = None) -> list[Any] | None:
        """The parts as `elastic.prepare` gives them; None if the trial is a plain one, or there is no session."""
        if elastic.current() is None or self._loop.plain:
            return None
        try:
            if why := refused or self._plain_because():
                raise TypeError(why)
            if not self._begun:
                self._begun = True
                scaler = getattr(self.strategy.precision, "scaler", None)
                elastic.prepare(*([] if scaler is None else [scaler]), self._loop)
            return [elastic.prepare(part) for part in parts]
        except TypeError as error:
            self._loop.keep_one_worker(error)
            return None

    def _plain_because(self) -> str | None:
        if not isinstance(self.strategy, SingleDeviceStrategy):
            return f"{type(self.strategy).__name__} trains in its own way over processes or devices"
        if self.device.type not in ("cpu", "cuda"):
            return f"the loop trains on {self.device}, and not on a CPU or a CUDA GPU"
        return None

    # -- what is over all processes, where there is one --

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        data = super().all_gather(data, group, sync_grads)
        if sync_grads and self._loop.trains:
            self._loop.cannot("all_gather(sync_grads=True) has gradients go from one worker to another")
        return apply_to_collection(data, torch.Tensor, self._loop.gathered) if self._loop.together else data

    def all_reduce(self, data: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        data = super().all_reduce(data, group, reduce_op)
        op = str(reduce_op).rpartition(".")[2].lower()  # also of a torch.distributed.ReduceOp
        return apply_to_collection(data, torch.Tensor, self._reduced, op) if self._loop.together else data

    def _reduced(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """Fabric puts the result into the tensor, too."""
        whole = self._loop.reduced(tensor.detach(), "mean" if op == "avg" else op)
        tensor.data.copy_(whole)
        return whole

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return elastic.broadcast(obj) if self._loop.together else super().broadcast(obj, src)

    # -- what one process does for all --

    @property
    def is_global_zero(self) -> bool:
        return elastic.is_leader()

    @property
    def global_rank(self) -> int:
        # By the rank Fabric seeds a loader's processes; in all workers they draw what the leader's draw.
        return 0 if elastic.is_leader() or self._sets_up_loaders else 1

    local_rank = global_rank

    def save(self, *args: Any, **kwargs: Any) -> None:
        if elastic.is_leader():
            super().save(*args, **kwargs)

    def log_dict(self, *args: Any, **kwargs: Any) -> None:
        if elastic.is_leader():
            super().log_dict(*args, **kwargs)


class _DividedLoader:
    """``stock``: what Fabric has made of the loader that it was given; attributes are this one's."""

    def __init__(self, stock: Any, given: DataLoader, prepared: Any, fabric: ElasticFabric) -> None:
        self._stock, self._given, self._prepared, self._fabric = stock, given, prepared, fabric
        self._loop = fabric._loop
        self.iteration = 0

    def __len__(self) -> int:
        return len(self._stock)

    def __getattr__(self, name: str) -> Any:
        if name == "_stock":  # while unpickling it is not there yet
            raise AttributeError(name)
        return getattr(self._stock, name)

    def __iter__(self) -> Iterator[Any]:
        divided = self._loop.trains
        set_epoch(self._given, self.iteration)  # Fabric counts the passes, too, but a new worker's has seen none
        self.iteration += 1
        for batch in self._loop.pass_over(self._prepared if divided else self._given, divided=divided):
            if self._stock.device is not None:
                batch = self._fabric.to_device(batch)
            if divided:
                self._loop.read(batch)
            yield batch
