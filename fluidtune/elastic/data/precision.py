"""The numbers that a loop computes with: how far neighbouring ones are apart where torch says float32.

Two workers that compute the same step agree to a small multiple of that.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fluidtune.torch_flags import flag

#: The flags of torch.backends that say which numbers stand for float32, and which GPUs or cores they are for. The older
#: names come first: each sets several of the newer ones (torch's since 2.9), and cannot be read where they disagree.
FLAGS = {
    "cuda": (
        *("cuda.matmul.allow_tf32", "cudnn.allow_tf32", "cuda.matmul.fp32_precision"),
        *("cudnn.fp32_precision", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision"),
    ),
    "cpu": (
        *("mkldnn.fp32_precision", "mkldnn.matmul.fp32_precision"),
        *("mkldnn.conv.fp32_precision", "mkldnn.rnn.fp32_precision"),
    ),
}
#: Their values that are coarser than float32, and the relative spacing of these numbers. TF32 has 10 bits of fraction
#: (NVIDIA, "Accelerating AI training with TF32 tensor cores").
_COARSER = {True: 2.0**-10, "tf32": 2.0**-10, "bf16": torch.finfo(torch.bfloat16).eps}


class Precision:
    """``spacing``: the largest relative spacing of the numbers that autocast was given while watched."""

    def __init__(self) -> None:
        self.spacing: float = torch.finfo(torch.float32).eps
        self._entered: Any = None

    def watch(self) -> None:
        """Note from now on the types that autocast is given."""
        if self._entered is not None:
            return
        enter = self._entered = torch.autocast.__enter__

        def noting(context: torch.autocast) -> Any:
            entered = enter(context)
            if torch.is_autocast_enabled(context.device):
                self.spacing = max(self.spacing, torch.finfo(context.fast_dtype).eps)
            return entered

        torch.autocast.__enter__ = noting  # type: ignore[method-assign]

    def end(self) -> None:
        """Note no more; autocast is as it was."""
        if self._entered is not None:
            torch.autocast.__enter__, self._entered = self._entered, None  # type: ignore[method-assign]

    def tolerance(self, device: torch.device, eps: float) -> float:
        """How far gradients of one step may differ, relative to the largest; ``eps``: the spacing of their own type.

        Half of their digits must agree. The rounding of a sum in another order is a small multiple of the spacing
        (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 4.2), and the square root leaves
        room for the layers behind each other. Errors of the contract of `elastic.prepare` have been seen from 0.004 on.
        """
        return math.sqrt(max(self.spacing, spacing_of_float32(device), eps))


def spacing_of_float32(device: torch.device) -> float:
    """The largest relative spacing of the numbers that stand for float32 on the device now."""
    return max((_COARSER.get(flag(torch.backends, path), 0.0) for path in FLAGS.get(device.type, ())), default=0.0)
