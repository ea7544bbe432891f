"""What a service counts, and what it tells of itself while it runs: its event log, and Ray's gauges.

The front counts in the `Books`: a request and a batch cost some additions. A task of `Watch` looks at them once a
second. All of it is on the front's event loop, but a thread writes the log. All times are seconds.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily
from ray.util import metrics

from fluidtune.memory_trim import MemoryTrim
from fluidtune.report import EventLog, EventLogError
from fluidtune.serving.model_versions import labels
from symphony_serve.autoscale import BAD_RATE, Autoscaler, Sample
from symphony_serve.profiles import Profile
from symphony_serve.shell.async_server import BatchSeen

logger = logging.getLogger(__name__)

#: Seconds between two looks, and the number of looks for one line of the log. A gauge that is scraped every 15 s (usual
#: for Prometheus) need not be newer; 10 s are `autoscale.WINDOW_S`, and 3 MB of log a day.
LOOK_S, LOOKS = 1.0, 10
#: Seconds of batches that are kept for the picture, and their largest number: 1,600 a second are more than one front
#: decides, and take 20 MB.
MINUTE_S, MOST = 60.0, 100_000
#: Answers of a version whose times are kept for its 99th percentile: so many that one in a hundred is known to a tenth.
MOST_ANSWERS = 10_000
#: What became of requests that no device could have answered, as clients sent no input, or have gone.
NO_LOAD = ("bad", "cancelled")
#: What became of requests for which a device came too late: more devices would have helped. But if a client wanted its
#: answer sooner than within the SLO, or its body came slowly, that is no load: it may ask for what no device can do.
TOO_LATE = ("late", "refused: late", "refused: makes_way", "refused: gpu_lost", "refused: queue_full")
#: That of those for which there was no device at all, however long they would have waited.
NO_DEVICE = "refused: no_lease"


@dataclass
class Span:
    """What happened within some seconds, each by `model_versions.Version.key`.

    requests: by what became of them. batches: by size. waited: seconds that requests waited for their batch, added up.
    busy: seconds of batches, all devices together; a batch counts where it ends, and once where two overlap.
    hurried: of the requests that were late or refused, what became of those to which their client left less than the
    SLO.
    """

    seconds: float
    requests: dict[str, Counter[str]]
    batches: dict[str, Counter[int]]
    waited: dict[str, float]
    busy: float = 0.0
    hurried: dict[str, Counter[str]] = field(default_factory=dict)

    def since(self, before: Span) -> Span:
        """What happened from one `Books.total` to this one."""
        return Span(
            self.seconds - before.seconds,
            {name: counts - before.requests.get(name, Counter()) for name, counts in self.requests.items()},
            {name: counts - before.batches.get(name, Counter()) for name, counts in self.batches.items()},
            {name: seconds - before.waited.get(name, 0.0) for name, seconds in self.waited.items()},
            self.busy - before.busy,
            {name: counts - before.hurried.get(name, Counter()) for name, counts in self.hurried.items()},
        )


class Books:
    """Counts for these trials, or later versions."""

    def __init__(self, trials: Sequence[str], clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        #: All that was added up. Its seconds are not used.
        self._sums = Span(0.0, {}, {}, {})
        #: By key, since when it counts, and when it answered requests of the last minute, with the seconds of each.
        self._answers: dict[str, tuple[float, deque[tuple[float, float]]]] = {}
        #: The batches of the last minute.
        self._recent: deque[BatchSeen] = deque(maxlen=MOST)
        for name in trials:
            self.add(name)

    def add(self, key: str) -> None:
        """Count for one more, if it does not yet."""
        if key not in self._answers:
            self._sums.requests[key], self._sums.batches[key], self._sums.waited[key] = Counter(), Counter(), 0.0
            self._sums.hurried[key] = Counter()
            self._answers[key] = self._clock(), deque(maxlen=MOST_ANSWERS)

    def forget(self, key: str) -> None:
        """It is not counted for any more, and what was counted is gone."""
        sums = self._sums
        for counts in (sums.requests, sums.batches, sums.waited, sums.hurried, self._answers):
            counts.pop(key, None)  # type: ignore[attr-defined]

    def answered(self, key: str, seconds: float) -> None:
        """A request was answered, ``seconds`` after it came."""
        self.count(key, "answered")
        if key in self._answers:
            now, (_, latest) = self._clock(), self._answers[key]
            latest.append((now, seconds))
            while latest[0][0] < now - MINUTE_S:
                latest.popleft()

    def pace(self, key: str) -> tuple[float, float | None]:
        """Of the last minute: requests answered per second, and the seconds that 99 % of them took at most."""
        since, answers = self._answers.get(key, (self._clock(), ()))
        now, kept = self._clock(), list(answers)
        if len(kept) == MOST_ANSWERS:
            since = max(since, kept[0][0])
        recent = sorted(seconds for at, seconds in kept if at >= now - MINUTE_S)
        rate = len(recent) / max(1.0, min(MINUTE_S, now - since))
        return rate, recent[int(0.99 * (len(recent) - 1))] if recent else None

    def count(self, trial: str, became: str, times: int = 1, hurried: bool = False) -> None:
        """Inputs to this trial got this outcome, ``times`` of them. A name that is no trial does not count.

        hurried: their client left less than the SLO.
        """
        if trial in self._sums.requests and times:
            self._sums.requests[trial][became] += times
            if hurried and (became == "late" or became.startswith("refused")):
                self._sums.hurried[trial][became] += times

    def batch(self, seen: BatchSeen) -> None:
        if seen.model in self._sums.batches:
            self._sums.batches[seen.model][seen.size] += 1
            self._sums.waited[seen.model] += seen.waited
        self._sums.busy += seen.seconds - seen.overlap
        self._recent.append(seen)
        self._forget_before(seen.sent)

    def requests(self, trial: str) -> dict[str, int]:
        """The trial's requests by what became of them."""
        return dict(self._sums.requests.get(trial, ()))

    def minute(self) -> list[BatchSeen]:
        """The batches that were sent within the last minute, in the order in which they ended."""
        self._forget_before(self._clock())
        return list(self._recent)

    def _forget_before(self, now: float) -> None:
        while self._recent and self._recent[0].sent < now - MINUTE_S:
            self._recent.popleft()

    def total(self) -> Span:
        """All since the beginning; ``seconds`` is the reading of the clock."""
        sums = self._sums
        requests = {name: Counter(dict(counts)) for name, counts in sums.requests.items()}
        hurried = {name: Counter(dict(counts)) for name, counts in sums.hurried.items()}
        batches = {name: Counter(counts) for name, counts in sums.batches.items()}
        return Span(self._clock(), requests, batches, dict(sums.waited), sums.busy, hurried)


