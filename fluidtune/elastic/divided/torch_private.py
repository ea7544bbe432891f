"""What divided calls use of torch that torch does not publish. Where torch changes it,
tests/elastic/divided/test_kinds.py fails.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.modules import module as _modules

#: By kind, hooks for all modules: before and after a forward, before and after a backward.
HOOKS_FOR_ALL: tuple[Mapping[int, Any], ...] = (
    _modules._global_forward_pre_hooks,
    _modules._global_forward_hooks,
    _modules._global_backward_pre_hooks,
    _modules._global_backward_hooks,
)


def computed(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the module returns, with its hooks, whoever answers its calls."""
    return module._call_impl(*args, **kwargs)


#: The attribute of `answering`.
ANSWER = "_compiled_call_impl"


def tables_of(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """The dictionaries of a module's own attributes, parameters and buffers."""
    return module.__dict__, module._parameters, module._buffers


def modules_of(module: nn.Module) -> list[nn.Module]:
    """The module and all in it. Of a class that has methods of its own for that, as Keras' layers, none is called."""
    found = {id(module): module}
    waiting = [module]
    while waiting:
        for each in waiting.pop()._modules.values():
            if each is not None and id(each) not in found:
                found[id(each)] = each
                waiting.append(each)
    return list(found.values())


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """All parameters in it; see `modules_of`."""
    return [each for one in modules_of(module) for each in one._parameters.values() if each is not None]


def buffers_of(module: nn.Module) -> list[torch.Tensor]:
    """All buffers in it; see `modules_of`."""
    return [each for one in modules_of(module) for each in one._buffers.values() if each is not None]


def answering(module: nn.Module) -> Any:
    """What answers calls of the module in its place; None: torch does. No copy and no pickle of a module has it."""
    return module._compiled_call_impl


def have_answer(module: nn.Module, answer: Any) -> None:
    """Have calls of the module answered by ``answer``; None: by torch.

    Set by `object`'s own method: a module that wraps another one, as Fabric's, may hand attributes on to that.
    """
    object.__setattr__(module, "_compiled_call_impl", answer)


def is_amid_call() -> bool:
    """In a hook before a forward: whether the module is called by another module."""
    frame, calls = inspect.currentframe(), 0
    while frame is not None and calls < 2:
        calls += frame.f_code is nn.Module._call_impl.__code__
        frame = frame.f_back
    return calls == 2


def version(tensor: torch.Tensor) -> int:
    """How many writes in place torch has counted."""
    return tensor._version


def keeps_graph() -> bool:
    """In a backward: whether its graph stays (``retain_graph=True``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def replaces_saved_tensors() -> bool:
    """Whether what is saved for a backward is replaced now, as by a checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def transforms() -> bool:
    """Whether a functional transform is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms() -> AbstractContextManager[Any]:
    """Within it, no functional transform is under way."""
    return temporarily_clear_interpreter_stack()


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether the tensor is one of a transform that computes many at a time (`torch.vmap`, ``is_grads_batched``)."""
    return torch._C._functorch.is_batchedtensor(tensor) or torch._C._functorch.is_legacy_batchedtensor(tensor)


def forward_mode() -> bool:
    """Whether forward-mode differentiation is under way."""
    return torch.autograd.forward_ad._current_level >= 0


def dispatch_modes() -> int:
    """How many `TorchDispatchMode`s are there."""
    return int(torch._C._len_torch_dispatch_stack())


def arguments_of(func: Any) -> tuple[list[str], list[str]]:
    """The names of an operation's arguments, and of those that are tensors."""
    arguments = func._schema.arguments
    return [each.name for each in arguments], [each.name for each in arguments if "Tensor" in str(each.type)]
