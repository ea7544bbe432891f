"""How many GPUs the load wants (section 3.5). All times are seconds.

The advice follows two properties of deferred starts. Above its peak p, a sub-cluster refuses the part (o - p)/o of an
offered rate o. Below it, its GPUs are idle for the part (p - o)/p of their time. So both tell the number of GPUs whose
peak is the offered rate. The paper names neither a threshold nor a time for either.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from symphony_serve.bounds import gpus_for
from symphony_serve.errors import ServeError
from symphony_serve.messages import Want
from symphony_serve.profiles import Profile

#: More GPUs are wanted while more than this part of the requests is refused or late. Source: section 5.1, goodput.
BAD_RATE = 0.01
#: Seconds over which that part is measured. Judgement: some hundred SLOs, and short beside the start of a process.
WINDOW_S = 10.0
#: GPUs are given back when they were idle for so many seconds. Judgement: longer than a process takes to come back.
IDLE_S = 60.0
#: This part of the GPUs is kept although it is idle. Judgement: fewer GPUs are also staggered less, and a load varies.
KEPT = 0.1


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

    served: profile and SLO by model, to know how many GPUs a rate needs at least. A profile may be replaced by
    `set_profile`.
    """

    def __init__(self, served: Mapping[str, tuple[Profile, float]]):
        self._served = dict(served)
        #: The samples of the last `IDLE_S` with the present number of GPUs, the newest last.
        self._samples: deque[Sample] = deque()

    def set_profile(self, model: str, profile: Profile) -> None:
        """The model's batches take other times from now on."""
        self._served[model] = (profile, self._served[model][1])

    def add(self, sample: Sample) -> Want | None:
        """Take in the newest sample. Returns the number of GPUs that are wanted, or None: as many as there are.

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
        more = self._missing(_newest(self._samples, WINDOW_S))
        if more:
            return Want(sample.gpus + more)
        less = self._spare()
        return Want(sample.gpus - less) if less else None

    def _missing(self, window: list[Sample]) -> int:
        offered, good = sum(sum(one.offered.values()) for one in window), sum(one.good for one in window)
        if sum(one.seconds for one in window) < WINDOW_S or offered - good <= BAD_RATE * offered:
            return 0
        gpus = window[-1].gpus
        if good == 0 or gpus == 0:  # The part of the requests says nothing then: their number does.
            return max(1, self._needed(window) - gpus)
        return math.ceil(gpus * (offered - good) / good)

    def _spare(self) -> int:
        if sum(one.seconds for one in self._samples) < IDLE_S:
            return 0
        gpus = self._samples[-1].gpus
        idle = min(1 - one.busy / (one.seconds * gpus) if gpus else 0.0 for one in self._samples)
        return max(0, min(math.floor(gpus * idle - KEPT * gpus), gpus - self._needed(list(self._samples))))

    def _needed(self, window: list[Sample]) -> int:
        """GPUs that bear the highest rate of each model in the window; at least 1."""
        loads = []
        for name, (profile, slo) in self._served.items():
            loads.append((profile, slo, max(one.offered.get(name, 0) / one.seconds for one in window)))
        return max(1, math.ceil(gpus_for(loads) - 1e-9))


def _newest(samples: deque[Sample], seconds: float) -> list[Sample]:
    """The newest samples, so many that they are ``seconds`` together if there are so many."""
    found: list[Sample] = []
    for sample in reversed(samples):
        found.append(sample)
        if sum(one.seconds for one in found) >= seconds:
            break
    return found[::-1]
