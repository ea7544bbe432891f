"""Where the loops' calls of models and optimizers become common ones: while trials are fused in this process.

No model and no optimizer is touched: copies and pickles of them are those that they are alone. What is replaced is
``torch.nn.Module.__call__``, the ``step`` of the optimizers of `flat_steps`, and ``apply`` of
`torch.autograd.Function`, whose code would see the tensors of all trials. For a model that is not fused each of them
does what torch's does. Hooks on steps, profiling and learning-rate schedulers stand around the replaced ``step``.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from .flat_steps import NUMBERS
from .stacked_tensor import NotFusable, Stacked

_torch_call = nn.Module.__call__
_torch_apply = torch.autograd.Function.__dict__["apply"]  # the classmethod itself, not one of `Function`
_torch_steps: dict[type[Optimizer], Any] = {}
_lock = threading.Lock()
_users = 0


class Intercepted(Protocol):
    """What is done instead of torch's own, in the thread of the call."""

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def step(self, optimizer: Optimizer) -> bool:
        """True: it is done. False: the optimizer steps by itself."""


#: By the id of a model or optimizer, whose it is.
TAKEN: dict[int, Intercepted] = {}


def install() -> None:
    """Replace torch's; as often as `uninstall` is called."""
    global _users
    with _lock:
        _users += 1
        if _users > 1:
            return
        nn.Module.__call__ = _call
        torch.autograd.Function.apply = classmethod(_apply)
        for kind in NUMBERS:
            kind([torch.zeros(1)])  # torch wraps the step of a class when its first optimizer is made
            _torch_steps[kind] = kind.step
            replaced = Optimizer.profile_hook_step(_step(kind.step.__wrapped__))
            replaced.hooked = True
            kind.step = replaced


def uninstall() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users:
            return
        nn.Module.__call__ = _torch_call
        torch.autograd.Function.apply = _torch_apply
        for kind, step in _torch_steps.items():
            kind.step = step


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    taker = TAKEN.get(id(self))
    return _torch_call(self, *args, **kwargs) if taker is None else taker.call(self, args, kwargs)


def _step(torch_step: Any) -> Any:
    @functools.wraps(torch_step)
    def step(self: Optimizer, closure: Any = None) -> Any:
        taker = TAKEN.get(id(self))
        if closure is None and taker is not None and taker.step(self):
            return None
        return torch_step(self, closure)

    return step


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    if any(type(arg) is Stacked for arg in args):
        raise NotFusable(f"its forward uses {cls.__name__}, an autograd function of its own")
    return _torch_apply.__func__(cls, *args, **kwargs)
