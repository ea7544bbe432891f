"""The grouped forms of what most models call: one operation of torch for all trials instead of one for each.

Each form takes the tensors of shape (K, ...) and returns such ones; see `stacked_tensor`. An axis that the forward
names is one further on in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor as T
from torch.nn import functional as F

from .stacked_tensor import FORMS, MIXED, NotFusable, Stacked, form, name_of

# -- what a forward asks of a tensor --


@form(T.dim, T.ndim.__get__, T.ndimension)
def _dim(x: T) -> int:
    return x.dim() - 1


@form(T.shape.__get__)
def _shape(x: T) -> torch.Size:
    return x.shape[1:]


@form(T.size)
def _size(x: T, dim: int | None = None) -> Any:
    return x.shape[1:] if dim is None else x.shape[1:][dim]


@form(T.numel, T.nelement)
def _numel(x: T) -> int:
    return x.shape[1:].numel()


@form(T.__len__)
def _len(x: T) -> int:
    return x.shape[1]


def _same(name: str) -> None:
    """What is the same for one trial and for all."""
    attribute = getattr(T, name)
    FORMS[getattr(attribute, "__get__", attribute)] = getattr(attribute, "__get__", attribute)


for _name in ("dtype", "device", "is_cuda", "requires_grad", "layout", "is_nested", "is_sparse", "is_quantized"):
    _same(_name)
for _name in ("is_floating_point", "is_complex", "element_size", "get_device"):
    FORMS[getattr(T, _name)] = getattr(T, _name)
FORMS[torch.is_floating_point], FORMS[torch.is_complex] = torch.is_floating_point, torch.is_complex


def _value(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotFusable(f"its forward depends on its data ({name})")

    return refuse


for _name in ("__bool__", "__float__", "__int__", "__index__", "item", "tolist", "numpy", "__contains__", "nonzero"):
    FORMS[getattr(T, _name)] = _value(_name)
FORMS[T.__repr__] = _value("it prints a tensor")
FORMS[torch.equal], FORMS[torch.allclose] = _value("equal"), _value("allclose")


def _draws(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotFusable(f"its forward draws random numbers ({name})")

    return refuse


for _name in (
    "bernoulli", "multinomial", "normal", "poisson", "rand_like", "randn_like", "randint_like", "rrelu",
    "alpha_dropout", "feature_alpha_dropout", "native_dropout",
):  # fmt: skip
    FORMS[getattr(torch, _name)] = _draws(_name)
for _name in (
    "bernoulli", "bernoulli_", "multinomial", "normal_", "uniform_", "random_", "exponential_", "geometric_",
    "cauchy_", "log_normal_",
):  # fmt: skip
    FORMS[getattr(T, _name)] = _draws(_name)
for _name in ("rrelu", "alpha_dropout", "feature_alpha_dropout", "gumbel_softmax"):
    FORMS[getattr(F, _name)] = _draws(_name)


# -- element by element --


def ranks(*values: Any) -> list[Any]:
    """``values``, where each `Stacked` has axes of length 1 after the first one so that all broadcast by trial."""
    tensors = [value for value in values if isinstance(value, T)]
    most = max((t.dim() - (type(t) is Stacked) for t in tensors), default=0)
    return [
        value.view(value.shape[0], *[1] * (most + 1 - value.dim()), *value.shape[1:])
        if type(value) is Stacked and value.dim() - 1 < most
        else value
        for value in values
    ]


def _elementwise(func: Any) -> Callable[..., Any]:
    def grouped(*args: Any, **kwargs: Any) -> T:
        if any(isinstance(value, T) for value in kwargs.values()):
            raise NotFusable(f"its forward calls {name_of(func)} with a tensor by name")
        result: T = func(*(ranks(*args) if len(args) > 1 else args), **kwargs)
        return result

    return grouped


def _in_place(func: Any) -> Callable[..., Any]:
    def grouped(x: T, *args: Any, **kwargs: Any) -> T:
        if type(x) is not Stacked:
            raise NotFusable(f"its forward writes what differs by trial into a tensor of no trial ({name_of(func)})")
        if any(isinstance(a, T) and a.dim() - (type(a) is Stacked) > x.dim() - 1 for a in args):
            raise NotFusable(f"its forward calls {name_of(func)} with a tensor of more axes")
        func(x, *ranks(x, *args)[1:], **kwargs)
        return x

    return grouped


_UNARY = [
    "abs", "acos", "asin", "atan", "bitwise_not", "ceil", "clamp", "clip", "cos", "cosh", "erf", "erfc", "exp",
    "expm1", "floor", "frac", "isfinite", "isinf", "isnan", "log", "log10", "log1p", "log2", "logical_not",
    "nan_to_num", "neg", "reciprocal", "relu", "round", "rsqrt", "selu", "sigmoid", "sign", "sin", "sinh", "sqrt",
    "square", "tan", "tanh", "trunc",
]  # fmt: skip
_BINARY = [
    "add", "atan2", "div", "eq", "floor_divide", "fmod", "ge", "gt", "le", "logical_and", "logical_or", "logical_xor",
    "lt", "maximum", "minimum", "mul", "ne", "pow", "remainder", "sub", "where", "addcmul", "addcdiv", "lerp",
    "masked_fill", "float_power", "true_divide", "multiply", "divide", "subtract",
]  # fmt: skip
for _name in (*_UNARY, *_BINARY):
    for _home in (torch, T):
        if hasattr(_home, _name):
            FORMS[getattr(_home, _name)] = _elementwise(getattr(_home, _name))
            MIXED.add(getattr(_home, _name))
        if hasattr(_home, _name + "_"):
            FORMS[getattr(_home, _name + "_")] = _in_place(getattr(_home, _name + "_"))
            MIXED.add(getattr(_home, _name + "_"))
for _name in ("copy_", "zero_", "fill_", "__iadd__", "__isub__", "__imul__", "__itruediv__"):
    FORMS[getattr(T, _name)] = _in_place(getattr(T, _name))
    MIXED.add(getattr(T, _name))
for _name in (
    "__rsub__", "__rdiv__", "__rtruediv__", "__rpow__", "__pow__", "__radd__", "__rmul__", "__add__", "__mul__",
    "__sub__", "__truediv__", "__eq__", "__ne__", "__lt__", "__gt__", "__le__", "__ge__", "__neg__", "__and__",
    "__or__", "__invert__", "float", "double", "half", "bfloat16", "long", "int", "bool", "type_as", "to", "clone",
    "detach", "contiguous", "cpu", "cuda",
):  # fmt: skip
    if hasattr(T, _name):
        FORMS[getattr(T, _name)] = _elementwise(getattr(T, _name))
        MIXED.add(getattr(T, _name))
FORMS[T.data.__get__] = T.detach
for _name in ("zeros_like", "ones_like", "empty_like", "full_like", "clone", "detach"):
    FORMS[getattr(torch, _name)] = getattr(torch, _name)
for _name in (
    "relu", "relu_", "gelu", "silu", "elu", "leaky_relu", "sigmoid", "tanh", "softplus", "hardtanh", "relu6", "selu",
    "mish", "hardswish", "hardsigmoid", "logsigmoid", "celu", "softsign", "tanhshrink",
):  # fmt: skip
    FORMS[getattr(F, _name)] = getattr(F, _name)


def _filled(func: Any) -> Callable[..., Any]:
    def grouped(x: T, *size: Any, **kwargs: Any) -> T:
        sizes, rest = (tuple(size[0]), size[1:]) if isinstance(size[0], Sequence) else (size, ())
        result: T = func(x, (x.shape[0], *sizes), *rest, **kwargs)
        return result

    return grouped


for _name in ("new_zeros", "new_ones", "new_empty", "new_full"):
    FORMS[getattr(T, _name)] = _filled(getattr(T, _name))


# -- axes --


def axis(dim: int) -> int:
    """An axis of one trial's tensor, in that of all."""
    return dim + 1 if dim >= 0 else dim


