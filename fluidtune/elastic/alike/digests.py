"""Digests of weights and of plain state: small numbers that are equal where the state is."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import Any

import torch

#: Weights that differ by at most this many units of the last place, relative to the largest value of their tensor, are
#: rounded differently, as by workers with other processors, and not trained differently: an optimizer's step has about
#: ten roundings.
_ROUNDING = 64


def digest_of(values: Iterable[Any]) -> float:
    """A number for these plain values, equal for equal ones; exact in a float."""
    return _number(repr(list(values)).encode())


def digest_of_tensors(tensors: Iterable[torch.Tensor]) -> float:
    """A number for the bits of these tensors: the sums of their words, as integers."""
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.device.type == "meta" or not tensor.numel():
            continue
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        whole = data.numel() // 8 * 8
        words = data[:whole]
        if words.storage_offset() % 8:
            words = words.clone()
        found = sums.setdefault(tensor.device, [])
        found += [words.view(torch.int64).sum(), data[whole:].sum(dtype=torch.int64)]
    numbers = [number for found in sums.values() for number in torch.stack(found).tolist()]
    return _number(struct.pack(f"<{len(numbers)}q", *numbers))


def distance_between(before: list[torch.Tensor], after: list[torch.Tensor]) -> float:
    """How far these tensors are apart, in units of `_ROUNDING`: up to 1 is rounding."""
    furthest = 0.0
    for old, new in zip(before, after, strict=True):
        if not new.is_floating_point() or not new.numel():
            furthest = max(furthest, 0.0 if torch.equal(old, new) else float("inf"))
            continue
        eps = torch.finfo(new.dtype).eps
        old, new = torch.nan_to_num(old.double()), torch.nan_to_num(new.double())
        size = float(new.abs().max()) or 1.0
        furthest = max(furthest, float((old - new).abs().max()) / (size * eps * _ROUNDING))
    return furthest


def plain_leaves(value: Any) -> list[Any]:
    """The numbers and strings in a state_dict, in a fixed order, without what is a process' own, such as functions."""
    if isinstance(value, torch.Tensor):
        return [value.tolist()] if value.numel() <= 16 else []
    if isinstance(value, dict):
        return [leaf for key in sorted(value, key=str) for leaf in (str(key), *plain_leaves(value[key]))]
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in plain_leaves(part)]
    return [value] if value is None or isinstance(value, bool | int | float | str) else []


def _number(data: bytes) -> float:
    # 52 bits: a float64 has 53 for a whole number.
    return float(int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 12)
