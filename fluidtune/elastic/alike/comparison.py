"""Compares what must be equal in all workers of a group: a cheap digest of it travels.

Workers drift apart where a loop keeps state that no joiner gets, such as slow weights in a list. Small facts are
compared at every boundary. Weights are compared before each of the first `EACH_BATCH` divided batches of a group, later
as often as that costs less than `SHARE` of the time, at the first boundary, before a loop's last iteration and after
it, and before the group is re-formed or stopped. If something differs, all workers take the leader's state over.
Weights that differ before a batch end the trial's growth (`common_batches` says how the turn goes on). What differs at
a boundary ends it the second time, because the loop would do it again.
"""

from __future__ import annotations

import hashlib
import math
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..commits.committable import CommittableState
from ..transport.base import CollectiveBackend

#: The part of a trial's time that digests of its weights may take. Judgement: below the noise of iteration times.
SHARE = 0.01
#: Batches after a growth before each of which the weights are compared, whatever that costs. Judgement: what a loop
#: does every 5 or 10 steps, such as a step of slow weights, shows in them; later the part above holds.
EACH_BATCH = 32
#: Weights that differ by at most this many units of the last place, relative to the largest value of their tensor, are
#: rounded differently, as by workers with other processors, and not trained differently.
#: Judgement: an optimizer's step has about ten roundings.
_ROUNDING = 64


class Comparison:
    """Belongs to one member of a group; all members call it at the same boundaries."""

    def __init__(self) -> None:
        #: When the weights were compared last (monotonic clock); None: not in this group.
        self._last: float | None = None
        #: The seconds that the quickest digest took: one that is slow on a busy machine must not delay later ones.
        self._cost = math.inf
        #: Comparisons before a batch, in this group.
        self._at_batches = 0
        #: What was found to differ since the last boundary, and put right: the worker, and the words.
        self._within: tuple[int, str] | None = None

    def restart(self) -> None:
        """The group is a new one: its weights are compared at its first boundary."""
        self._last = self._within = None
        self._at_batches = 0

    def differed(self, worker: int, what: str) -> None:
        """Something differed before this boundary, and was put right."""
        self._within = (worker, what)

    def weights_due(self) -> bool:
        """Leader: whether the weights are worth a comparison now."""
        return self._last is None or self._cost <= SHARE * (time.monotonic() - self._last)

    def due_at_batch(self) -> bool:
        """Leader: whether the weights are worth a comparison before a batch."""
        return self._at_batches < EACH_BATCH or self.weights_due()

    def equal_at_batch(self, group: CollectiveBackend, state: CommittableState) -> str | None:
        """All workers, before a batch: compare the weights, and let all have the leader's if they differ.

        Returns what differed, beyond rounding; None: nothing did.
        """
        self._at_batches += 1
        found = self._differing(group, state, self._noted(state.digests))
        return None if found is None else found[1]

    def make_equal(self, group: CollectiveBackend, state: CommittableState, weights: bool) -> str | None:
        """At a boundary: as `equal_at_batch`, for all facts. ``weights``: the weights, too."""
        facts = self._noted(lambda: state.facts(True)) if weights else state.facts(False)
        if not facts:
            return None
        within, self._within = self._within, None
        found = self._differing(group, state, facts)
        if found is not None and within is not None:
            found = found[0], f"{within[1]}, {found[1]}"
        found = found or within
        return None if found is None else f"worker {found[0]} differed from the leader in: {found[1]}"

    def _noted(self, digests: Callable[[], dict[str, float]]) -> dict[str, float]:
        """What ``digests`` returns, with the time that it takes noted."""
        started = self._last = time.monotonic()
        found = digests()
        self._cost = min(self._cost, time.monotonic() - started)
        return found

    def _differing(
        self, group: CollectiveBackend, state: CommittableState, facts: dict[str, float]
    ) -> tuple[int, str] | None:
        """The first worker that differs from the leader beyond rounding, and in what. All have the leader's then."""
        rows = group.exchange(torch.tensor(list(facts.values()), dtype=torch.float64), "the comparison of the workers")
        differing = [i for i in range(rows.shape[1]) if not torch.equal(rows[:, i], rows[:1, i].expand(len(rows)))]
        if not differing:
            return None
        distance = state.take_over(group)
        furthest = float(group.exchange(torch.tensor([distance], dtype=torch.float64), "the distance").max())
        names = list(facts)
        if furthest <= 1 and all(names[i] in WEIGHTS for i in differing):
            return None
        worker = next(rank for rank in range(1, len(rows)) if not torch.equal(rows[rank], rows[0]))
        return worker, ", ".join(_described(names[i], float(rows[0, i]), float(rows[worker, i])) for i in differing)


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