class ServingLog:
    """The event log of a service in ``directory``. What cannot be written is said once, and left out.

    A thread of its own writes, in the order of the calls: a disk that hangs holds up nobody but `close`.
    """

    def __init__(self, directory: Path):
        self._directory: Path | None = directory
        self._events = EventLog("No events of this service are kept any more: %s")
        if directory.parent.is_dir():
            self._events.open(directory)
        else:
            self._events.loses(FileNotFoundError(f"{directory.parent} is not there on this machine"))
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._make_calls, name="serve-log", daemon=True)
        self._thread.start()

    @property
    def directory(self) -> Path | None:
        """Where the log is; None: nothing is written, or nothing any more."""
        return None if self._events.lost else self._directory

    def write(self, event: str, **fields: Any) -> None:
        """Append one event."""
        if self.directory is not None:
            self._calls.put(partial(self._events.write, event, **fields))

    def keep(self, name: str, text: str) -> None:
        """Write a file beside the log."""
        if self.directory is not None:
            new = self.directory / f"{name}.new"
            self._calls.put(lambda: new.write_text(text) and new.replace(new.with_suffix("")))

    def close(self, within_s: float) -> None:
        """No event is taken after this. Returns when all are written, or after these seconds."""
        self._directory = None
        self._calls.put(None)
        self._thread.join(within_s)

    def _make_calls(self) -> None:
        for call in iter(self._calls.get, None):
            try:
                call()
            except (EventLogError, OSError) as error:
                self._events.loses(error)
        self._events.close()


