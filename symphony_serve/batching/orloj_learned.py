"""Learns how long the batches of each source take, from the batches that were seen. All times are seconds.

What is kept of a batch is its *stretch*: its seconds divided by those of the first profile. The stretch of a batch is
``level of its longest source * factor of its size * a rest``. The factors correct the profile, one for each range of
sizes from one power of two to the next. Levels and factors are the medians that explain the latest batches best, and
the rest is the distribution.

The paper computes a batch from the distribution of single requests, and so it runs finished requests again, alone
(section 4.3.2). Here nothing is run for that. That a batch takes as long as its longest request is in what is seen of
batches of that size. (To find the single requests from batches of many by expectation maximisation was tried. It was
worse: a batch does not say whether its size or its requests made it long.)

A source is *known* when a batch of its requests alone was seen. Until then it has a class of its own, which is thought
to be as fast as the fastest known one. So it is tried soon.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from symphony_serve.batching.orloj_histograms import Histogram
from symphony_serve.profiles import Profile

#: Of each source, the latest batches that count: as many as there are in a second or two, or in half a minute of those
#: that take 0.2 s.
EACH = 128
#: Sources that are told apart at most. The requests of further ones count as those that name none.
MOST_SOURCES = 16
#: Sources belong to one class if the level of the longest is at most this many times that of the shortest.
ALIKE = 1.2
#: How long a batch may take at the most is not concluded from fewer batches.
ENOUGH = 20
#: Profiles are made anew after this many seconds of batches, and at first when there are twice as many batches as
#: before. It takes some milliseconds, 1 % of the time.
EVERY_S = 0.5
#: The medians of levels and factors are taken in turn, this many times.
ROUNDS = 4
#: No name: of requests that name no source, and of batches with several sources of which one is not known.
NAMELESS = ""


class SeenProfile(NamedTuple):
    """The times of batches of requests of ``sources``, by size, as they were seen.

    enough: whether enough was seen to say how long a batch may take at the most.
    """

    sources: frozenset[str]
    times: Mapping[int, Histogram]
    enough: bool


class LearnedTimes:
    """How long batches of each source took.

    first: the profile that was measured at load. slowest: as of `SeenTimes`: the longest that a batch of 1 is said to
    take, so that a source that was too slow for a while is tried again by requests that have more time than that. For
    the others, there is `tried`.
    """

    def __init__(self, first: Profile, slowest: float):
        self._first = first
        self._slowest = slowest
        self._names = {NAMELESS}
        #: By source: (range of sizes, logarithm of the stretch) of the batches in which it is the longest.
        self._seen: dict[str, deque[tuple[int, float]]] = {}
        #: The logarithms of the levels and of the factors, as of the last `profiles`.
        self._levels: dict[str, float] = {}
        self._factors: dict[int, float] = {}
        self._batches = 0
        #: When `profiles` were due last: the batches until then, and the seconds of batches since then.
        self._before, self._seconds = 1, 0.0
        #: The seconds that batches of all sources are expected to take, since `profiles` was called last.
        self.expected = first
        #: What `profiles` returned last.
        self.made: list[SeenProfile] = []

    def add(self, sources: Sequence[str], stretch: float) -> None:
        """A batch of requests of these sources took ``stretch`` times as long as the first profile says."""
        named = {self._named(source) for source in sources}
        known = len(named) == 1 or named <= self._levels.keys()
        longest = max(named, key=lambda source: self._levels.get(source, 0.0)) if known else NAMELESS
        seen = self._seen.setdefault(longest, deque(maxlen=EACH))
        seen.append((len(sources).bit_length(), math.log(max(stretch, 1e-9))))
        self._batches += 1

    def _named(self, source: str) -> str:
        if source not in self._names and len(self._names) <= MOST_SOURCES:
            self._names.add(source)
        return source if source in self._names else NAMELESS

    def due(self, seconds: float) -> bool:
        """Whether `profiles` should be made anew, now that one more batch took ``seconds``."""
        self._seconds += seconds
        if self._batches < 2 * self._before and self._seconds < EVERY_S:
            return False
        self._before, self._seconds = self._batches, 0.0
        return True

    @property
    def spread(self) -> float:
        """By how many times the longest known source is longer than the shortest, as of the last `profiles`."""
        levels = self._levels.values()
        return math.exp(max(levels) - min(levels)) if levels else 1.0

    def profiles(self, wait: float = 0.0) -> list[SeenProfile]:
        """The profiles of the classes of sources, the shortest first. Each batch first waits ``wait`` for its turn."""
        self._fit()
        order = sorted(self._levels, key=lambda source: self._levels[source])
        found = {source: self._times(source, wait) for source in order}
        if not found:
            found[NAMELESS] = {size: _always(wait + self._first.seconds(size)) for size in self._sizes}
            order = [NAMELESS]
        enough = self._batches >= ENOUGH
        made = [
            SeenProfile(frozenset((name,)), found[order[0]], enough)
            for name in sorted(self._names - self._levels.keys() - {NAMELESS})
        ]
        shortest = self._levels.get(order[0], 0.0)
        for place, source in enumerate(order):
            last = place + 1 == len(order)
            if last or self._levels[order[place + 1]] > shortest + math.log(ALIKE):
                made.append(SeenProfile(frozenset(order[: place + 1]), found[source], enough))
                shortest = shortest if last else self._levels[order[place + 1]]
        table = [0.0]
        for size, time in made[-1].times.items():  # A size that is not formed takes as long as the next larger one.
            table += [max(time.mean, table[-1])] * (size + 1 - len(table))
        self.expected, self.made = Profile((*table, math.inf)), made
        return made

    def alone(self, source: str) -> float:
        """The seconds of a batch of 1 with a request of this source, as of the last `profiles`."""
        classes = [one for one in self.made if one is self.made[-1] or source in one.sources]
        return min(one.times[1].mean for one in classes)

    @property
    def tried(self) -> list[SeenProfile]:
        """The last `profiles`, with a batch of 1 that takes what the first profile says, if that is less."""
        first = _always(self._first.seconds(1))
        return [
            one._replace(times={**one.times, 1: min(one.times[1], first, key=lambda time: time.mean)})
            for one in self.made
        ]

    def _fit(self) -> None:
        """Find levels and factors: each is the median of what the others leave."""
        self._factors.clear()
        for _ in range(ROUNDS if self._seen else 0):
            left: dict[int, list[float]] = {}
            for source, seen in self._seen.items():
                level = median([value - self._factors.get(sizes, 0.0) for sizes, value in seen])
                self._levels[source] = level
                for sizes, value in seen:
                    left.setdefault(sizes, []).append(value - level)
            self._factors = {sizes: median(values) for sizes, values in left.items()}

    def _times(self, source: str, wait: float) -> dict[int, Histogram]:
        """The times of batches in which the source is the longest, by size."""
        stretches = Histogram.of_samples(math.exp(value - self._factors[sizes]) for sizes, value in self._seen[source])
        times, most = {}, 0.0
        for size in self._sizes:
            nearest = min(self._factors, key=lambda other: (abs(other - size.bit_length()), other))
            scale = math.exp(self._factors[nearest]) * self._first.seconds(size)
            if size == 1:
                scale = min(scale, max(self._slowest - wait, 1e-9) / stretches.mean)
            most = max(most, scale)
            times[size] = stretches.mapped(wait, most)
        return times

    @property
    def _sizes(self) -> list[int]:
        """All sizes to 8, then four to each doubling, and the largest. Powers of two alone answer fewer in time."""
        most = self._first.max_batch
        return [size for size in range(1, most + 1) if size % (1 << max(0, size.bit_length() - 3)) == 0 or size == most]


def _always(seconds: float) -> Histogram:
    return Histogram((seconds, seconds), (1.0,))
