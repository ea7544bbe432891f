"""Whether a model is divided itself, over devices or processes, so that its batches are not."""

from __future__ import annotations

from torch import nn


def sharded_because(model: nn.Module) -> str | None:
    """Why the trial of this model must have one worker, in a line; None: the model is in one piece."""
    for part in model.modules():
        if any(kind.__name__ in ("FullyShardedDataParallel", "FSDPModule") for kind in type(part).__mro__):
            return f"{type(part).__name__} divides the model itself"
    for name, parameter in model.named_parameters():
        if type(parameter.data).__name__ == "DTensor":
            return f"parameter {name} is a distributed tensor, which divides the model itself"
    return None
