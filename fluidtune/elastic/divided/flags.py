"""Settings of torch that change what a call computes: they are part of its signature, and go with it to followers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from fluidtune.device_kinds import TORCH_TYPES

from .torch_private import HOOKS_FOR_ALL, dispatch_modes, forward_mode, replaces_saved_tensors, transforms

#: Settings by name. Those whose names end in "autocast" are (enabled, type) of a kind of device.
Flags = dict[str, Any]


def flags_now() -> Flags:
    """The settings of this thread and process."""
    modes = [str(mode.device) for mode in _get_current_function_mode_stack()]
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        **{f"{on} autocast": (torch.is_autocast_enabled(on), torch.get_autocast_dtype(on)) for on in TORCH_TYPES},
        "default type": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "cudnn": (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        "device": modes[-1].split(":")[0] if modes else None,
    }


@contextmanager
def under(flags: Flags) -> Iterator[None]:
    """Compute as this follower's leader would. The settings of the process stay; those of the thread are put back."""
    if torch.get_default_dtype() != flags["default type"]:
        torch.set_default_dtype(flags["default type"])
    if torch.are_deterministic_algorithms_enabled() != flags["deterministic"]:
        torch.use_deterministic_algorithms(flags["deterministic"])
    if torch.get_float32_matmul_precision() != flags["matmul"]:
        torch.set_float32_matmul_precision(flags["matmul"])
    cudnn = torch.backends.cudnn
    cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = flags["cudnn"]
    with ExitStack() as stack:
        if flags["inference"]:
            stack.enter_context(torch.inference_mode())
        else:
            stack.enter_context(torch.set_grad_enabled(flags["grad"]))
        for kind in TORCH_TYPES:
            enabled, dtype = flags[f"{kind} autocast"]
            if enabled or torch.is_autocast_enabled(kind):  # the backward may be called under another one
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        if flags["device"] is not None:
            stack.enter_context(torch.device(flags["device"]))
        yield


def odd_mode(looks: int) -> str | None:
    """What looks at each operation of this thread, so that the call stays whole; None: nothing does.

    ``looks``: hooks for all modules that are FluidTune's own.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return "it is being compiled"
    if transforms():
        return "it is called in a functional transform"
    if forward_mode():
        return "it is called in forward-mode differentiation"
    if dispatch_modes():
        return "it is called under a TorchDispatchMode"
    if torch._C._len_torch_function_stack() and any(
        not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()
    ):
        return "it is called under a TorchFunctionMode"
    if any(len(hooks) > own for hooks, own in zip(HOOKS_FOR_ALL, (looks, looks, 0, 0), strict=True)):
        return "hooks are there for all modules"
    if replaces_saved_tensors():
        return "it is called where tensors that are saved for the backward are replaced, as by a checkpoint"
    return None
