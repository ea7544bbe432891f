"""The workloads of `benchmarks.orloj`: requests with times of their own, by seed, and what is known of the times.

orloj-1: one worker, Poisson arrivals, times alone around ``peaks`` normal peaks, batches that are padded to their
longest request. Neither the load nor the model is in the paper; these reproduce its columns of Orloj and of Clockwork.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from benchmarks.orloj_profiles import BatchMap, VaryingProfile, binned, common_edges
from symphony_serve.messages import Request

#: The batch sizes that a model supports (section "The model" of the specification).
SIZES = (1, 2, 4, 8, 16)

#: By how much of the longest request's time each further request lengthens a batch of orloj-1.
PADDING = 0.15

#: Samples of each source from which its histogram is made, drawn apart from the requests.
PROFILED = 2000


@dataclass(frozen=True)
class Case:
    """A workload. Times in seconds.

    peaks: the means of the normal distributions of the sources' times; spread: their standard deviation. shape: of the
    Gamma distribution of the gaps between arrivals (1: Poisson). rate: requests per second. shared: only so many
    seconds of a request's time are shared by a batch, so that batching hardly helps; 0: as in orloj-1.
    """

    peaks: tuple[float, ...]
    spread: float = 0.010
    rate: float = 22.0
    shape: float = 1.0
    shared: float = 0.0
    #: Log-normal times with this mean and 99th percentile instead of peaks.
    lognormal: tuple[float, float] | None = None
    #: How often each source sends, relative to the others; None: equally often.
    shares: tuple[float, ...] | None = None

    def scaled(self, factor: float) -> Case:
        """The same case with all times, and the gaps between arrivals, multiplied."""
        peaks = tuple(factor * peak for peak in self.peaks)
        return replace(self, peaks=peaks, spread=factor * self.spread, rate=self.rate / factor)

    def batch(self, size: int) -> tuple[float, float]:
        """(offset, scale) of the time of a batch of ``size``, which is ``offset + scale * longest``."""
        if self.shared:
            return self.shared - size * self.shared, float(size)
        return 0.0, 1 + PADDING * (size - 1)

    def batches(self) -> BatchMap:
        """The map from the longest request of a batch to its time, for the supported sizes."""
        return BatchMap({size: self.batch(size) for size in SIZES})

    def time(self, source: int, rng: random.Random) -> float:
        """The time alone of a request of a source."""
        if self.lognormal is not None:
            mean, p99 = self.lognormal
            mu, sigma = lognormal(mean, p99)
            return rng.lognormvariate(mu, sigma)
        if not self.spread:
            return self.peaks[source]
        # A time below 1 % of its peak is drawn again: it would be 5 standard deviations and more away.
        while (time := rng.gauss(self.peaks[source], self.spread)) < 0.01 * self.peaks[source]:
            pass
        return time

    def profile(self, seed: int) -> VaryingProfile:
        """What a profiler would have measured before: a histogram of each source."""
        rng = random.Random(1_000_000 + seed)
        samples = [[self.time(source, rng) for _ in range(PROFILED)] for source in range(len(self.peaks))]
        edges = common_edges(value for values in samples for value in values)
        return VaryingProfile(self.batches(), {str(i): binned(values, edges) for i, values in enumerate(samples)})


def lognormal(mean: float, p99: float) -> tuple[float, float]:
    """mu and sigma of the log-normal distribution with this mean and 99th percentile."""
    z = NormalDist().inv_cdf(0.99)
    # ln p99 - ln mean = z sigma - sigma^2 / 2: the smaller root.
    sigma = z - math.sqrt(z * z - 2 * math.log(p99 / mean))
    return math.log(mean) - sigma * sigma / 2, sigma


def modal(count: int, spread: float | None = None) -> Case:
    """orloj-1 with so many peaks, spread evenly over 50 to 110 ms; one: at 75 ms."""
    peaks = (0.075,) if count == 1 else tuple(0.050 + 0.060 * i / (count - 1) for i in range(count))
    return Case(peaks, spread if spread is not None else 0.005 if count == 8 else 0.010)


@dataclass(frozen=True)
class Load:
    """The requests of one run, by arrival, and their times alone (never shown to a former)."""

    requests: Sequence[Request]
    alone: Mapping[int, float]
    slo: float


def load(case: Case, multiple: float, seed: int, count: int) -> Load:
    """``count`` requests with an SLO of ``multiple`` times the 99th percentile of their times alone."""
    rng = random.Random(seed)
    sources = rng.choices(range(len(case.peaks)), weights=case.shares, k=count)
    alone = [case.time(source, rng) for source in sources]
    slo = multiple * sorted(alone)[math.ceil(0.99 * count) - 1]
    now, requests = 0.0, []
    for number, source in enumerate(sources):
        now += rng.gammavariate(case.shape, 1 / (case.shape * case.rate))
        requests.append(Request(number, "model", now, now + slo, source=str(source)))
    return Load(requests, dict(enumerate(alone)), slo)
