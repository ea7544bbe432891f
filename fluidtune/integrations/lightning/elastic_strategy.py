"""The strategy: where the Trainer's model, optimizers and data become parts of an elastic trial."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, StochasticWeightAveraging
from lightning.pytorch.plugins import DeepSpeedPrecision, FSDPPrecision, XLAPrecision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader

from fluidtune import elastic

from ..sharded_models import sharded_because
from .late_iterators import LateLoader
from .trainer_epochs import EpochBoundaries
from .whole_values import WholeValues

#: By which Lightning decides whether a process logs, as this process had it before any trial.
_RANK = rank_zero_only.rank
#: The fits and evaluations of followers in this process; a rehearsal has two at a time.
_silent_ones: set[int] = set()


class ElasticStrategy(Strategy):
    """One device for each worker of the trial: the first that ``Trainer(accelerator=..., devices=...)`` names.

    Leave ``devices`` at 1 or "auto". Under stock Ray Tune and in plain Python it is a strategy of one device.
    """

    strategy_name = "fluidtune"
    #: Of Lightning's own division; there is none.
    global_rank = local_rank = node_rank = 0
    world_size = 1

    def __init__(self) -> None:
        super().__init__()
        #: Set by the Trainer.
        self.parallel_devices: list[torch.device] | None = None
        #: Why this fit keeps one worker, in a line; None: as far as is known, it can have several.
        self._plain: str | None = None
        #: An `EpochBoundaries`, once a model is connected.
        self._boundaries: Any = None

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[0] if self.parallel_devices else torch.device("cpu")

    @property
    def is_global_zero(self) -> bool:
        return elastic.is_leader()

    # -- the life of a fit --

    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        # Before the Trainer's callbacks get the module's `log`.
        self._boundaries = EpochBoundaries(model.trainer)
        model.log = WholeValues(model, self._boundaries)

    def setup_environment(self) -> None:
        super().setup_environment()
        if not elastic.is_leader():
            _silent_ones.add(id(self))
            rank_zero_only.rank = 1

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        why = self._plain or plain_because(trainer)
        if why is None:
            schedulers = [config.scheduler for config in self.lr_scheduler_configs]
            scaler = getattr(self.precision_plugin, "scaler", None)
            others = [*schedulers, *([] if scaler is None else [scaler]), self._boundaries.state]
            try:
                elastic.prepare(self.model, *self.optimizers, *others)
            except TypeError as error:
                why = str(error)
        if why is not None:
            self._keep_plain(why)
        trainer.callbacks.insert(0, self._boundaries)

    def process_dataloader(self, dataloader: Any) -> Any:
        """What is trained on is divided; evaluations get theirs as it is."""
        trainer = self.lightning_module.trainer
        if trainer.state.fn != TrainerFn.FITTING or not trainer.training or self._plain is not None:
            return dataloader
        try:
            if not isinstance(dataloader, DataLoader):
                raise TypeError(f"the training data is a {type(dataloader).__name__}, not a DataLoader")
            prepared = elastic.prepare(dataloader)
        except TypeError as error:
            self._keep_plain(str(error))
            return dataloader
        self._boundaries.loaders.append(dataloader)
        return dataloader if prepared is dataloader else LateLoader(prepared, dataloader, self._boundaries.iterators)

    def _keep_plain(self, why: str) -> None:
        self._plain = why
        self._boundaries.plain = True
        elastic.one_worker(f"Lightning: {why}")

    def teardown(self) -> None:
        super().teardown()
        model, boundaries = self.lightning_module, self._boundaries
        self._plain = self._boundaries = None
        if model is not None:
            model.__dict__.pop("log", None)
            if boundaries in model.trainer.callbacks:
                model.trainer.callbacks.remove(boundaries)
        if id(self) in _silent_ones:
            _silent_ones.remove(id(self))
            rank_zero_only.rank = 1 if _silent_ones else _RANK

    # -- what Lightning asks of its processes: there is one, except where workers decide --

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return tensor

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        return tensor

    def barrier(self, name: str | None = None) -> None:
        """Nothing that a worker does waits for another's files."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return elastic.broadcast(obj) if self._together else obj

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return elastic.agreed(decision, "all" if all else "any") if self._together else decision

    @property
    def _together(self) -> bool:
        return self._boundaries is not None and self._boundaries.together


def plain_because(trainer: Trainer) -> str | None:
    """Why the fit must have one worker, in a line, as far as the Trainer shows it; None: it can be divided."""
    strategy = trainer.strategy
    devices, precision = strategy.parallel_devices or [], strategy.precision_plugin
    if len(devices) > 1 or trainer.num_nodes > 1:
        return f"the Trainer has {len(devices)} devices on {trainer.num_nodes} nodes: give it devices=1"
    if strategy.root_device.type not in ("cpu", "cuda"):
        return f"the Trainer trains on {strategy.root_device}, and not on a CPU or a CUDA GPU"
    if isinstance(precision, FSDPPrecision | DeepSpeedPrecision | XLAPrecision):
        return f"{type(precision).__name__} is for models that are divided themselves"
    if why := sharded_because(trainer.lightning_module):
        return why
    if trainer.reload_dataloaders_every_n_epochs:
        return "reload_dataloaders_every_n_epochs makes DataLoaders while the trial runs, which a new worker lacks"
    for callback in trainer.callbacks:
        if isinstance(callback, BatchSizeFinder | LearningRateFinder | StochasticWeightAveraging):
            return f"{type(callback).__name__} changes what the Trainer trains with, in ways that a new worker lacks"
    return None
