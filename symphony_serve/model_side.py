"""One model: its requests, its rate, and the offer that it makes to the matching. It sees no other model and no GPU."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from symphony_serve.batching import BatchFormer, Candidate
from symphony_serve.batching.window import Window
from symphony_serve.delays import NO_DELAYS, Delays
from symphony_serve.matching import Offer
from symphony_serve.messages import SAME_MOMENT_S, Request
from symphony_serve.profiles import Profile, check_slo

#: A model's rate is the mean of this many samples of this many seconds. Source: the public code's rps meter.
SAMPLES, SAMPLE_S = 100, 0.05

#: Makes a former from a profile, the SLO in seconds, and the delays.
Gathering = Callable[[Profile, float, Delays], BatchFormer]


class StartPolicy(str, Enum):
    """When a batch may start at the earliest. At the latest it starts its seconds before its first deadline."""

    #: When a request that comes later could not join the batch any more (Symphony, section 3.3).
    DEFERRED = "deferred"
    #: At once.
    EAGER = "eager"

    def earliest(self, candidate: Candidate) -> float:
        """The moment before which the batch does not start."""
        return candidate.deadline - candidate.next_seconds if self is DEFERRED else -math.inf


DEFERRED, EAGER = StartPolicy.DEFERRED, StartPolicy.EAGER


@dataclass(frozen=True)
class Model:
    """A model that is served.

    slo: seconds within which its requests are to be answered. gathering: makes its `BatchFormer`.
    policy: when its batches start. Raises ServeError if a batch of 1 cannot be answered within the SLO.
    """

    name: str
    profile: Profile
    slo: float
    gathering: Gathering = Window
    policy: StartPolicy = DEFERRED
    delays: Delays = NO_DELAYS

    def __post_init__(self) -> None:
        check_slo(self.name, self.profile, self.slo, self.delays.smallest)

    @property
    def budget(self) -> float:
        """Seconds of the SLO that the delays leave for a batch of 1."""
        return self.slo - self.delays.smallest


class RateMeter:
    """Measures the requests per second of a model."""

    def __init__(self) -> None:
        self._samples: deque[int] = deque(maxlen=SAMPLES)
        self._sum = 0
        self._count = 0
        #: The end of the sample that is being counted.
        self._end: float | None = None

    def hit(self, now: float) -> float | None:
        """A request came. Returns the rate if a sample has ended before it, else None."""
        if self._end is None:
            self._end = now + SAMPLE_S
        if now < self._end:
            self._count += 1
            return None
        ended = 1 + int((now - self._end) / SAMPLE_S)
        self._end += ended * SAMPLE_S
        for count in (self._count, *[0] * min(ended - 1, SAMPLES)):
            if len(self._samples) == SAMPLES:
                self._sum -= self._samples[0]
            self._samples.append(count)
            self._sum += count
        self._count = 1
        return self._sum / (len(self._samples) * SAMPLE_S)


class ModelSide:
    """The waiting requests of a model, and its offers.

    A moment is that of the decision, on the scheduler's clock. What is sent at ``now`` begins to fetch its inputs at
    ``now + delays.control``; that is the moment of start of the formers.
    """

    def __init__(self, model: Model):
        self.model = model
        self.former = model.gathering(model.profile, model.slo, model.delays)
        self._rate = RateMeter()
        self._control, self._data = model.delays.control, model.delays.data

    def add(self, request: Request, now: float) -> None:
        """A request came. Raises ServeError if the former does not take it."""
        rate = self._rate.hit(now)
        if rate is not None:
            self.former.set_rate(rate)
        self.former.add(request)

    def offer(self, now: float) -> Offer | None:
        start = now + self._control
        return self._offer(self.former.form(start), start)

    def offer_anew(self, now: float) -> Offer | None:
        """The offer after the one before has become void."""
        start, after = now + self._control, self.former.changes_at()
        later = start if after == math.inf else max(start, math.nextafter(after, math.inf))
        return self._offer(self.former.form(later), start)

    def _offer(self, candidate: Candidate | None, start: float) -> Offer | None:
        void = self.former.changes_at()
        if candidate is None:
            return None if void == math.inf else Offer(0, math.inf, void, self._control, void, 0.0)
        size, deadline, seconds = candidate[:3]
        data = self._data * size
        earliest = max(start, self.model.policy.earliest(candidate))
        latest = min(deadline - seconds, void)
        return Offer(size, earliest + data, latest + data, self._control + data, deadline, seconds - data)

    def take(self, now: float, free: float, size: int) -> tuple[tuple[Request, ...], float, float, float] | None:
        """The batch for a GPU that is free at ``free``: its requests, its start there, its seconds, and its longest.

        ``size``: of the offer for which the GPU was granted. None: there is nothing to run yet.
        """
        start = max(now + self._control, free - self._data * size)
        candidate = self.former.form(start)
        if candidate is None or self.model.policy.earliest(candidate) > start + SAME_MOMENT_S:
            return None
        data = self._data * candidate.size
        longest = max(0.0, candidate.longest - data)
        return self.former.take(), max(free, start + data), candidate.seconds - data, longest
