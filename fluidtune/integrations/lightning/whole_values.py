"""What `self.log` logs where a trial has several workers: the value of the whole batch, and the same in all workers.

A worker's step sees its part of the batch. A stock script does not ask Lightning to combine values, and where it does
(``sync_dist=True``), Lightning would count a worker's parts and its copies of other workers' samples equally. So each
value is combined when it is logged, and Lightning goes on with it as with one process'. An early stop, a scheduler on a
plateau and the choice of a checkpoint then decide the same in all workers.
"""

from __future__ import annotations

import inspect
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
        if number and self._boundaries.together and not given.get("rank_zero_only"):
            reduce_fx = given.get("reduce_fx", "mean")
            how = reduce_fx if isinstance(reduce_fx, str) else reduce_fx.__name__
            given.update(self._of_all(torch.as_tensor(value).detach(), how.lower(), given.get("batch_size")))
        self._log(**given)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model is in no fit of ours: it logs as its class does.
        return partial, (self._log, self._model)

    def _of_all(self, value: torch.Tensor, how: str, batch_size: int | None) -> dict[str, Any]:
        """The arguments of `log` that change. ``how``: what Lightning does with the values of an epoch."""
        boundaries = self._boundaries
        weight = 1.0
        if not self._model.trainer.training:  # all have computed the same: the leader's counts
            weight = float(elastic.is_leader())
        elif how in ("min", "max"):
            return {"value": elastic.reduce(value.cpu(), "min" if how == "min" else "max").to(value.device)}
        elif boundaries.batch is not None:
            weight = float(boundaries.counts)
            weight *= 1 if how == "sum" else self._samples(batch_size)
        pair = torch.tensor([float(value) * weight if weight else 0.0, weight], dtype=torch.float64)
        total, count = elastic.reduce(pair).tolist()
        adds = how == "sum" and self._model.trainer.training
        dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
        whole = torch.tensor(total if adds else total / count, dtype=dtype, device=value.device)
        if not self._model.trainer.training or boundaries.batch is None or adds:
            return {"value": whole}
        return {"value": whole, "batch_size": round(count)}

    def _samples(self, batch_size: int | None) -> int:
        """The samples of this worker's part, as Lightning counts them."""
        if batch_size is not None:
            return batch_size
        try:
            return int(extract_batch_size(self._boundaries.batch))
        except MisconfigurationException as error:
            elastic.one_worker(f"Lightning: {error}")
            raise