class ServingGauges:
    """The gauges of the service of this name; docs/serving.md says what each one is."""

    def __init__(self, name: str) -> None:
        by_trial = ("service", "trial", "version")
        self._requests = metrics.Counter("fluidtune_serve_requests", "Requests by outcome", (*by_trial, "outcome"))
        self._goodput = metrics.Gauge("fluidtune_serve_goodput", "Requests answered in time, per second", by_trial)
        self._batch = metrics.Gauge("fluidtune_serve_batch_size", "Requests of a batch, mean", by_trial)
        self._waited = metrics.Gauge("fluidtune_serve_queueing_seconds", "Seconds that a request waits, mean", by_trial)
        self._used = metrics.Gauge("fluidtune_serve_devices_used", "Devices that run batches, mean", ("service",))
        self._wanted = metrics.Gauge("fluidtune_serve_devices_wanted", "Devices that the load wants", ("service",))
        for one in vars(self).copy().values():
            one.set_default_tags({"service": name})

    def set(self, span: Span, wanted: int) -> None:
        for trial, counts in span.requests.items():
            tags = dict(zip(("trial", "version"), labels(trial), strict=True))
            for outcome, count in counts.items():
                self._requests.inc(count, {**tags, "outcome": outcome})
            self._goodput.set(counts["answered"] / span.seconds, tags)
            batches = span.batches[trial].total()
            if batches:
                requests = sum(size * count for size, count in span.batches[trial].items())
                self._batch.set(requests / batches, tags)
                self._waited.set(span.waited[trial] / requests, tags)
        self._used.set(span.busy / span.seconds)
        self._wanted.set(wanted)


class _Collected(NamedTuple):
    """What Prometheus reads of the books on the service's own port; docs/serving.md has the names."""

    books: Books

    def collect(self) -> Iterator[CounterMetricFamily]:
        total, named = self.books.total(), ("trial", "version")
        requests = CounterMetricFamily("fluidtune_serve_requests", "Requests by outcome", labels=(*named, "outcome"))
        batches = CounterMetricFamily("fluidtune_serve_batches", "Batches", labels=named)
        waited = CounterMetricFamily(
            "fluidtune_serve_queueing_seconds", "Seconds that requests waited for their batches", labels=named
        )
        busy = CounterMetricFamily("fluidtune_serve_busy_seconds", "Seconds of batches, all devices together")
        for trial, counts in total.requests.items():
            for outcome, count in counts.items():
                requests.add_metric((*labels(trial), outcome), count)
            batches.add_metric(labels(trial), total.batches[trial].total())
            waited.add_metric(labels(trial), total.waited[trial])
        busy.add_metric((), total.busy)
        yield from (requests, batches, waited, busy)


def exposition(books: Books) -> bytes:
    """All counts in Prometheus' text format."""
    return generate_latest(_Collected(books))  # type: ignore[arg-type]


