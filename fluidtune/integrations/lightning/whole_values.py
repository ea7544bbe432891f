"""What `self.log` logs where a trial has several workers: combined over the batch, and the same in all workers.

By Lightning's ``reduce_fx`` a value is taken for a mean over the samples of the step, or for a number that adds up over
them. Of another kind than it says, it is wrong by the number of workers; one value does not show of which kind it is.

A worker's step sees its part of the batch. A stock script does not ask Lightning to combine values, and where it does
(``sync_dist=True``), Lightning would count a worker's parts and its copies of other workers' samples equally. So each
value is combined when it is logged, and Lightning goes on with it as with one process'. An early stop, a scheduler on a
plateau and the choice of a checkpoint then decide the same in all workers.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from numbers import Number
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from fluidtune import elastic

from .trainer_epochs import EpochBoundaries


class WholeValues:
    """Stands for `LightningModule.log` of one module, while it is fitted or evaluated."""

    def __init__(self, model: LightningModule, boundaries: EpochBoundaries) -> None:
        self._model, self._boundaries = model, boundaries
        self._log = type(model).log
        self._signature = inspect.signature(self._log)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        given = self._signature.bind(self._model, *args, **kwargs).arguments
        value = given["value"]
        number = isinstance(value, Number) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        if number and self._boundaries.in_epoch and not given.get("rank_zero_only"):
            reduce_fx = given.get("reduce_fx", "mean")
            how = reduce_fx if isinstance(reduce_fx, str) else reduce_fx.__name__
            how = "mean" if how.lower() == "avg" else how.lower()
            in_step = self._model.trainer.training and self._boundaries.batch is not None
            # At one worker, too: what cannot be combined is known before the trial grows.
            counted = self._counted(given.get("batch_size")) if in_step and how == "mean" else None
            if self._boundaries.together:
                whole = self._of_all(torch.as_tensor(value).detach(), how, in_step, counted)
                given.update(whole)
        self._log(**given)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model is in no fit of ours: it logs as its class does.
        return partial, (self._log, self._model)

    def _of_all(self, value: torch.Tensor, how: str, in_step: bool, counted: _Counted | None) -> dict[str, Any]:
        """The arguments of `log` that change. ``how``: what Lightning does with the values of an epoch."""
        evaluates = not self._model.trainer.training
        if how in ("min", "max") and not evaluates:
            return {"value": elastic.reduce(value.cpu(), "min" if how == "min" else "max").to(value.device)}
        weight = 1.0
        if evaluates:  # all have computed the same: one of them counts
            weight = float(elastic.rank() == 0)
        elif in_step:
            weight = float(self._boundaries.counts) * (1 if counted is None else counted.own)
        pair = torch.tensor([float(value) * weight if weight else 0.0, weight], dtype=torch.float64)
        total, count = elastic.reduce(pair).tolist()
        dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
        whole = total if how == "sum" and not evaluates else total / count
        combined = {"value": torch.tensor(whole, dtype=dtype, device=value.device)}
        if counted is None:
            return combined
        return {**combined, "batch_size": round(count) if counted.whole is None else counted.whole}

    def _counted(self, batch_size: int | None) -> _Counted | None:
        """What a value of this step counts. None: it cannot be told, so that the trial must have one worker."""
        try:
            own = int(extract_batch_size(self._boundaries.batch))
        except MisconfigurationException as error:
            elastic.one_worker(f"Lightning: {error}")
            return None
        if batch_size is None or batch_size == own:
            return _Counted(own, None)
        if any(batch_size == loader.batch_size for loader in self._boundaries.loaders):
            return _Counted(own, batch_size)
        elastic.one_worker(
            f"Lightning: self.log() got batch_size={batch_size} for a batch of {own} samples: expected this number, or "
            "the batch_size of the DataLoader, to combine the values of several workers"
        )
        return None


@dataclass(frozen=True)
class _Counted:
    """``own``: the samples of this worker's part. ``whole``: what the whole batch counts, if the script says so."""

    own: int
    whole: int | None
