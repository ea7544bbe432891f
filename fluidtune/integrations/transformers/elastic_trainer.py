"""What a Trainer asks of itself for its batches, with several workers: a loader, items to count, a loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from transformers import Trainer

from fluidtune import elastic

from ..accelerate.divided_loader import DividedLoader
from ..sharded_models import sharded_because
from .epoch_boundaries import EpochBoundaries
from .followers import as_follower

#: The methods of a Trainer, all of them documented for others to override, for which `ElasticTrainer` has its own.
METHODS = ("get_train_dataloader", "get_batch_samples", "training_step", "compute_loss", "floating_point_ops")
#: Optimizers of Transformers that step during the backward pass, when no worker has the sum of all gradients.
_STEP_EARLY = ("lomo", "adalomo", "layerwise")

#: The methods of a tensor that give its value as a number.
_VALUES = ("item", "tolist", "__float__", "__int__", "__index__")


def prepare_trainer(trainer: Trainer) -> Trainer:
    """Let the trials of this Trainer, or of a subclass, grow and shrink. Returns the same Trainer.

    Call it before ``trainer.train()`` or ``trainer.hyperparameter_search(backend="ray")``. Under stock Ray Tune and in
    plain Python the Trainer trains as it would without this.

    The loss of a batch is either a sum that is divided by the ``num_items_in_batch`` which the Trainer gives to the
    model, to ``compute_loss_func`` or to `compute_loss`; or a mean over the samples of the batch. A loss that uses this
    number anyhow is taken for the first.
    """
    if not isinstance(getattr(trainer.get_train_dataloader, "__self__", None), ElasticTrainer):
        own = ElasticTrainer(trainer)
        for name in METHODS:
            setattr(trainer, name, getattr(own, name))
        trainer.callback_handler.callbacks.insert(0, own.boundaries)
    return trainer


class ElasticTrainer:
    """Stands in one Trainer for its `METHODS`, while a trial trains with several workers; else they are the class'."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        #: Methods that the script has given to this one Trainer.
        self._replaced = {name: vars(trainer)[name] for name in METHODS if name in vars(trainer)}
        self.boundaries = EpochBoundaries(trainer, self.prepare, self._of_all)
        self._loader: DividedLoader | None = None
        #: What this worker has of the batch that a step trains on; None outside steps, and where none is divided.
        self._part: Any = None
        self._steps = False

    def _stock(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the Trainer's own method."""
        if name in self._replaced:
            return self._replaced[name](*args, **kwargs)
        return getattr(type(self._trainer), name)(self._trainer, *args, **kwargs)

    # -- before the loop --

    def get_train_dataloader(self) -> Any:
        """The Trainer's own, divided."""
        loader = self._stock("get_train_dataloader")
        self._loader = None
        if elastic.current() is None:
            return loader
        if not elastic.is_leader():
            as_follower(self._trainer.args)
        why = plain_because(self._trainer)
        if why is None:
            try:
                self._loader = DividedLoader(loader, self._trainer.accelerator)
            except TypeError as error:
                why = str(error)
        if why is not None:
            elastic.one_worker(f"Transformers: {why}")
        return loader if self._loader is None else self._loader

    def prepare(self) -> bool:
        """Hand over what the Trainer trains with, when all of it is made; False if it keeps one worker."""
        trainer = self._trainer
        if self._loader is None:
            return False
        optimizer = trainer.optimizer
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        scaler = trainer.accelerator.scaler
        others = [trainer.lr_scheduler, *([] if scaler is None else [scaler]), self.boundaries.progress]
        try:
            elastic.prepare(trainer.model, optimizer, *others)
        except TypeError as error:
            elastic.one_worker(f"Transformers: {error}")
            return False
        return True

    # -- in the loop --

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """The batches of one optimizer step, and how many items they have in all workers."""
        if self.boundaries.passing:
            return [], None
        batches, items = self._stock("get_batch_samples", epoch_iterator, num_batches, device)
        parts = self._waiting
        if not parts:
            return batches, items
        if any(not part.weight for part in parts):
            counted = [batch for batch, part in zip(batches, parts, strict=True) if part.weight]
            _, items_here = self._stock("get_batch_samples", iter(counted), len(counted), device)
        else:
            items_here = items
        if items is not None:
            like = items if isinstance(items, torch.Tensor) else torch.tensor(items, device=device)
            items = elastic.reduce(torch.zeros_like(like) if items_here is None else torch.as_tensor(items_here))
        return batches, items

    @property
    def _waiting(self) -> deque[Any]:
        return deque() if self._loader is None else self._loader.parts

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the loss of the whole batch, the same in all workers."""
        waiting = self._waiting
        self._part = waiting.popleft() if waiting else None
        elastic.work_on(self._part)
        self._steps = True
        try:
            loss: torch.Tensor = self._stock("training_step", *args, **kwargs)
        finally:
            self._steps = False
        part = self._part
        if part is None:
            return loss
        return elastic.reduce(loss * part.weight if part.weight else torch.zeros_like(loss))

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """A loss whose gradients count as they must: by this worker's share of the samples, or by its items."""
        items = kwargs.get("num_items_in_batch")
        if not self._steps or self._part is None or items is None:
            return self._stock("compute_loss", model, inputs, *args, **kwargs)
        noted = _Noted.of(items)
        kwargs["num_items_in_batch"] = noted
        found = self._stock("compute_loss", model, inputs, *args, **kwargs)
        if not noted.was_used or not self._part.weight:
            return found
        if isinstance(found, tuple):
            return (found[0] / self._part.weight, *found[1:])
        return found / self._part.weight

    def _of_all(self, count: int) -> int:
        if self._part is None:
            return count
        return int(elastic.reduce(torch.tensor(count if self._part.weight else 0)))

    def floating_point_ops(self, inputs: Any) -> Any:
        """Of the whole batch, as far as its parts are padded to the same length."""
        own = self._stock("floating_point_ops", inputs)
        return own / self._part.weight if self._part is not None and self._part.weight else own


class _Noted(torch.Tensor):
    """A number of items that notes whether its value is used. What is computed with it are plain tensors."""

    was_used: bool
    plain: torch.Tensor

    @classmethod
    def of(cls, items: Any) -> _Noted:
        plain = torch.as_tensor(items)
        noted: _Noted = plain.as_subclass(cls)
        noted.was_used, noted.plain = False, plain
        return noted

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        noted: list[_Noted] = []
        found = func(*_unwrapped(args, noted), **_unwrapped(kwargs or {}, noted))
        if isinstance(found, torch.Tensor) or getattr(func, "__name__", "") in _VALUES:
            for each in noted:
                each.was_used = True
        return found


def _unwrapped(value: Any, noted: list[_Noted]) -> Any:
    """``value`` with plain tensors in the place of noted ones, which are added to ``noted``."""
    if isinstance(value, _Noted):
        noted.append(value)
        return value.plain
    if isinstance(value, list | tuple):
        return type(value)(_unwrapped(each, noted) for each in value)
    if isinstance(value, dict):
        return {name: _unwrapped(each, noted) for name, each in value.items()}
    return value


def plain_because(trainer: Trainer) -> str | None:
    """Why the training must have one worker, in a line, as far as the Trainer shows it; None: it can be divided."""
    args, accelerator = trainer.args, trainer.accelerator
    if accelerator.distributed_type != DistributedType.NO or accelerator.num_processes > 1:
        return f"Accelerate trains in its own way over processes or devices ({accelerator.distributed_type.value})"
    if args.n_gpu > 1:
        return f"the Trainer sees {args.n_gpu} GPUs and would use all: let it see one"
    if args.device.type not in ("cpu", "cuda"):
        return f"the Trainer trains on {args.device}, and not on a CPU or a CUDA GPU"
    if trainer.is_model_parallel or getattr(accelerator, "parallelism_config", None) is not None:
        return "the model is divided itself, over devices or processes"
    if args.torch_compile:
        return "torch_compile makes a step of which FluidTune sees no parts: batches could not be counted"
    if args.auto_find_batch_size:
        return "auto_find_batch_size begins the training again when memory is short, in one worker alone"
    if any(name in str(args.optim.value) for name in _STEP_EARLY):
        return f"the optimizer {args.optim.value} takes its steps during the backward pass"
    if why := sharded_because(trainer.model):
        return why
    for name, parameter in trainer.model.named_parameters():
        if not parameter.is_floating_point():
            return f"parameter {name} is quantized ({parameter.dtype}), and has no gradient to sum"
    return None