class Watch:
    """Looks at the books, publishes gauges, writes the log, and asks for advice on the number of devices.

    devices: says how many there are. scaler: advises; it knows the profiles. calm: is called after each line of the log
    in whose time requests were answered and there was no overload.
    """

    def __init__(
        self,
        books: Books,
        log: ServingLog,
        gauges: ServingGauges,
        devices: Callable[[], int],
        scaler: Autoscaler,
        calm: Callable[[], None],
    ):
        self._calm = calm
        self._books, self._log, self._gauges, self._devices, self._scaler = books, log, gauges, devices, scaler
        #: Devices at the last line of the log, and how many the load has wanted since.
        self._there = devices()
        self.wanted = max(1, self._there)
        self._last = self._logged = books.total()
        self._looks = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look once a second from now on, and give freed memory back once a minute."""
        self._task = asyncio.create_task(self._run(), name="serve-watch")

    def stop(self) -> None:
        """Look no more, and log what is not in the log yet."""
        if self._task is not None:
            self._task.cancel()
        self._write(self._books.total())

    def look(self) -> None:
        now = self._books.total()
        if now.seconds <= self._last.seconds:
            return
        self._looks += 1
        if self._looks % LOOKS == 0:
            self._write(now)
        self._gauges.set(now.since(self._last), self.wanted)
        self._last = now

    def serves(self, key: str, profile: Profile, budget: float) -> None:
        """One more version is served. budget: seconds of the SLO for its batches."""
        self._books.add(key)
        self._scaler.serve(key, profile, budget)

    def forget(self, key: str) -> None:
        """Log what this version has done, and count no more for it."""
        self._write(self._books.total())
        self._books.forget(key)
        self._scaler.forget(key)

    async def _run(self) -> None:
        memory = MemoryTrim()
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.look()
                memory.now_and_then()
            except Exception:
                logger.exception("A look at the service has failed")

    def _write(self, now: Span) -> None:
        span = now.since(self._logged)
        self._logged = now
        if span.seconds <= 0:
            return
        devices = self._devices()
        if is_calm(span):
            self._calm()
        if any(span.requests.values()) or any(span.batches.values()):
            self._log.write(
                "served",
                seconds=span.seconds,
                requests=_filled(span.requests),
                batches=_filled(span.batches),
                waited=span.waited,
                busy=span.busy,
                devices=devices,
            )
        if devices != self._there:
            # What was seen while the number changed tells nothing about either number.
            self._there = devices
            return
        wanted = max(1, self._scaler.add(sample(span, devices)))
        if wanted != self.wanted:
            self.wanted = wanted
            self._log.write("devices_wanted", devices=devices, wanted=wanted)


def sample(span: Span, devices: int) -> Sample:
    """The span as the autoscaler sees it. Only requests that devices answered, or were too few for, count."""
    good = {name: counts["answered"] for name, counts in span.requests.items()}
    offered = {}
    for name, counts in span.requests.items():
        hurried = span.hurried.get(name, Counter())
        short = sum(counts[what] - hurried[what] for what in TOO_LATE)
        offered[name] = good[name] + short + counts[NO_DEVICE]
    return Sample(span.seconds, devices, span.busy, offered, sum(good.values()))


def demand(span: Span) -> dict[str, int]:
    """The requests that devices had, or could have had, by key. What is refused because of its client is none."""
    hurried = {name: counts.total() for name, counts in span.hurried.items()}
    return {
        name: counts.total() - sum(counts[what] for what in NO_LOAD) - hurried.get(name, 0)
        for name, counts in span.requests.items()
    }


def is_calm(span: Span) -> bool:
    """Whether requests were answered, and at most `BAD_RATE` of them refused or late. Else times say what load does.

    What is so because of its client says nothing of the load.
    """
    answered = sum(counts["answered"] for counts in span.requests.values())
    bad = sum(
        count
        for counts in span.requests.values()
        for what, count in counts.items()
        if what == "late" or what.startswith("refused")
    )
    bad -= sum(counts.total() for counts in span.hurried.values())
    return answered > 0 and bad <= BAD_RATE * (answered + bad)


def are_kept(known: Mapping[str, Profile], delays: Mapping[str, float], slo_of: Callable[[str], float]) -> bool:
    """Whether the profiles, which batches correct, are those of a time without overload: each model meets its SLO."""
    return all(profile.seconds(1) + delays[name] <= slo_of(name) for name, profile in known.items())


def _filled(counts: Mapping[str, Mapping[Any, int]]) -> dict[str, dict[str, int]]:
    """Without the trials of which there are none."""
    return {name: {str(key): count for key, count in some.items()} for name, some in counts.items() if some}
