"""The grouped forms of layers: linear and convolutional ones, normalisation, pooling, embeddings, dropout, attention.

A convolution, a pooling or a normalisation by channels of K trials is one of K times the channels. Its result is kept
in that order, so that a row of such layers copies nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor as T
from torch.nn import functional as F

from . import dropout_masks
from .dropout_masks import Draws
from .grouped_forms import ranks
from .stacked_tensor import FORMS, MIXED, NotFusable, Stacked, form

# -- products of matrices --


@form(F.linear)
def _linear(x: T, weight: T, bias: T | None = None) -> T:
    if type(x) is not Stacked or type(weight) is not Stacked:
        return _sum(_matmul(x, weight.transpose(-1, -2)), bias)
    k, *lead, width = x.shape
    rows = x.reshape(k, -1, width)
    across = weight.transpose(1, 2)
    if bias is None or type(bias) is not Stacked:
        y = torch.bmm(rows, across)
        return _sum((y if len(lead) == 1 else y.view(k, *lead, -1)).as_subclass(Stacked), bias)
    y = torch.baddbmm(bias.unsqueeze(1), rows, across)
    return y if len(lead) == 1 else y.view(k, *lead, -1)


def _sum(x: T, bias: T | None) -> T:
    if bias is None:
        return x
    a, b = ranks(x, bias)
    return a + b


@form(T.matmul, torch.matmul, T.__matmul__, T.__rmatmul__)
def _matmul(x: T, y: T) -> T:
    one = min(t.dim() - (type(t) is Stacked) for t in (x, y))
    if one < 2:
        raise NotFusable("its forward multiplies a matrix and a vector")
    x, y = ranks(x, y)
    return torch.matmul(x, y).as_subclass(Stacked)


FORMS[torch.bmm] = FORMS[T.bmm] = FORMS[torch.mm] = FORMS[T.mm] = _matmul
MIXED.update((F.linear, T.matmul, torch.matmul, T.__matmul__, torch.bmm, T.bmm, torch.mm, T.mm))
FORMS[T.__rmatmul__] = lambda x, y: _matmul(y, x)


# -- channels --


def merged(x: T) -> T:
    """(K, N, C, ...) as (N, K * C, ...)."""
    k, n, c, *rest = x.shape
    return x.transpose(0, 1).reshape(n, k * c, *rest)


def divided(x: T, k: int) -> T:
    """(N, K * C, ...) as (K, N, C, ...)."""
    return x.view(x.shape[0], k, -1, *x.shape[2:]).transpose(0, 1)


def _convolution(func: Any, axes: int, transposed: bool) -> None:
    def grouped(x: T, weight: T, bias: T | None = None, *args: Any, **kwargs: Any) -> T:
        names = ("stride", "padding", "output_padding", "groups", "dilation") if transposed else (
            "stride", "padding", "dilation", "groups"
        )  # fmt: skip
        options = {**dict(zip(names, args, strict=False)), **kwargs}
        if x.dim() != axes + 3 or type(weight) is not Stacked or (bias is not None and type(bias) is not Stacked):
            raise NotFusable("its forward convolves without a batch, or by weights of no trial")
        k = x.shape[0]
        options["groups"] = options.get("groups", 1) * k
        y = func(merged(x), weight.flatten(0, 1), None if bias is None else bias.reshape(-1), **options)
        return divided(y, k)

    FORMS[func] = grouped


for _axes in (1, 2, 3):
    _convolution(getattr(torch, f"conv{_axes}d"), _axes, False)
    _convolution(getattr(torch, f"conv_transpose{_axes}d"), _axes, True)


def _pooling(func: Any, axes: int) -> None:
    def grouped(x: T, *args: Any, **kwargs: Any) -> T:
        if x.dim() != axes + 3 or kwargs.get("return_indices"):
            raise NotFusable("its forward pools without a batch, or with indices")
        return divided(func(merged(x), *args, **kwargs), x.shape[0])

    FORMS[func] = grouped


for _axes in (1, 2, 3):
    for _name in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool"):
        _pooling(getattr(F, f"{_name}{_axes}d"), _axes)
    if hasattr(torch, f"max_pool{_axes}d"):
        _pooling(getattr(torch, f"max_pool{_axes}d"), _axes)


@form(F.batch_norm)
def _batch_norm(
    x: T,
    running_mean: T | None,
    running_var: T | None,
    weight: T | None = None,
    bias: T | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> T:
    k = x.shape[0]
    given = (running_mean, running_var, weight, bias)
    if any(t is not None and type(t) is not Stacked for t in given) or x.dim() < 3:
        raise NotFusable("its forward normalises by what is not of its own")
    if training and x.shape[1] * math.prod(x.shape[3:]) == 1:
        raise NotFusable("a batch has one value per channel")  # alone, torch says so
    mean, var, w, b = (None if t is None else t.reshape(-1) for t in given)
    y = F.batch_norm(merged(x), mean, var, w, b, training, momentum, eps)
    if training:
        for whole, part in ((running_mean, mean), (running_var, var)):
            if whole is not None and part is not None and part.data_ptr() != whole.data_ptr():
                whole.copy_(part.view_as(whole))
    return divided(y, k)


@form(F.layer_norm)
def _layer_norm(x: T, normalized_shape: Any, weight: T | None = None, bias: T | None = None, eps: float = 1e-5) -> T:
    y: T = F.layer_norm(x, normalized_shape, None, None, eps).as_subclass(Stacked)
    if weight is not None:
        a, b = ranks(y, weight)
        y = (a * b).as_subclass(Stacked)
    return _sum(y, bias)


@form(F.group_norm)
def _group_norm(x: T, num_groups: int, weight: T | None = None, bias: T | None = None, eps: float = 1e-5) -> T:
    if any(t is not None and type(t) is not Stacked for t in (weight, bias)) or x.dim() < 3:
        raise NotFusable("its forward normalises by what is not of its own")
    w, b = (None if t is None else t.reshape(-1) for t in (weight, bias))
    return divided(F.group_norm(merged(x), num_groups * x.shape[0], w, b, eps), x.shape[0])


@form(F.embedding)
def _embedding(
    indices: T,
    weight: T,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> T:
    if max_norm is not None or scale_grad_by_freq or sparse or type(weight) is not Stacked:
        raise NotFusable("its embedding has max_norm, scale_grad_by_freq, sparse gradients or a constant weight")
    k, rows, width = weight.shape
    first = torch.arange(k, device=weight.device) * rows
    flat = (indices + first.view(k, *[1] * (indices.dim() - 1))) if type(indices) is Stacked else (
        indices + first.view(k, *[1] * indices.dim())
    )  # fmt: skip
    _check_range(indices, rows)
    table = weight.reshape(k * rows, width)
    y = F.embedding(flat, table)
    if padding_idx is not None:  # no gradient flows into this row
        here = (indices == padding_idx % rows).unsqueeze(-1)
        y = torch.where(here, y.detach(), y)
    return y


def _check_range(indices: T, rows: int) -> None:
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < rows:
        raise NotFusable("an index is out of the range of its embedding")  # alone, torch says so


MIXED.add(F.embedding)

# -- dropout --


class PerTrial(float):
    """A rate that differs by trial: ``rates`` has one for each. A forward takes it for the number 0.5."""

    rates: tuple[float, ...]

    def __new__(cls, rates: tuple[float, ...]) -> PerTrial:
        made = super().__new__(cls, 0.5)
        made.rates = rates
        return made


#: What draws for the trials of the call that is being done (see `drawing`).
_draws: Draws | None = None


@contextmanager
def drawing(draws: Draws) -> Iterator[None]:
    """Let dropout draw by ``draws``."""
    global _draws
    before, _draws = _draws, draws
    try:
        yield
    finally:
        _draws = before


def _drawing() -> Draws:
    if _draws is None:
        raise NotFusable("dropout outside of a call of several trials")
    return _draws


def _rates(p: float, x: T) -> tuple[float, ...]:
    return p.rates if isinstance(p, PerTrial) else (float(p),) * x.shape[0]


def dropped(x: T, p: float, *, inplace: bool = False, channels: bool = False) -> T:
    """``x`` times a mask for each trial; ``p`` is a number or a `PerTrial`. ``channels``: whole ones are dropped."""
    rates, shape = _rates(p, x), x.shape[1:]
    if not any(rates):
        return x
    if channels:
        shape = torch.Size([*shape[:2], *[1] * (len(shape) - 2)])
    mask = _drawing().masks(shape, rates, x, inplace=inplace, channels=channels)
    return x.mul_(mask) if inplace else x * mask


def _dropout(features: int | None) -> Callable[..., Any]:
    def grouped(x: T, p: float = 0.5, training: bool = True, inplace: bool = False) -> T:
        if not training:
            return x
        if features is not None and x.dim() < features + 3:
            raise NotFusable("its forward drops channels without a batch")
        return dropped(x, p, inplace=inplace, channels=features is not None)

    return grouped


FORMS[F.dropout] = _dropout(None)
for _axes in (1, 2, 3):
    FORMS[getattr(F, f"dropout{_axes}d")] = _dropout(_axes)
FORMS[torch.dropout] = lambda x, p, train: _dropout(None)(x, p, train)

# -- attention --


@form(F.scaled_dot_product_attention)
def attend(
    query: T,
    key: T,
    value: T,
    attn_mask: T | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> T:
    """As torch's; the trials are one more axis of the batch. With dropout, cores compute the weights in full."""
    if enable_gqa or not all(type(t) is Stacked for t in (query, key, value)):
        raise NotFusable("its attention has groups of queries, or a constant")
    query, key, value = ranks(query, key, value)
    own_masks = type(attn_mask) is Stacked
    if attn_mask is not None and own_masks:
        attn_mask = ranks(query.as_subclass(Stacked), attn_mask)[1]
    if not isinstance(dropout_p, PerTrial) and not dropout_p:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale)
    rates = _rates(dropout_p, query)
    if dropout_masks.on_gpu(query) and any(rates):
        masks = list(attn_mask.unbind()) if attn_mask is not None and own_masks else [attn_mask] * len(rates)
        return _drawing().attend(query, key, value, masks, rates, is_causal, scale)
    weights = query @ key.transpose(-1, -2) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(weights.shape[-2:], dtype=torch.bool, device=weights.device).tril()
    if attn_mask is not None:
        weights = weights.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else weights + attn_mask
    weights = torch.softmax(weights, -1)
    return dropped(weights, dropout_p) @ value


