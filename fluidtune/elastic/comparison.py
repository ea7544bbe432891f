"""Compares, at a boundary, what must be equal in all workers of a group: a cheap digest of it travels.

Weights of workers drift apart where a loop keeps state that no joiner gets, such as a counter of its own for a warm-up.
Small facts are compared at every boundary, weights at the first one in a group, as often as that costs less than
`SHARE` of the time, before a loop's last iteration and after it, and before the group is re-formed or stopped. If
something differs, all workers take the leader's state over. The second time it ends the trial's growth, because the
loop would do it again.
"""

from __future__ import annotations

import hashlib
import math
import struct
import time
from collections.abc import Iterable
from typing import Any

import torch

from .backends.base import CollectiveBackend
from .control_messages import CommittableState
from .growth import Growth

#: The part of a trial's time that digests of its weights may take. Judgement: below the noise of iteration times.
SHARE = 0.01
#: Differences at boundaries before a trial goes on with one worker. Judgement: the first may come from something that
#: the loop does once, and after it all are equal again.
MOST_DIFFERENCES = 2
#: Weights that differ by at most this many units of the last place, relative to the largest value of their tensor, are
#: rounded differently, as by workers with other processors, and not trained differently.
#: Judgement: an optimizer's step has about ten roundings.
_ROUNDING = 64


class Comparison:
    """Belongs to one member of a group; all members call it at the same boundaries."""

    def __init__(self, growth: Growth) -> None:
        self._growth = growth
        #: When the weights were compared last (monotonic clock); None: not in this group.
        self._last: float | None = None
        #: The seconds that the quickest digest took: one that is slow on a busy machine must not delay later ones.
        self._cost = math.inf
        #: What was found to differ since the last boundary, and put right: the worker, and the words.
        self._within: tuple[int, str] | None = None

    def restart(self) -> None:
        """The group is a new one: its weights are compared at its first boundary."""
        self._last = self._within = None

    def differed(self, worker: int, what: str) -> None:
        """Something differed before this boundary, and was put right."""
        self._within = (worker, what)

    def weights_due(self) -> bool:
        """Leader: whether the weights are worth a comparison now."""
        return self._last is None or self._cost <= SHARE * (time.monotonic() - self._last)

    def make_equal(self, group: CollectiveBackend, state: CommittableState, weights: bool) -> None:
        """Compare the workers, and let all have the leader's state if they differ. ``weights``: theirs, too."""
        started = time.monotonic()
        facts = state.facts(weights)
        if weights:
            self._last = started
            self._cost = min(self._cost, time.monotonic() - started)
        if not facts:
            return
        rows = group.exchange(torch.tensor(list(facts.values()), dtype=torch.float64), "the comparison of the workers")
        differing = [i for i in range(rows.shape[1]) if not torch.equal(rows[:, i], rows[:1, i].expand(len(rows)))]
        within, self._within = self._within, None
        if not differing:
            if within is not None:
                self._note(*within)
            return
        distance = state.take_over(group)
        furthest = float(group.exchange(torch.tensor([distance], dtype=torch.float64), "the distance").max())
        names = list(facts)
        if furthest <= 1 and all(names[i] in WEIGHTS for i in differing):
            if within is not None:
                self._note(*within)
            return
        worker = next(rank for rank in range(1, len(rows)) if not torch.equal(rows[rank], rows[0]))
        found = [_described(names[i], float(rows[0, i]), float(rows[worker, i])) for i in differing]
        self._note(worker, ", ".join(found if within is None else [within[1], *found]))

    def _note(self, worker: int, what: str) -> None:
        self._growth.note_difference(
            f"worker {worker} differed from the leader in: {what}; a joiner has only what the loop has prepared",
            MOST_DIFFERENCES,
        )


#: The facts about weights.
WEIGHTS = ("parameters", "buffers")
#: The facts that are numbers which say something to people; the others are digests.
_NUMBERS = ("optimizer steps", "batches", "learning rate")


def _described(name: str, leaders: float, theirs: float) -> str:
    return f"{name} ({theirs:g}, leader {leaders:g})" if name in _NUMBERS else name


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
    """How far these floating-point tensors are apart, in units of `_ROUNDING`: up to 1 is rounding."""
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
