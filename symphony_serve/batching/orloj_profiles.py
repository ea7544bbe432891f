"""How long batches of a dynamic model take: the times of its requests alone, and a map from the longest to the batch.

`Orloj` is made with one or more. `orloj_learned` makes them of the batches that were seen. All times are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from symphony_serve.batching.orloj_histograms import Histogram, Largest, largest, mixture
from symphony_serve.errors import ServeError


@dataclass(frozen=True)
class BatchMap:
    """The time of a batch of k is ``offset + scale * (its longest request's time alone)``, for each k of ``by_size``.

    by_size: size -> (offset in seconds, scale). An offset may be negative: where a part o of each request's time is
    shared by a batch and the rest is not, the offset is ``o - k * o`` and the scale k. Raises ServeError if there is no
    size, if one is below 1, if an offset is not finite, or if a scale is not above 0.
    """

    by_size: Mapping[int, tuple[float, float]]

    def __post_init__(self) -> None:
        if not self.by_size:
            raise ServeError("no batch size is supported: give at least one, mostly 1, 2, 4, 8 and 16")
        for size, (offset, scale) in self.by_size.items():
            if size < 1 or size != int(size):
                raise ServeError(f"batch size {size}: give whole numbers of at least 1")
            if not (math.isfinite(offset) and 0 < scale < math.inf):
                raise ServeError(
                    f"a batch of {size} takes {offset} s + {scale} * its longest request: give a finite offset and a "
                    "scale above 0"
                )
        object.__setattr__(self, "by_size", dict(sorted(self.by_size.items())))


@dataclass(frozen=True)
class VaryingProfile:
    """The distributions of the sources' times alone, and the map to the time of a batch.

    Each place of a batch is taken by a source at random.

    sources: source -> the distribution of the time of one of its requests alone.
    weights: source -> how often it takes a place, relative to the others; None: all the same, as in the paper. They
        change little (docs/serving-figures.md has them).
    enough: whether enough was measured to say how long a batch may take at the most.

    Raises ServeError if there is no source, if the weights are not those of the sources, or if a larger batch is
    expected to take less time than a smaller one.
    """

    batches: BatchMap
    sources: Mapping[str, Histogram]
    weights: Mapping[str, float] | None = None
    enough: bool = True
    #: size -> the time of a batch of this size.
    times: Mapping[int, Largest] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.sources:
            raise ServeError("a profile without a source: give the distribution of at least one")
        weights = dict.fromkeys(self.sources, 1.0) if self.weights is None else self.weights
        if weights.keys() != self.sources.keys() or not all(0 < weight < math.inf for weight in weights.values()):
            raise ServeError(f"weights {dict(weights)}: give one above 0 for each of {', '.join(self.sources)}")
        longest_of, times = self._longest(weights), dict[int, Largest]()
        before = (0, 0.0)
        for size, (offset, scale) in self.batches.by_size.items():
            longest = longest_of(size)
            times[size] = Largest(longest.histogram.mapped(offset, scale), offset + scale * longest.mean)
            if times[size].mean < before[1] * (1 - 1e-9):
                raise ServeError(
                    f"a batch of {size} is expected to take {times[size].mean} s and one of {before[0]} takes "
                    f"{before[1]} s: give a map by which larger batches take longer"
                )
            before = (size, times[size].mean)
        object.__setattr__(self, "times", times)

    def _longest(self, weights: Mapping[str, float]) -> Callable[[int], Largest]:
        """What says the longest time alone in a batch of a size."""
        return partial(largest, mixture(list(self.sources.values()), [weights[one] for one in self.sources]))


class SeenProfile(NamedTuple):
    """The times of batches of requests of ``sources``, as they were seen. times, enough: as of `VaryingProfile`."""

    sources: frozenset[str]
    times: Mapping[int, Largest]
    enough: bool


def fetched(times: Mapping[int, Largest], data: float) -> Mapping[int, Largest]:
    """The times of batches whose inputs take ``data`` seconds each to fetch before the batch."""
    return {
        size: Largest(time.histogram.mapped(data * size, 1.0), data * size + time.mean) for size, time in times.items()
    }
