"""GPUs that hold replicas, and where the replicas of a group of models go (USHER, algorithm 2).

GPUs of the same content are one *class* with a count, so that a placement costs as much for 10 GPUs as for 6,000. A GPU
holds at most one replica of a model. Parts of a GPU are whole millionths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from benchmarks.placement.model_groups import heavy
from benchmarks.placement.needs import FULL, Need, whole


class BinClass(NamedTuple):
    """GPUs with a replica of each of ``models``. compute, memory, bandwidth: what is left of each.

    own: the group that is being placed was the first to use them.
    """

    own: bool
    models: tuple[int, ...]
    compute: int
    memory: int
    bandwidth: int

    def holding(self, some: Sequence[Replicas]) -> BinClass | None:
        """With a replica of each of ``some``; None if that does not fit."""
        compute = self.compute - sum(one.compute for one in some)
        memory = self.memory - sum(one.memory for one in some)
        if compute < 0 or memory < 0:
            return None
        bandwidth = self.bandwidth - sum(one.bandwidth for one in some)
        if bandwidth < 0 or any(one.model in self.models for one in some):
            return None
        models = tuple(sorted((*self.models, *(one.model for one in some))))
        return BinClass(self.own, models, compute, memory, bandwidth)

    def without(self, some: Mapping[int, Replicas]) -> BinClass:
        """Without the replicas of models in ``some``."""
        gone = [some[model] for model in self.models if model in some]
        models = tuple(model for model in self.models if model not in some)
        compute = self.compute + sum(one.compute for one in gone)
        memory = self.memory + sum(one.memory for one in gone)
        return BinClass(self.own, models, compute, memory, self.bandwidth + sum(one.bandwidth for one in gone))


class Replicas(NamedTuple):
    """``replicas`` replicas of a model, and what each needs, in millionths."""

    model: int
    replicas: int
    compute: int
    memory: int
    bandwidth: int
    heavy: str

    @classmethod
    def of(cls, model: int, replicas: int, need: Need) -> Replicas:
        return cls(model, replicas, whole(need.compute), whole(need.memory), whole(need.bandwidth), heavy(need))

    @property
    def size(self) -> int:
        return self.compute + self.memory


def entries(group: Iterable[Replicas]) -> list[tuple[Replicas, ...]]:
    """The order of placement: the i-th largest compute-heavy and memory-heavy ones in pairs, then by size the rest."""
    by_kind: dict[str, list[Replicas]] = {"compute": [], "memory": [], "neither": []}
    for one in sorted(group, key=lambda one: (-one.size, one.model)):
        by_kind[one.heavy].append(one)
    pairs = zip_longest(by_kind["compute"], by_kind["memory"])
    found = [tuple(one for one in pair if one is not None) for pair in pairs]
    return sorted(found + [(one,) for one in by_kind["neither"]], key=lambda entry: -max(one.size for one in entry))


def place(bins: Counter[BinClass], group: Iterable[Replicas]) -> int:
    """Put the replicas of a group into ``bins``, its own first, fullest first. Returns how many GPUs that opens."""
    opened = 0
    for entry in entries(group):
        left = [one.replicas for one in entry]
        if len(entry) == 2:
            both = min(left)
            rest = _into(bins, entry, both)
            left = [count - both + rest for count in left]
        left = [_into(bins, (one,), count) for one, count in zip(entry, left, strict=True)]
        fresh = BinClass(True, (), FULL, FULL, FULL)
        if len(entry) == 2 and (held := fresh.holding(entry)) is not None:
            both = min(left)
            bins[held] += both
            opened += both
            left = [count - both for count in left]
        for one, count in zip(entry, left, strict=True):
            # A pair that fits no new GPU together may fit one that its first member has just opened for itself.
            count = _into(bins, (one,), count)
            held = fresh.holding((one,))
            assert held is not None, "a configuration needs more than a GPU has"
            bins[held] += count
            opened += count
    return opened


def _into(bins: Counter[BinClass], some: Sequence[Replicas], count: int) -> int:
    """Put up to ``count`` times one replica of each of ``some`` into open GPUs. Returns how many found no place."""
    if not count:
        return 0
    fits = [(one, held) for one, number in bins.items() if number and (held := one.holding(some)) is not None]
    for one, held in sorted(fits, key=lambda fit: (not fit[0].own, fit[1].compute + fit[1].memory, fit)):
        moved = min(count, bins[one])
        bins[one] -= moved
        bins[held] += moved
        count -= moved
        if not count:
            break
    return count
