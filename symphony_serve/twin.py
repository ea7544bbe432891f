"""Requests by seed, a server and its GPUs on a virtual clock; and the highest rate that the server bears.

A server is the `Scheduler`, or a baseline. All times are seconds, all rates requests per second.

A GPU takes exactly as long for a batch as its `Dispatch` says. Of one moment, the arrivals come first, then the ends of
batches, and then the tick that the server has asked for.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from symphony_serve.autoscale import BAD_RATE
from symphony_serve.errors import ServeError
from symphony_serve.messages import (
    SAME_MOMENT_S,
    BatchDone,
    Dispatch,
    Event,
    GpuJoined,
    Instruction,
    Refuse,
    Request,
    RequestArrived,
    Server,
    Tick,
    WakeAt,
)


def poisson(rates: Mapping[str, float], slos: Mapping[str, float], seed: int) -> Iterator[Request]:
    """Requests for ever, in the order of their arrival; ids from 0. Those of a model are a Poisson process.

    rates: by model. slos: by model, the seconds from a request's arrival to its deadline. Raises ServeError for a rate
    that is negative or not finite.
    """
    for model, rate in rates.items():
        if not 0 <= rate < math.inf:
            raise ServeError(f"the rate of model {model} is {rate}, expected requests per second of 0 or more")
    return _poisson(rates, slos, seed)


def _poisson(rates: Mapping[str, float], slos: Mapping[str, float], seed: int) -> Iterator[Request]:
    """One process of all models together, each request of which is for one of them."""
    rng = random.Random(seed)
    models = [model for model, rate in rates.items() if rate > 0]
    total = sum(rates.values())
    if not models:
        return
    shares, budgets = [rates[model] for model in models], [slos[model] for model in models]
    now, number = 0.0, 0
    while True:
        for place in rng.choices(range(len(models)), shares, k=1000):
            now += rng.expovariate(total)
            yield Request(number, models[place], now, now + budgets[place])
            number += 1


@dataclass(slots=True)
class ModelCount:
    """What became of the requests of one model. good: answered in time; late: answered late; refused."""

    good: int = 0
    late: int = 0
    refused: int = 0

    @property
    def total(self) -> int:
        return self.good + self.late + self.refused

    @property
    def bad_rate(self) -> float:
        """The part of the requests that were refused or answered late; 0 if there were none."""
        return 1 - self.good / self.total if self.total else 0.0


@dataclass
class Outcome:
    """What became of the requests that came in the measured time.

    seconds: the measured time. batches: by size, how many requests were answered in batches of that size.
    queueing: seconds from each answered request's arrival to the start of its batch. busy: by GPU, its seconds of
    batches within the measured time.
    """

    seconds: float
    models: dict[str, ModelCount] = field(default_factory=dict)
    batches: dict[int, int] = field(default_factory=dict)
    queueing: list[float] = field(default_factory=list)
    busy: dict[int, float] = field(default_factory=dict)

    @property
    def worst_bad_rate(self) -> float:
        """The bad rate of the model for which it is highest."""
        return max((count.bad_rate for count in self.models.values()), default=0.0)

    @property
    def bad_rate(self) -> float:
        """The part of all requests that were refused or answered late."""
        total = sum(count.total for count in self.models.values())
        return 1 - self.good / total if total else 0.0

    @property
    def good(self) -> int:
        """Requests answered in time."""
        return sum(count.good for count in self.models.values())

    @property
    def utilisation(self) -> float:
        """The part of the GPUs' time in which they ran batches."""
        return sum(self.busy.values()) / (self.seconds * len(self.busy)) if self.busy else 0.0

    def median_batch(self) -> int:
        """The median, over answered requests, of the size of their batch (figure 1)."""
        middle, seen = sum(self.batches.values()) / 2, 0
        for size, requests in sorted(self.batches.items()):
            seen += requests
            if seen >= middle:
                return size
        return 0


