"""How many GPUs the load wants. All times are seconds, all rates requests per second.

The advice follows two properties of deferred starts (section 3.5). Above its peak p, a sub-cluster refuses the part
(o - p)/o of an offered rate o. Below it, its GPUs are idle for the part (p - o)/p of their time. So both tell the
number of GPUs whose peak is the offered rate. The paper names neither a threshold nor a time for either.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from symphony_serve.batching.window import target_batch
from symphony_serve.errors import ServeError
from symphony_serve.profiles import Profile

#: GPUs bear a rate if at most this part of the requests is refused or late; else more are wanted. Source: section 5.1.
BAD_RATE = 0.01
#: Seconds over which that part is measured: some hundred SLOs, and short beside the start of a process.
WINDOW_S = 10.0
#: GPUs are given back when they were idle for this many seconds, longer than a process takes to come back.
IDLE_S = 60.0
#: This part of the GPUs is kept although it is idle: fewer GPUs are also staggered less, and a load varies.
KEPT = 0.1


def gpus_for(loads: Iterable[tuple[Profile, float, float]]) -> float:
    """GPUs that bear the loads (profile, SLO, rate) of some models; with a fraction, because models share GPUs.

    Each model has the batch size that its own rate needs (`target_batch`). On GPUs that several models share, batches
    can be larger, because more GPUs become free one after the other. So this is more than what is needed.
    """
    total = 0.0
    for profile, slo, rate in loads:
        size = target_batch(profile, rate, slo)
        total += rate * profile.seconds(size) * profile.part(size) / size
    return total


@dataclass(frozen=True)
class Sample:
    """What happened in some seconds.

    gpus: how many there were. busy: their seconds of batches, all together. offered: requests that came, by model.
    good: how many of them were answered in time.
    """

    seconds: float
    gpus: int
    busy: float
    offered: Mapping[str, int]
    good: int

    def __post_init__(self) -> None:
        total = sum(self.offered.values())
        if self.seconds <= 0 or self.gpus < 0 or self.busy < 0 or not 0 <= self.good <= total:
            raise ServeError(f"{self} is no sample: give seconds above 0, and at most {total} requests that are good")


class Autoscaler:
    """Advises how many GPUs there should be, sample by sample.

    served: profile and SLO by model, to know how many GPUs a rate needs at least.
    """

    def __init__(self, served: Mapping[str, tuple[Profile, float]]):
        self._served = dict(served)
        #: The samples of the last `IDLE_S` with the present number of GPUs, the newest last.
        self._samples: deque[Sample] = deque()

    def serve(self, model: str, profile: Profile, slo: float) -> None:
        """One more model is served."""
        self._served[model] = profile, slo

    def forget(self, model: str) -> None:
        """The model is not served any more."""
        self._served.pop(model, None)

    def add(self, sample: Sample) -> int:
        """Take in the newest sample. Returns how many GPUs would serve the load and be idle for short times only.

        Advice is repeated until the number of GPUs changes; what was seen with another number does not count any more.
        Raises ServeError if a sample names a model that is not served.
        """
        unknown = sample.offered.keys() - self._served.keys()
        if unknown:
            raise ServeError(f"a sample has the model {min(unknown)!r}, expected one of {', '.join(self._served)}")
        if self._samples and self._samples[-1].gpus != sample.gpus:
            self._samples.clear()
        self._samples.append(sample)
        while sum(one.seconds for one in self._samples) - self._samples[0].seconds >= IDLE_S:
            self._samples.popleft()
        return sample.gpus + (self._missing() or -self._spare())

    def _missing(self) -> int:
        window: list[Sample] = []
        for sample in reversed(self._samples):
            window.append(sample)
            if sum(one.seconds for one in window) >= WINDOW_S:
                break
        else:
            return 0
        offered, good = sum(sum(one.offered.values()) for one in window), sum(one.good for one in window)
        if offered - good <= BAD_RATE * offered:
            return 0
        gpus = window[0].gpus
        if good == 0 or gpus == 0:  # The part of the requests says nothing then: their number does.
            return max(1, self._needed(window) - gpus)
        return math.ceil(gpus * (offered - good) / good)

    def _spare(self) -> int:
        if sum(one.seconds for one in self._samples) < IDLE_S:
            return 0
        gpus = self._samples[-1].gpus
        idle = min(1 - one.busy / (one.seconds * gpus) if gpus else 0.0 for one in self._samples)
        return max(0, min(math.floor(gpus * idle - KEPT * gpus), gpus - self._needed(self._samples)))

    def _needed(self, window: Iterable[Sample]) -> int:
        """GPUs that bear the highest rate of each model in the window; at least 1."""
        loads = []
        for name, (profile, slo) in self._served.items():
            loads.append((profile, slo, max(one.offered.get(name, 0) / one.seconds for one in window)))
        return max(1, math.ceil(gpus_for(loads) - 1e-9))
