"""One model: its requests, its rate, and the offer that it makes to the matching. It sees no other model and no GPU.

Which former holds its requests is decided here, too, by how much the times of batches vary that were seen.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from symphony_serve.batching import BatchFormer, Candidate
from symphony_serve.batching.orloj import Orloj
from symphony_serve.batching.orloj_learned import LearnedTimes
from symphony_serve.batching.window import Window
from symphony_serve.delays import NO_DELAYS, Delays
from symphony_serve.gpu_table import Gpu
from symphony_serve.matching import Offer
from symphony_serve.messages import SAME_MOMENT_S, Request
from symphony_serve.profiles import Profile, check_slo
from symphony_serve.seen_times import ENOUGH_TO_VARY, EVERY, RECENT, SeenTimes

#: A model's rate is the mean of this many samples of this many seconds. Source: the public code's rps meter.
SAMPLES, SAMPLE_S = 100, 0.05

#: A batch of 1 is said to take this part of the SLO at most, delays apart. So a request that has its whole SLO is
#: always tried. The rest is the time from its arrival to a decision about it.
TRIED = 0.9
#: A model that had no batch for this many seconds is tried for a request that has less than its whole SLO, too.
#: Judgement: short beside the time for which people wait for a model, long beside a batch.
TRY_AGAIN_S = 1.0
#: The times of a model vary if `SeenTimes.variation` is above the first value, and do not any more if it is below the
#: second. Judgement: log-normal times of 1 to 10 ms have 1.5 to 2, constant ones 1.01 (`benchmarks.serve_varying`).
VARY, STEADY = 1.5, 1.25

#: Makes a former from a profile, the SLO in seconds, and the delays.
Gathering = Callable[[Profile, float, Delays], BatchFormer]


class Batching(str, Enum):
    """Which former has the requests of a model."""

    #: `Orloj` while the times of batches of one size vary, else `Window`.
    AUTO = "auto"
    WINDOW = "window"
    ORLOJ = "orloj"


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

    slo: seconds within which its requests are to be answered. batching: its `BatchFormer`, or what makes another one.
    policy: when its batches start. Raises ServeError if a batch of 1 cannot be answered within the SLO.
    """

    name: str
    profile: Profile
    slo: float
    batching: Batching | Gathering = Batching.AUTO
    policy: StartPolicy = DEFERRED
    delays: Delays = NO_DELAYS

    def __post_init__(self) -> None:
        check_slo(self.name, self.profile, self.slo, self.delays.margin)

    @property
    def budget(self) -> float:
        """Seconds of the SLO that the delays leave for a batch."""
        return self.slo - self.delays.margin


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

    What was seen of batches may say that a request comes too late for any batch. If no batch runs because of that,
    nothing corrects it. So after `TRY_AGAIN_S` without a batch, a batch of 1 is taken to need what the first profile
    says, until one batch is sent. What was seen before that batch is forgotten when it has run.
    """

    def __init__(self, model: Model):
        self.model = model
        self._times = SeenTimes(model.profile, TRIED * model.budget)
        self._learned: LearnedTimes | None = None
        #: When the latest batch that was sent ends, by what was seen.
        self._ends = -math.inf
        #: Whether the next batch is such a try, and whether one was sent that has not run.
        self._tries = self._tried = False
        #: Of the latest batches, the source of each request.
        self._sources: deque[list[str]] = deque(maxlen=RECENT)
        self._batches = 0
        #: Orloj keeps the requests until so many batches were seen; 0: it never had them.
        self._stays_until = 0
        #: Of which profile `fastest` was made, and what it is.
        self._usual: Profile | None = None
        self._fastest = (0.0, 0.0)
        self._rate = RateMeter()
        self._last_rate: float | None = None
        if isinstance(model.batching, Batching):
            self.former: BatchFormer = self._orloj() if model.batching is Batching.ORLOJ else self._window()
        else:
            self.former = model.batching(model.profile, model.slo, model.delays)

    def add(self, request: Request, now: float) -> None:
        """A request came. Raises ServeError if the former does not take it."""
        rate = self._rate.hit(now)
        if rate is not None:
            self._last_rate = rate
            self.former.set_rate(rate)
        self.former.add(request)
        self._try(self._comes_too_late(request, now))

    def _comes_too_late(self, request: Request, now: float) -> bool:
        """Whether a request can be in time by the first profile only, and nothing was seen lately."""
        if now < self._ends + TRY_AGAIN_S:
            return False
        known = self._times.profile.seconds(1) if self._learned is None else self._learned.alone(request.source)
        left = request.deadline - self.model.delays.margin - now
        return self.model.profile.seconds(1) <= left < known

    def _try(self, tries: bool) -> None:
        if tries != self._tries:
            self._tries = tries
            self.former.set_profile(self._known)

    @property
    def _known(self) -> Any:
        """What the former has to know of the times of batches."""
        if self._learned is None:
            return self._times.tried if self._tries else self._times.profile
        return self._learned.tried if self._tries else self._learned.made

    def _forget(self) -> None:
        self._tried = False
        self._times = SeenTimes(self.model.profile, TRIED * self.model.budget)
        self._sources.clear()
        if self._learned is not None:
            self._learned = LearnedTimes(self.model.profile, TRIED * self.model.budget)

    def took(self, requests: Sequence[Request], seconds: float, waited: float) -> bool:
        """A batch took ``seconds``. Returns whether the next batches are formed in another way because of that."""
        sources, tried = [request.source for request in requests], self._tried
        if tried:
            self._forget()
        corrected = self._times.add(len(sources), seconds, waited)
        self._sources.append(sources)
        self._batches += 1
        if self.model.batching is Batching.AUTO and self._batches % EVERY == 0 and self._wants_other():
            self._change_over()
            return True
        if self._learned is None:
            due = tried or corrected is not None
        else:
            self._learned.add(sources, self._times.latest[-1][1])
            due = self._learned.due(seconds) or tried
            if due:
                self._learned.profiles(self._times.longest_wait)
        if due:
            self.former.set_profile(self._known)
        return due

    def _wants_other(self) -> bool:
        """Whether the other former should have the requests.

        Full batches of several sources all take as long as the longest source, so they do not show that times vary. So
        where sources are named, Orloj has the requests for `RECENT` batches once, and keeps them if the sources differ.
        """
        variation = self._times.variation()
        if self._learned is not None:
            return max(variation, self._learned.spread) < STEADY and self._batches >= self._stays_until
        untried = not self._stays_until and self._batches >= ENOUGH_TO_VARY
        return variation > VARY or (untried and len({one for sources in self._sources for one in sources}) > 1)

    def _change_over(self) -> None:
        """Hand all that waits over to the other former. What the one before gave up was told already."""
        waiting = self.former.waiting()
        self.former = self._orloj() if self._learned is None else self._window()
        for request in waiting:
            self.former.add(request)

    def _window(self) -> BatchFormer:
        self._learned = None
        former = Window(self._known, self.model.slo, self.model.delays)
        if self._last_rate is not None:
            former.set_rate(self._last_rate)
        return former

    def _orloj(self) -> BatchFormer:
        """Learns first from the batches that were seen so far."""
        self._stays_until = self._batches + RECENT
        self._learned = LearnedTimes(self.model.profile, TRIED * self.model.budget)
        for sources, (_, stretch) in zip(self._sources, self._times.latest, strict=True):
            self._learned.add(sources, stretch)
        self._learned.profiles(self._times.longest_wait)
        return Orloj(self._known, self.model.delays)

    @property
    def batching(self) -> Batching:
        """The former that has the requests now. (One of a benchmark counts as `Batching.WINDOW`.)"""
        return Batching.WINDOW if self._learned is None else Batching.ORLOJ

    @property
    def profile(self) -> Profile:
        """The seconds of batches by which is decided now: under Orloj those that are expected."""
        if self._learned is None:
            return self._times.profile
        return self._learned.expected

    @property
    def fastest(self) -> tuple[float, float]:
        """The seconds of a request in the batches that take the fewest for each, and the fewest of a batch of 1.

        By what batches take of which many follow each other. What the first profile says of a batch of 1 is always
        possible: only the requests that come can bring about that the model is tried with it.
        """
        usual = self._times.usual if self._learned is None else self._learned.expected
        if usual is not self._usual:
            self._usual, most = usual, max(1, usual.largest(self.model.budget))
            each = min([usual.seconds(size) * usual.part(size) / size for size in range(1, most + 1)])
            self._fastest = each, min(self.model.profile.seconds(1), usual.seconds(1))
        return self._fastest

    def offer(self, now: float) -> Offer | None:
        return self._offer(self.former.form(now), now)

    def offer_anew(self, now: float) -> Offer | None:
        """The offer after the one before has become void."""
        after = self.former.changes_at()
        later = now if after == math.inf else max(now, math.nextafter(after, math.inf))
        return self._offer(self.former.form(later), now)

    def _offer(self, candidate: Candidate | None, now: float) -> Offer | None:
        void = self.former.changes_at()
        if candidate is None:
            return None if void == math.inf else Offer(math.inf, void, void)
        earliest = max(now, self.model.policy.earliest(candidate))
        latest = min(candidate.deadline - candidate.seconds, void)
        return Offer(earliest, latest, candidate.deadline, candidate.overlap)

    def take(self, now: float, gpu: Gpu) -> tuple[tuple[Request, ...], float, float, float, float] | None:
        """The batch for a GPU: its requests, its start there, its seconds, its longest, and its overlap.

        None: there is nothing to run yet.
        """
        candidate = self.former.form(now)
        if candidate is None or self.model.policy.earliest(candidate) > now + SAME_MOMENT_S:
            return None
        start, behind = now, gpu.ends - candidate.overlap
        if behind > start:
            if behind > candidate.deadline - candidate.seconds:
                return None  # It is smaller than its offer was, and stands behind a larger batch for too long.
            start = behind
        seen, longest = self.profile.seconds(candidate.size), candidate.longest
        self._ends = start + max(candidate.seconds, seen)
        taken = self.former.take()
        if self._tries:
            longest = max(longest, seen)  # It may be as long still, and its GPU is not lost then.
            self._tried = True
            self._try(False)
        return taken, start, candidate.seconds, longest, candidate.overlap
