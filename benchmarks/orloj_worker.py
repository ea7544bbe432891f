"""One worker in the twin, and the servers that Orloj is compared with, for `benchmarks.orloj`.

All see the same requests at the same moments. None is told the time of a request before its batch has run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.orloj_cases import SIZES, Case, Load
from benchmarks.orloj_profiles import BatchMap, VaryingProfile, largest, mixture
from benchmarks.rival_servers import Server
from benchmarks.rival_servers.clipper import Clipper
from benchmarks.rival_servers.clockwork import MAX_BATCH, SHORTENED_S
from benchmarks.rival_servers.fifo import Fifo
from benchmarks.serve_twin import Outcome
from benchmarks.serve_varying import VaryingSimulation
from symphony_serve.batching import BatchFormer
from symphony_serve.batching.orloj import ANTICIPATED_DELAY_RATE, Orloj
from symphony_serve.batching.orloj_histograms import Histogram
from symphony_serve.batching.orloj_queues import Pending, first_feasible
from symphony_serve.batching.window import Window
from symphony_serve.delays import NO_DELAYS, Delays
from symphony_serve.messages import (
    BatchDone,
    Dispatch,
    Event,
    Instruction,
)
from symphony_serve.model_side import DEFERRED, EAGER, Model, StartPolicy
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler

#: Told of each batch that has ended: the batch, its seconds, and when it ended. Returns a new profile or None.
Observer = Callable[[Dispatch, float, float], Any]

#: Clockwork's estimate is the largest of so many measurements. Source: docs/controller.md of its repository.
CLOCKWORK_WINDOW = 10


class EdfPending(Pending):
    """The earliest deadlines instead of the highest scores."""

    def best(self, size: int, now: float) -> list[int]:
        mean = self.times[size].mean
        return [number for _, number in self.keys[first_feasible(self.keys, now, mean) :][:size]]


class Edf(Orloj):
    """Orloj with the earliest deadlines."""

    def _queue(self, times: Mapping[int, Histogram]) -> Pending:
        return EdfPending(times, ANTICIPATED_DELAY_RATE)


class Earliest(Orloj):
    """A batch has the size whose requests have the earliest deadline, of several the largest, as the paper's text says.

    Only sizes count that can be filled.
    """

    def _filled(self, pending: Pending, start: float) -> int:
        sizes = [size for size in reversed(pending.times) if pending.count(size, start) >= size]
        return min(sizes, key=lambda size: pending.earliest(size, start) or ())


@dataclass(frozen=True, slots=True)
class ProfileChanged(Event):
    """A model's batches take other times than was known. Batches that were sent keep their times.

    profile: of the kind that the model's `BatchFormer` was made with, mostly a `profiles.Profile`.
    """

    model: str
    profile: Any


class ToldScheduler(Scheduler):
    """A `Scheduler` that takes `ProfileChanged` as well."""

    def __init__(self, models: Iterable[Model], least_patience: float = 0.0) -> None:
        super().__init__(models, least_patience)
        self._handlers[ProfileChanged] = self._profile_changed

    def _profile_changed(self, event: ProfileChanged, now: float, out: list[Instruction]) -> None:
        side = self._sides[event.model]
        side.former.set_profile(event.profile)
        self._offer(side, side.offer(now), now, out)


class Worker:
    """One worker that serves one model. ``former`` decides; ``observer`` may change the former's profile.

    cost: seconds that a decision takes before its batch starts. policy: when a batch starts.
    """

    def __init__(
        self,
        case: Case,
        load: Load,
        former: BatchFormer,
        observer: Observer | None = None,
        cost: float = 0.0,
        policy: StartPolicy = EAGER,
    ) -> None:
        self._case = case
        self._load = load
        self._observer = observer
        self._cost = cost
        # The model's own profile is only compared with its SLO: the former is made already.
        model = Model("model", Profile.from_seconds([1e-9]), load.slo, lambda *_: former, policy)
        # No worker is taken for lost: rules that know only a mean would lose theirs to a request of the tail.
        self._server: Server = ToldScheduler([model], least_patience=math.inf)
        #: Plan -> the batch that runs and its seconds.
        self._running: dict[int, tuple[Dispatch, float]] = {}

    def run(self) -> Outcome:
        """What became of the requests."""
        requests = self._load.requests
        return VaryingSimulation(self, 1, iter(requests), 0.0, requests[-1].arrival, self._takes).run()

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """As the scheduler. The end of a batch is told to the observer first."""
        out: list[Instruction] = []
        if isinstance(event, BatchDone):
            batch, seconds = self._running.pop(event.plan)
            profile = self._observer(batch, seconds, now) if self._observer is not None else None
            if profile is not None:
                out += self._server.handle(ProfileChanged("model", profile), now)
        return out + self._server.handle(event, now)

    def _takes(self, batch: Dispatch) -> float:
        offset, scale = self._case.batch(len(batch.requests))
        seconds = offset + scale * max(self._load.alone[request.id] for request in batch.requests)
        self._running[batch.plan] = (batch, seconds)
        return self._cost + seconds


class _MeasuredClipper(Clipper):
    """Clipper, told how long its batches really took."""

    took = 0.0

    def _done(self, dispatch: Dispatch) -> None:
        super()._done(replace(dispatch, seconds=self.took))


class ClipperWorker(Worker):
    """One worker under Clipper: it has a rule of its own, and no former."""

    def __init__(self, case: Case, load: Load, known: Profile) -> None:
        super().__init__(case, load, Fifo(known, load.slo, NO_DELAYS))
        self._server: Server = _MeasuredClipper([Model("model", known, load.slo)])

    def handle(self, event: Event, now: float) -> list[Instruction]:
        if isinstance(event, BatchDone):
            assert isinstance(self._server, _MeasuredClipper)
            self._server.took = self._running[event.plan][1]
        return super().handle(event, now)


class Nexus(Window):
    """The target is the largest batch that takes at most half of the SLO; what falls behind it is given up."""

    def _find_target(self) -> None:
        self.target = max(1, self._profile.largest(self._slo / 2))
        self._size = 0


def expected(case: Case, profile: VaryingProfile) -> Profile:
    """The expected seconds of batches of 1, 2 and so on to 16, padded to their longest request."""
    alone = mixture(list(profile.sources.values()))
    return _table(case, lambda size: largest(alone, size).mean, SIZES[-1])


def by_mean(case: Case, profile: VaryingProfile, most: int = SIZES[-1]) -> Profile:
    """The seconds of batches whose requests all take the mean time."""
    alone = mixture(list(profile.sources.values())).mean
    return _table(case, lambda size: alone, most)


def _table(case: Case, longest: Callable[[int], float], most: int) -> Profile:
    parts = [(case.batch(size), longest(size)) for size in range(1, most + 1)]
    return Profile.from_seconds(offset + scale * time for (offset, scale), time in parts)


class Clockwork:
    """The estimate of a size is the largest of its last ten times; before any, what the mean would give.

    A former that takes the earliest deadlines does the rest: the smallest ``deadline - estimate`` of all sizes that can
    be filled with the head of the queue is that of the largest such size.
    """

    def __init__(self, known: Profile) -> None:
        self._last = {
            size: deque([known.seconds(size)], maxlen=CLOCKWORK_WINDOW) for size in range(1, known.max_batch + 1)
        }

    def observe(self, batch: Dispatch, seconds: float, now: float) -> Profile:
        """Takes in a measurement and returns the new estimates. A larger size never counts as faster."""
        self._last[len(batch.requests)].append(seconds)
        table, most = [0.0], 0.0
        for times in self._last.values():
            most = max(most, *times)
            table.append(most)
        return Profile((*table, math.inf))


def _clockwork(case: Case, load: Load, profile: VaryingProfile, most: int) -> Worker:
    known = by_mean(case, profile, most)
    former = Fifo(known, load.slo, Delays(jitter=SHORTENED_S))
    return Worker(case, load, former, Clockwork(known).observe)


def _all_sizes(case: Case, profile: VaryingProfile) -> VaryingProfile:
    return VaryingProfile(BatchMap({k: case.batch(k) for k in range(1, SIZES[-1] + 1)}), profile.sources)


#: Side -> what makes its worker from the workload, the requests and what is known of the times.
SIDES: dict[str, Callable[[Case, Load, VaryingProfile], Worker]] = {
    "orloj": lambda case, load, profile: Worker(case, load, Orloj([profile])),
    "orloj_earliest": lambda case, load, profile: Worker(case, load, Earliest([profile])),
    "orloj_all": lambda case, load, profile: Worker(case, load, Orloj([_all_sizes(case, profile)])),
    "orloj_deferred": lambda case, load, profile: Worker(case, load, Orloj([profile]), policy=DEFERRED),
    "edf": lambda case, load, profile: Worker(case, load, Edf([profile])),
    "fifo": lambda case, load, profile: Worker(case, load, Fifo(expected(case, profile), load.slo, NO_DELAYS)),
    "window": lambda case, load, profile: Worker(case, load, Window(expected(case, profile), load.slo, NO_DELAYS)),
    "nexus": lambda case, load, profile: Worker(case, load, Nexus(by_mean(case, profile), load.slo, NO_DELAYS)),
    "clipper": lambda case, load, profile: ClipperWorker(case, load, by_mean(case, profile)),
    "clockwork": lambda case, load, profile: _clockwork(case, load, profile, MAX_BATCH),
    "clockwork_1": lambda case, load, profile: _clockwork(case, load, profile, 1),
}