@form(F.multi_head_attention_forward)
def _multi_head(
    query: T,
    key: T,
    value: T,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: T | None,
    in_proj_bias: T | None,
    bias_k: T | None,
    bias_v: T | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: T,
    out_proj_bias: T | None,
    training: bool = True,
    key_padding_mask: T | None = None,
    need_weights: bool = True,
    attn_mask: T | None = None,
    use_separate_proj_weight: bool = False,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    **rest: Any,
) -> tuple[T, T | None]:
    """Sequences are (length, batch, width) here; a mask is that of torch's function."""
    if (
        bias_k is not None or bias_v is not None or add_zero_attn or use_separate_proj_weight or in_proj_weight is None
        or query.dim() != 4 or need_weights or any(value is not None for value in rest.values())
    ):  # fmt: skip
        raise NotFusable("its attention returns weights, or has other projections than torch's usual ones")

    def heads(x: T, part: int) -> T:
        of = slice(part * embed_dim_to_check, (part + 1) * embed_dim_to_check)
        bias = None if in_proj_bias is None else in_proj_bias[:, of].as_subclass(Stacked)
        weight = in_proj_weight[:, of].as_subclass(Stacked)
        y = _linear(x.as_subclass(Stacked), weight, bias)
        k, length, batch, width = y.shape
        return y.view(k, length, batch, num_heads, width // num_heads).permute(0, 2, 3, 1, 4)

    mask = attn_mask
    if mask is not None and mask.dim() - (type(mask) is Stacked) == 3:
        raise NotFusable("its attention has a mask for each head")
    if key_padding_mask is not None:
        if key_padding_mask.dtype == torch.bool:
            key_padding_mask = torch.zeros_like(key_padding_mask, dtype=query.dtype).masked_fill(
                key_padding_mask, -math.inf
            )
        padding = key_padding_mask[..., :, None, None, :]
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask, -math.inf)
        mask = padding if mask is None else padding + mask
    elif mask is not None and mask.dtype == torch.bool:
        mask = ~mask  # here True is what is not attended to
    causal = is_causal and key_padding_mask is None and attn_mask is not None
    if mask is not None and not causal and key_padding_mask is not None and type(key_padding_mask) is Stacked:
        mask = mask.as_subclass(Stacked)
    q, k, v = (heads(x, part).as_subclass(Stacked) for part, x in enumerate((query, key, value)))
    y = attend(q, k, v, None if causal else mask, dropout_p if training else 0.0, causal)
    y = y.permute(0, 3, 1, 2, 4).flatten(3)
    out = _linear(y.as_subclass(Stacked), out_proj_weight, out_proj_bias)
    return out, None
