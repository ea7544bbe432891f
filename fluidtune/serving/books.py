"""What became of requests and batches: the one place where the front counts. All times are seconds.

A request costs one addition here, a batch one `deque.append`. Adding up happens where somebody asks.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from symphony_serve.shell.threaded_server import BatchSeen

#: So many seconds of batches are kept for the picture, and so many batches at most. Judgement: the issue asks for a
#: minute; 100,000 are 1,600 batches a second, more than one front decides, and take 20 MB.
MINUTE_S, MOST = 60.0, 100_000


@dataclass
class Span:
    """What happened within some seconds, each by trial.

    requests: by what became of them. batches: by size. waited: seconds that requests waited for their batch, added up.
    busy: seconds of batches, all devices together; a batch counts where it ends.
    """

    seconds: float
    requests: dict[str, Counter[str]]
    batches: dict[str, Counter[int]]
    waited: dict[str, float]
    busy: float = 0.0

    @property
    def empty(self) -> bool:
        """Whether nothing has happened."""
        return not any(self.requests.values()) and not any(self.batches.values())


@dataclass
class Books:
    """Counts for these trials. `count` is called by one thread, `batch` by those of the devices, the others by any."""

    trials: Sequence[str]
    clock: Callable[[], float] = time.monotonic
    _counts: dict[str, Counter[str]] = field(init=False)
    _sizes: dict[str, Counter[int]] = field(init=False)

    def __post_init__(self) -> None:
        self._counts = {name: Counter() for name in self.trials}
        self._sizes = {name: Counter() for name in self.trials}
        #: Seconds: waited by trial, and of all batches.
        self._waited = dict.fromkeys(self.trials, 0.0)
        self._busy = 0.0
        #: Batches that are not added up yet, and those of the last minute.
        self._fresh: deque[BatchSeen] = deque()
        self._recent: deque[BatchSeen] = deque(maxlen=MOST)
        self._lock = threading.Lock()

    def count(self, trial: str, became: str) -> None:
        """A request of this trial got this outcome. One of a name that is no trial does not count."""
        if trial in self._counts:
            self._counts[trial][became] += 1

    def batch(self, seen: BatchSeen) -> None:
        """A device has run this batch."""
        self._fresh.append(seen)

    def requests(self, trial: str) -> dict[str, int]:
        """The trial's requests by what became of them."""
        return dict(self._counts[trial])

    def sizes(self, trial: str) -> dict[int, int]:
        """The trial's batches by size, the smallest first."""
        with self._lock:
            self._add_up()
            return dict(sorted(self._sizes[trial].items()))

    def minute(self) -> list[BatchSeen]:
        """The batches that were sent within the last minute, in the order in which they ended."""
        with self._lock:
            self._add_up()
            return list(self._recent)

    def total(self) -> Span:
        """All since the beginning; ``seconds`` is the reading of the clock."""
        with self._lock:
            self._add_up()
            requests = {name: Counter(dict(counts)) for name, counts in self._counts.items()}
            sizes = {name: Counter(counts) for name, counts in self._sizes.items()}
            return Span(self.clock(), requests, sizes, dict(self._waited), self._busy)

    def _add_up(self) -> None:
        while self._fresh:
            seen = self._fresh.popleft()
            self._sizes[seen.model][seen.size] += 1
            self._waited[seen.model] += seen.waited
            self._busy += seen.seconds
            self._recent.append(seen)
        until = self.clock() - MINUTE_S
        while self._recent and self._recent[0].sent < until:
            self._recent.popleft()


def between(before: Span, after: Span) -> Span:
    """What happened from one `Books.total` to a later one."""
    return Span(
        after.seconds - before.seconds,
        {name: after.requests[name] - before.requests[name] for name in after.requests},
        {name: after.batches[name] - before.batches[name] for name in after.batches},
        {name: after.waited[name] - before.waited[name] for name in after.waited},
        after.busy - before.busy,
    )