def _sizes(size: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size


@form(T.view)
def _view(x: T, *size: Any) -> T:
    if isinstance(size[0], torch.dtype):
        raise NotFusable("its forward calls Tensor.view with a dtype")
    return x.reshape(x.shape[0], *_sizes(size))


@form(T.reshape)
def _reshape(x: T, *size: Any) -> T:
    return x.reshape(x.shape[0], *_sizes(size))


FORMS[torch.reshape] = lambda x, shape: x.reshape(x.shape[0], *shape)


@form(T.view_as, T.reshape_as)
def _view_as(x: T, other: T) -> T:
    return x.reshape(x.shape[0], *(other.shape[1:] if type(other) is Stacked else other.shape))


@form(T.flatten, torch.flatten)
def _flatten(x: T, start_dim: int = 0, end_dim: int = -1) -> T:
    return x.unsqueeze(-1).flatten(1) if x.dim() == 1 else x.flatten(axis(start_dim), axis(end_dim))


@form(T.unflatten, torch.unflatten)
def _unflatten(x: T, dim: int, sizes: Any) -> T:
    return x.unflatten(axis(dim), sizes)


@form(T.permute)
def _permute(x: T, *dims: Any) -> T:
    return x.permute(0, *(d % (x.dim() - 1) + 1 for d in _sizes(dims)))


FORMS[torch.permute] = lambda x, dims: _permute(x, *dims)


@form(T.transpose, torch.transpose, T.swapaxes, torch.swapaxes)
def _transpose(x: T, dim0: int, dim1: int) -> T:
    return x.transpose(axis(dim0), axis(dim1))


@form(T.t, torch.t, T.T.__get__)
def _t(x: T) -> T:
    if x.dim() > 3:
        raise NotFusable("its forward transposes a tensor of more than two axes by .T")
    return x.transpose(1, 2) if x.dim() == 3 else x


FORMS[T.mT.__get__] = lambda x: x.transpose(-1, -2)


@form(T.unsqueeze, torch.unsqueeze)
def _unsqueeze(x: T, dim: int) -> T:
    return x.unsqueeze(axis(dim))


@form(T.squeeze, torch.squeeze)
def _squeeze(x: T, dim: int | None = None) -> T:
    if dim is not None:
        return x.squeeze(axis(dim))
    return x.reshape(x.shape[0], *(n for n in x.shape[1:] if n != 1))


@form(T.expand)
def _expand(x: T, *size: Any) -> T:
    sizes = _sizes(size)
    return x.view(x.shape[0], *[1] * (len(sizes) + 1 - x.dim()), *x.shape[1:]).expand(x.shape[0], *sizes)


FORMS[T.expand_as] = lambda x, other: _expand(x, *(other.shape[1:] if type(other) is Stacked else other.shape))


@form(T.repeat)
def _repeat(x: T, *size: Any) -> T:
    sizes = _sizes(size)
    return x.view(x.shape[0], *[1] * (len(sizes) + 1 - x.dim()), *x.shape[1:]).repeat(1, *sizes)


def _along(func: Any) -> Callable[..., Any]:
    """A function whose ``dim`` is its last argument or a name, 0 if it is left out."""

    def grouped(x: T, n: Any, dim: int = 0) -> Any:
        return func(x, n, dim=axis(dim))

    return grouped


for _name in ("chunk", "split", "tensor_split"):
    FORMS[getattr(T, _name)] = FORMS[getattr(torch, _name)] = _along(getattr(torch, _name))


@form(T.unbind, torch.unbind)
def _unbind(x: T, dim: int = 0) -> Any:
    return x.unbind(axis(dim))


def _joined(func: Any) -> Callable[..., Any]:
    def grouped(tensors: Sequence[T], dim: int = 0) -> T:
        k = next(t.shape[0] for t in tensors if type(t) is Stacked)
        all_stacked = [t if type(t) is Stacked else t.expand(k, *t.shape) for t in tensors]
        result: T = func(all_stacked, dim=axis(dim))
        return result

    return grouped


FORMS[torch.cat] = FORMS[torch.concat] = _joined(torch.cat)
FORMS[torch.stack] = _joined(torch.stack)


@form(T.__getitem__)
def _getitem(x: T, index: Any) -> T:
    return x[tuple([slice(None), *_index(index)])]


MIXED.update((T.__getitem__, T.__setitem__))


@form(T.__setitem__)
def _setitem(x: T, index: Any, value: Any) -> None:
    if type(x) is not Stacked:
        raise NotFusable("its forward writes what differs by trial into a tensor of no trial")
    part = x[tuple([slice(None), *_index(index)])]
    if isinstance(value, T) and value.dim() - (type(value) is Stacked) > part.dim() - 1:
        raise NotFusable("its forward assigns a tensor of more axes")
    x[tuple([slice(None), *_index(index)])] = ranks(part.as_subclass(Stacked), value)[1]


def _index(index: Any) -> tuple[Any, ...]:
    parts = index if isinstance(index, tuple) else (index,)
    first = parts[0] if parts else None
    if any(isinstance(part, T | list) for part in parts) and (
        len(parts) > 1 or type(first) is Stacked or (isinstance(first, T) and first.dtype == torch.bool)
    ):
        raise NotFusable("its forward takes elements by a tensor of indices")
    return parts


# -- over axes --


def _reduction(name: str, over_all: bool = True) -> None:
    of_tensor = getattr(T, name)

    def grouped(x: T, *args: Any, **kwargs: Any) -> Any:
        dim = args[0] if args else kwargs.pop("dim", None)
        if isinstance(dim, T):
            raise NotFusable(f"its forward calls {name} with two tensors")
        rest = args[1:]
        if dim is None or (isinstance(dim, tuple | list) and not dim):
            if not over_all or rest or kwargs.get("keepdim"):
                raise NotFusable(f"its forward calls {name} without an axis")
            return of_tensor(x.reshape(x.shape[0], -1), 1, **kwargs)
        dims = tuple(axis(d) for d in dim) if isinstance(dim, tuple | list) else axis(dim)
        return of_tensor(x, dims, *rest, **kwargs)

    for home in (torch, T):
        if hasattr(home, name):
            FORMS[getattr(home, name)] = grouped


for _name in ("mean", "sum", "amax", "amin", "argmax", "argmin", "std", "var", "all", "any", "logsumexp", "prod"):
    _reduction(_name)
for _name in ("softmax", "log_softmax", "cumsum", "cumprod", "sort", "argsort"):
    _reduction(_name, over_all=False)


def _extreme(name: str) -> None:
    over_axis, pairwise, reduced = getattr(T, name), getattr(torch, name + "imum"), getattr(T, "a" + name)

    def grouped(x: T, *args: Any, **kwargs: Any) -> Any:
        other = args[0] if args else kwargs.get("dim", kwargs.get("other"))
        if isinstance(other, T):
            return pairwise(*ranks(x, other))
        if other is None:
            return reduced(x.reshape(x.shape[0], -1), 1)
        return over_axis(x, axis(other), **{k: v for k, v in kwargs.items() if k == "keepdim"} or _keep(args))

    FORMS[over_axis] = FORMS[getattr(torch, name)] = grouped


def _keep(args: tuple[Any, ...]) -> dict[str, bool]:
    return {"keepdim": args[1]} if len(args) > 1 else {}


MIXED.update((T.max, T.min, torch.max, torch.min))
_extreme("max")
_extreme("min")


def _soft(func: Any) -> Callable[..., Any]:
    def grouped(x: T, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> T:
        if dim is None:
            raise NotFusable("its forward calls softmax without an axis")
        result: T = func(x, axis(dim), dtype=dtype)
        return result

    return grouped


FORMS[F.softmax], FORMS[F.log_softmax] = _soft(torch.softmax), _soft(torch.log_softmax)


@form(F.pad)
def _pad(x: T, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> T:
    if mode == "constant":
        return F.pad(x, pad, mode, value)
    return F.pad(x.flatten(0, 1), pad, mode, value).unflatten(0, x.shape[:2])
