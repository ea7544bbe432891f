"""What benchmarks measure on the serving twin besides the requests in time: batches, queueing, the GPUs' use, goodput.

All times are seconds, all rates requests per second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from benchmarks.rival_servers import Server
from symphony_serve.autoscale import BAD_RATE
from symphony_serve.messages import Dispatch, Request
from symphony_serve.twin import ModelCount, Simulation


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


class MeasuredSimulation(Simulation):
    """A `Simulation` that says in an `Outcome` what has become of the requests."""

    def __init__(self, server: Server, gpus: int, requests: Iterator[Request], warm_up: float, measured: float):
        super().__init__(server, gpus, requests, warm_up, measured)
        self._outcome = Outcome(measured, self.models, busy=dict.fromkeys(range(gpus), 0.0))

    def run(self) -> Outcome:
        """As `play`."""
        self.play()
        return self._outcome

    def _end_batch(self, end: float, number: int, batch: Dispatch) -> None:
        outcome, size = self._outcome, len(batch.requests)
        for request in batch.requests:
            if self._begin <= request.arrival <= self._end:
                outcome.batches[size] = outcome.batches.get(size, 0) + 1
                outcome.queueing.append(batch.start - request.arrival)
        self._keep_busy(batch.gpu, batch.start, end)
        super()._end_batch(end, number, batch)

    def _keep_busy(self, gpu: int, start: float, end: float) -> None:
        self._outcome.busy[gpu] += max(0.0, min(end, self._end) - max(start, self._begin))


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
