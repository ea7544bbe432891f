"""What a replica of a model needs of a GPU at each batch size: compute, memory, bandwidth, and the seconds of a batch.

Needs are measured, summed over a graph of kernels (`need_of_kernels`), or lie between two that are known
(`interpolated`). The rules are USHER's (Shubha, Shen, Iyer, OSDI'24) as ../spec/usher.md corrects them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from symphony_serve.errors import ServeError

#: A GPU in millionths.
FULL = 1_000_000
#: Batches at which a plan may run a model. Source: USHER, algorithm 1.
BATCHES = (4, 8, 16, 32, 64, 128)


class Need(NamedTuple):
    """Parts of a GPU, 0 to 1, at this batch. seconds: of a batch. bandwidth: of memory; 0 where it is not known."""

    batch: int
    compute: float
    memory: float
    seconds: float
    bandwidth: float = 0.0

    @property
    def capacity(self) -> float:
        """Requests per second."""
        return self.batch / self.seconds


class Kernel(NamedTuple):
    """A kernel of a model's graph. compute: part of the GPU. after: names of the kernels whose outputs it reads."""

    name: str
    seconds: float
    bytes: float
    compute: float
    after: tuple[str, ...] = ()


def need_of_kernels(batch: int, parameters: float, kernels: Sequence[Kernel], memory: float) -> Need:
    """The need of a graph at ``batch``: the most that kernels take together which run at one moment.

    A kernel starts when the last of ``after`` ends. parameters: bytes of weights. memory: bytes of the GPU. The
    kernels stand in an order in which each comes after those that it reads. Raises ServeError if they do not.
    """
    start: dict[str, float] = {}
    end: dict[str, float] = {}
    for one in kernels:
        unknown = [name for name in one.after if name not in end]
        if unknown:
            raise ServeError(f"kernel {one.name} reads {unknown[0]}, which does not stand before it; sort the kernels")
        if one.name in end:
            raise ServeError(f"two kernels are named {one.name}; give them different names")
        start[one.name] = max((end[name] for name in one.after), default=0.0)
        end[one.name] = start[one.name] + one.seconds
    if not any(end.values()):
        raise ServeError("the kernels take 0 s together; give the seconds of each")
    # At one moment, kernels end before others start.
    moments = sorted(
        [(end[one.name], 0, -one.compute, -one.bytes) for one in kernels]
        + [(start[one.name], 1, one.compute, one.bytes) for one in kernels]
    )
    sums = np.cumsum([moment[2:] for moment in moments], axis=0).max(axis=0)
    return Need(batch, min(1.0, float(sums[0])), (parameters + float(sums[1])) / memory, max(end.values()))


def interpolated(known: Iterable[Need]) -> tuple[Need, ...]:
    """The needs that are known, and those at `BATCHES` between them, by batch.

    Memory, seconds and bandwidth are linear in the batch b, compute is c b / (b + h). Raises ServeError for a need out
    of range, two of one batch, or seconds that fall with the batch.
    """
    found = sorted(known)
    for one in found:
        wrong = [f"{key} {getattr(one, key):g}" for key in ("compute", "memory") if not 0 < getattr(one, key) <= 1]
        wrong += [] if 0 <= one.bandwidth <= 1 else [f"bandwidth {one.bandwidth:g}"]
        if wrong:
            raise ServeError(f"it needs {wrong[0]} at batch {one.batch}, expected a part of a GPU, 0 to 1")
    for one, after in itertools.pairwise(found):
        if one.batch == after.batch:
            raise ServeError(f"there are two needs at batch {one.batch}; give one")
        if one.seconds > after.seconds:
            raise ServeError(
                f"a batch of {after.batch} takes {after.seconds:g} s and one of {one.batch} {one.seconds:g} s; seconds "
                "cannot fall with the batch; measure again"
            )
    known_batches = np.array([one.batch for one in found], dtype=float)

    def between(batch: int, values: Iterable[float]) -> float:
        return float(np.interp(batch, known_batches, list(values)))

    def at(batch: int) -> Need:
        # 1 / C is linear in 1 / b.
        inverse = np.interp(1 / batch, 1 / known_batches[::-1], [1 / one.compute for one in found[::-1]])
        memory, seconds, bandwidth = (between(batch, (one[at] for one in found)) for at in (2, 3, 4))
        return Need(batch, min(1.0, 1 / float(inverse)), memory, seconds, bandwidth)

    first, last = found[0].batch, found[-1].batch
    given = {one.batch: one for one in found}
    batches = sorted({*given, *(batch for batch in BATCHES if first < batch < last)})
    return tuple(given.get(batch) or at(batch) for batch in batches)


def whole(part: float) -> int:
    """A part of a GPU in millionths, rounded up, so that sums are exact and never too small."""
    return math.ceil(part * FULL - 1e-3)