class Simulation:
    """A server and ``gpus`` GPUs, numbered from 0, which join at 0.

    requests: in the order of arrival. warm_up, measured: seconds; requests that come before or after them are served
    but not counted.
    """

    def __init__(self, server: Server, gpus: int, requests: Iterator[Request], warm_up: float, measured: float):
        self._server = server
        self._requests = requests
        self._begin, self._end = warm_up, warm_up + measured
        self._outcome = Outcome(measured, busy=dict.fromkeys(range(gpus), 0.0))
        #: (end, number, dispatch) of batches that were sent.
        self._running: list[tuple[float, int, Dispatch]] = []
        self._number = 0
        #: Requests that have come and are neither answered nor refused.
        self._open = 0
        self._wake = math.inf
        for gpu in range(gpus):
            self._tell(GpuJoined(gpu, 1), 0.0)

    def run(self) -> Outcome:
        """Let all requests of the measured time come, and all of them be answered or refused."""
        request = next(self._requests, None)
        while True:
            due = self._running[0][0] if self._running else math.inf
            if request is not None and request.arrival <= due and request.arrival <= self._wake:
                if request.arrival > self._end:
                    request = None
                    continue
                self._open += 1
                self._tell(RequestArrived(request), request.arrival)
                request = next(self._requests, None)
            elif request is None and self._open == 0:
                return self._outcome
            elif due <= self._wake:
                if due == math.inf:
                    raise ServeError(
                        f"{self._open} requests are neither answered nor refused, and nothing is to happen"
                    )
                self._end_batch(*heapq.heappop(self._running))
            else:
                now, self._wake = self._wake, math.inf
                self._tell(Tick(), now)

    def _tell(self, event: Event, now: float) -> None:
        for instruction in self._server.handle(event, now):
            if isinstance(instruction, WakeAt):
                self._wake = instruction.at
            elif isinstance(instruction, Dispatch):
                self._number += 1
                end = instruction.start + self._seconds(instruction)
                heapq.heappush(self._running, (end, self._number, instruction))
            elif isinstance(instruction, Refuse):
                self._open -= 1
                self._count(instruction.request, "refused")
            else:
                self._carry_out(instruction, now)

    def _seconds(self, batch: Dispatch) -> float:
        return batch.seconds

    def _carry_out(self, instruction: Instruction, now: float) -> None:
        """An instruction that is not given where batches take the predicted times."""
        raise ServeError(f"{instruction!r} is no instruction of a scheduler")

    def _end_batch(self, end: float, number: int, batch: Dispatch) -> None:
        outcome, size = self._outcome, len(batch.requests)
        self._open -= size
        for request in batch.requests:
            if self._begin <= request.arrival <= self._end:
                self._count(request, "good" if end <= request.deadline + SAME_MOMENT_S else "late")
                outcome.batches[size] = outcome.batches.get(size, 0) + 1
                outcome.queueing.append(batch.start - request.arrival)
        self._keep_busy(batch.gpu, batch.start, end)
        self._tell(BatchDone(batch.gpu, batch.token, batch.plan), end)

    def _keep_busy(self, gpu: int, start: float, end: float) -> None:
        self._outcome.busy[gpu] += max(0.0, min(end, self._end) - max(start, self._begin))

    def _count(self, request: Request, what: str) -> None:
        if self._begin <= request.arrival <= self._end:
            count = self._outcome.models.setdefault(request.model, ModelCount())
            setattr(count, what, getattr(count, what) + 1)


def goodput(run: Callable[[float], Outcome], guess: float, precision: float = 0.005) -> float:
    """The highest rate at which no model's bad rate is above `BAD_RATE`, to ``precision`` of it.

    ``run``: simulates a total rate. ``guess``: where the search begins. It doubles or halves until it has a rate that
    the server bears and one that it does not bear, and then halves the gap between them.
    """
    low, high, rate = 0.0, 0.0, guess
    while not high or high - low > precision * high:
        if run(rate).worst_bad_rate <= BAD_RATE:
            low = rate
        else:
            high = rate
        rate = 2 * low if not high else (low + high) / 2
        if high and high < guess / 2**20:
            return 0.0
    return low
