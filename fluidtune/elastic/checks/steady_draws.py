"""Draws that give every sample the same numbers, so that a step on a batch can be compared with a step on its parts.

While the mode is open and ``active`` says so, torch draws nothing: each of its draws gives a typical value of the
distribution instead, wherever in the tensor. A permutation is the identity. Distributions that are not in the table are
drawn from as ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.operator_schemas import normalize_function
from torch.utils._python_dispatch import TorchDispatchMode

from ..random_streams import capture_streams, restore_streams

#: What a standard uniform and a standard normal number are: none at which a usual function of noise (a product, a
#: logarithm, a comparison with 0 or 1) is degenerate.
_UNIFORM, _NORMAL = 0.5, 0.75


def _between(of: dict[str, Any]) -> Any:
    return of["from"] + _UNIFORM * (of["to"] - of["from"])


def _mean_and_more(of: dict[str, Any]) -> Any:
    return of["mean"] + _NORMAL * of["std"]


#: Values by the operator's name without a final underscore: aten's names and arguments (native_functions.yaml), where
#: ``self`` is ``input``.
_VALUES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "rand": lambda of: _UNIFORM,
    "rand_like": lambda of: _UNIFORM,
    "uniform": _between,
    "randn": lambda of: _NORMAL,
    "randn_like": lambda of: _NORMAL,
    "normal": _mean_and_more,
    "log_normal": lambda of: math.exp(_mean_and_more(of)),
    "exponential": lambda of: math.log(2) / of["lambd"],  # the median
    "bernoulli": lambda of: (p if (p := of.get("p")) is not None else of["input"]) > _UNIFORM,
    "randint": lambda of: of.get("low", 0),
    "randint_like": lambda of: of.get("low", 0),
    "random": lambda of: of.get("from", 0),
    "randperm": lambda of: torch.arange(of["n"]),
    "multinomial": lambda of: of["input"].argmax(-1, keepdim=True),
}


class SteadyDraws(TorchDispatchMode):
    """See the module. ``active``: whether draws are to be steady now."""

    def __init__(self, active: Callable[[], bool]) -> None:
        super().__init__()
        self._active = active

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or not self._active():
            return func(*args, **kwargs)
        value = _VALUES.get(func.overloadpacket.__name__.rstrip("_"))
        if value is None:
            return func(*args, **kwargs)
        of = normalize_function(func, args, kwargs, normalize_to_only_use_kwargs=True)[1]  # by name, with the defaults
        steady, own, streams = value(of), of.get("generator"), capture_streams()
        state = None if own is None else own.get_state()
        drawn = func(*args, **kwargs)  # of the right shape and type
        restore_streams(streams)
        if own is not None:
            own.set_state(state)
        return drawn.copy_(torch.as_tensor(steady).to(drawn.device).expand_as(drawn))
