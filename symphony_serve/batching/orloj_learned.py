"""Learns how long the requests of each source take, from batches of many. All times are seconds.

A batch of k takes ``factor * l(k) * (the longest of its requests)``. l is the profile that was measured first. A
request's time is thus a *stretch*: 1 is what the profile says. The factor corrects the profile for one range of sizes,
from one power of two to the next. Only a batch's time is seen, not which of its requests was the longest, and with
which of the others' times. So each batch says of each source in it how probable each of its times is, by what was known
before, and that is averaged into the source's distribution: expectation maximisation, one batch at a time. (The paper
runs finished requests again, alone, section 4.3.2; that needs time of the device, and batches of one under no load.)
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from symphony_serve.batching.orloj_histograms import Histogram
from symphony_serve.batching.orloj_profiles import BatchMap, VaryingProfile
from symphony_serve.profiles import Profile

#: Bins of stretches: so many to each doubling, from 2 to the power -`DOUBLINGS` to 2 to the power `DOUBLINGS`. A bin is
#: 19 % wide.
PER_DOUBLING, DOUBLINGS = 4, 6
EDGES = tuple(2 ** (place / PER_DOUBLING) for place in range(-PER_DOUBLING * DOUBLINGS, PER_DOUBLING * DOUBLINGS + 1))
BINS = len(EDGES) - 1
MIDDLES = tuple((low + high) / 2 for low, high in itertools.pairwise(EDGES))
#: This part of a distribution counts as spread over all bins, so that nothing that is seen was impossible.
UNSEEN = 1e-3
#: A source's distribution is that of about so many of its latest requests, a factor that of so many batches.
MEMORY, FACTOR_MEMORY = 1024, 64
#: At most so many sources are told apart. The requests of further ones count as of the source "", which has no name.
MOST_SOURCES = 16
#: Sources belong to one class if the mean of the longest is at most this many times that of the shortest.
ALIKE = 1.5
#: Nothing is concluded from fewer batches.
ENOUGH = 20
#: Profiles are made anew after this many batches, and seconds of batches. It takes some milliseconds, 1 % of the time.
EVERY, EVERY_S = 64, 1.0


def bin_of(stretch: float) -> int:
    """The bin of a stretch; the first or the last one if it lies beyond all."""
    place = math.floor(math.log2(stretch) * PER_DOUBLING) if stretch > 0 else -BINS
    return min(max(place + BINS // 2, 0), BINS - 1)


class LearnedTimes:
    """The stretches of each source, and what follows for batches.

    first: the profile that was measured at load. slowest: as of `SeenTimes`: the longest that a batch of 1 is said to
    take, so that a source that was too slow for a while is tried again.
    """

    def __init__(self, first: Profile, slowest: float):
        self._first = first
        self._slowest = slowest
        #: By source, the masses of the bins; and how many requests these come from, `MEMORY` at most.
        self._masses: dict[str, list[float]] = {}
        self._known: dict[str, float] = {}
        #: By range of sizes, the factor and its batches.
        self._factors: dict[int, tuple[float, int]] = {}
        #: Since the last time that `profiles` were due.
        self._batches, self._seconds = 0, 0.0
        self._enough = False
        #: The seconds that batches of all sources are expected to take, since `profiles` was called last.
        self.expected = first

    def add(self, sources: Sequence[str], stretch: float) -> None:
        """A batch of requests of these sources took ``stretch`` times as long as the first profile says."""
        size_range = len(sources).bit_length()
        factor = self._factor(size_range)
        place = bin_of(stretch / factor)
        counts = Counter(map(self._named, sources))
        below = {source: self._below(source) for source in counts}
        longest = [math.prod(values) for values in zip(*_powers(below, counts), strict=True)]
        expected = sum(middle * (high - low) for middle, low, high in zip(MIDDLES, longest, longest[1:], strict=False))
        _, batches = self._factors.get(size_range, (factor, 0))
        gain = 1 / min(batches + 1, FACTOR_MEMORY)
        self._factors[size_range] = (factor + gain * (stretch / expected - factor), batches + 1)
        until, before = longest[place + 1], longest[place]
        for source, count in counts.items():
            of = below[source]
            # P(the others' longest is there or below), and below, if one of this source is taken out.
            others, others_before = until / of[place + 1], before / of[place] if place else 0.0
            lower, same = (others - others_before) / (until - before), others / (until - before)
            known = self._known[source]
            part = count / (known + count)
            chances = [lower] * place + [same] + [0.0] * (BINS - place - 1)
            steps = zip(self._masses[source], chances, of, of[1:], strict=False)
            self._masses[source] = [mass + part * (chance * (high - low) - mass) for mass, chance, low, high in steps]
            self._known[source] = min(known + count, MEMORY)
        self._batches += 1

    def _named(self, source: str) -> str:
        """The source, or "" if too many others are known."""
        if source not in self._masses:
            if source and len(self._masses) >= MOST_SOURCES:
                return self._named("")
            self._masses[source], self._known[source] = [1 / BINS] * BINS, 0.0
        return source

    def _below(self, source: str) -> list[float]:
        """By edge, P(a stretch of the source is less)."""
        seen = ((1 - UNSEEN) * mass + UNSEEN / BINS for mass in self._masses[source])
        return list(itertools.accumulate(seen, initial=0.0))

    def _factor(self, size_range: int) -> float:
        """That of the range, or of the nearest one that was seen."""
        nearest = min(self._factors, key=lambda other: abs(other - size_range), default=None)
        return self._factors[nearest][0] if nearest is not None else 1.0

    def due(self, seconds: float) -> bool:
        """Whether `profiles` should be made anew, now that one more batch took ``seconds``."""
        self._seconds += seconds
        least = (EVERY, EVERY_S) if self._enough else (ENOUGH, 0.0)
        if self._batches < least[0] or self._seconds < least[1]:
            return False
        self._enough, self._batches, self._seconds = True, 0, 0.0
        return True

    def profiles(self, wait: float = 0.0) -> list[VaryingProfile]:
        """The profiles of the classes of sources, the shortest first. Each batch first waits ``wait`` for its turn."""
        found = {source: self._histogram(source) for source, known in self._known.items() if known}
        if not found:
            return [VaryingProfile(self._batch_map(1.0, wait), {"": Histogram.point(1.0)}, enough=False)]
        order = sorted(found, key=lambda source: found[source].mean)
        made = []
        for count in _ends([found[source].mean for source in order]):
            sources = {source: found[source] for source in order[:count]}
            weights = {source: self._known[source] for source in sources}
            mean = sum(weights[one] * sources[one].mean for one in sources) / sum(weights.values())
            made.append(VaryingProfile(self._batch_map(mean, wait), sources, weights))
        self.expected = self._table(made[-1])
        return made

    def _table(self, profile: VaryingProfile) -> Profile:
        """The expected seconds by size. A size that is not formed takes those of the next larger one."""
        table = [0.0]
        for size, time in profile.times.items():
            table += [max(time.mean, table[-1])] * (size + 1 - len(table))
        return Profile((*table, math.inf))

    def _histogram(self, source: str) -> Histogram:
        """The source's stretches. What comes of `UNSEEN` and of its beginning is left out."""
        masses = [mass if mass > UNSEEN else 0.0 for mass in self._masses[source]]
        seen = [place for place, mass in enumerate(masses) if mass]
        return Histogram(EDGES[seen[0] : seen[-1] + 2], tuple(masses[seen[0] : seen[-1] + 1]))

    def _batch_map(self, mean: float, wait: float) -> BatchMap:
        """The map from the longest stretch to a batch, where the mean stretch of a request is ``mean``."""
        by_size, most = {}, 0.0
        for size in sizes_up_to(self._first.max_batch):
            scale = self._factor(size.bit_length()) * self._first.seconds(size)
            if size == 1:
                scale = min(scale, max(self._slowest - wait, 1e-9) / mean)
            most = max(most, scale)
            by_size[size] = (wait, most)
        return BatchMap(by_size)


def _powers(below: dict[str, list[float]], counts: Counter[str]) -> Iterator[Iterable[float]]:
    """Of each source, by edge, P(all stretches of its requests are less)."""
    for source, count in counts.items():
        yield [value**count for value in below[source]] if count > 1 else below[source]


def _ends(means: Sequence[float]) -> list[int]:
    """The number of sources of each class, for the means in their order."""
    ends, shortest = [], means[0]
    for place, mean in enumerate(means):
        if mean > ALIKE * shortest:
            ends.append(place)
            shortest = mean
    return [*ends, len(means)]


def sizes_up_to(most: int) -> list[int]:
    """All sizes to 8, then four to each doubling; and ``most``. With powers of two alone fewer requests are in time."""
    return [size for size in range(1, most + 1) if size % (1 << max(0, size.bit_length() - 3)) == 0 or size == most]
