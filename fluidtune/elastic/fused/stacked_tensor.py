"""A tensor of several trials at once, which a model's forward takes for the tensor of one trial.

A `Stacked` holds the tensors of K trials, of one shape, as one tensor whose first axis is the trial. A forward sees the
shape of one trial. Each function of torch that it calls is carried out for all trials by its *grouped form*
(`grouped_forms`), or, where it has none, by ``torch.vmap``. What depends on the values of one trial (``item``, a branch
on a tensor), draws random numbers that are not dropout's, or cannot be divided by trials raises `NotFusable`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter


class NotFusable(Exception):
    """What a trial does cannot be done for several trials at once. The text is the reason, in one line."""


#: The grouped form of a function of torch: called with its arguments, where a `Stacked` stands for its whole tensor.
FORMS: dict[Any, Callable[..., Any]] = {}
#: The functions whose grouped form also takes a tensor of no trial (a constant) as its first argument.
MIXED: set[Any] = set()


class Stacked(torch.Tensor):
    """The tensors of K trials: a tensor of shape (K, ...), of which the forward sees the shape (...)."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for arg in (*args, *kwargs.values()):
            kind = type(arg)
            if kind is Parameter or (kind in (tuple, list) and any(type(item) is Parameter for item in arg)):
                raise NotFusable("its forward uses a parameter that is not one of its own")
        if "out" in kwargs:
            raise NotFusable(f"its forward calls {name_of(func)} with out=")
        form = FORMS.get(func)
        if not args or (type(args[0]) is not Stacked and isinstance(args[0], torch.Tensor) and func not in MIXED):
            form = None
        with torch._C.DisableTorchFunctionSubclass():
            result = _by_vmap(func, args, kwargs) if form is None else form(*args, **kwargs)
        return result if type(result) is Stacked else stacked(result)


def stacked(result: Any) -> Any:
    """``result`` of a grouped form: its tensors are of all trials."""
    if isinstance(result, torch.Tensor):
        return result if type(result) is Stacked else result.as_subclass(Stacked)
    if type(result) in (tuple, list):
        return type(result)(stacked(item) for item in result)
    if isinstance(result, tuple) and isinstance(result, torch.Tensor | tuple) and hasattr(type(result), "n_fields"):
        return type(result)([stacked(item) for item in result])  # what torch returns, such as torch.return_types.max
    return result


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A `Stacked` as the tensor of shape (K, ...) that it is."""
    return tensor.as_subclass(torch.Tensor)


def form(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: this is the grouped form of these functions."""

    def register(grouped: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            FORMS[function] = grouped
        return grouped

    return register


def name_of(func: Any) -> str:
    """A function of torch in words."""
    return torch.overrides.resolve_name(func) or getattr(func, "__name__", repr(func))


def _by_vmap(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func`` for each trial by ``torch.vmap``.

    Raises:
        NotFusable: it changes a tensor in place, or vmap cannot do it.
    """
    name = name_of(func)
    if name.rsplit(".", 1)[-1].endswith("_") and not name.endswith("__"):
        raise NotFusable(f"its forward calls {name}, which has no form for several trials")
    found: list[torch.Tensor] = []

    def take(value: Any) -> Any:
        if type(value) is Stacked:
            found.append(plain(value))
            return _Place(len(found) - 1)
        if type(value) in (tuple, list):
            return type(value)(take(item) for item in value)
        return value

    taken, named = take(args), {key: take(value) for key, value in kwargs.items()}

    def alone(*tensors: torch.Tensor) -> Any:
        def put(value: Any) -> Any:
            if type(value) is _Place:
                return tensors[value.index]
            if type(value) in (tuple, list):
                return type(value)(put(item) for item in value)
            return value

        return func(*put(taken), **{key: put(value) for key, value in named.items()})

    versions = [tensor._version for tensor in found]
    try:
        result = torch.vmap(alone, randomness="error")(*found)
    except Exception as error:
        raise NotFusable(f"its forward calls {name}: {str(error).splitlines()[0][:200]}") from error
    if versions != [tensor._version for tensor in found]:
        raise NotFusable(f"its forward calls {name}, which changes a tensor in place")
    return result


class _Place:
    """Where a tensor stood in the arguments."""

    def __init__(self, index: int) -> None:
        self.index = index
