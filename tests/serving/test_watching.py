"""What the front counts, logs and publishes, without Ray and on a clock of the test."""

from __future__ import annotations

import pytest

from fluidtune.report import read_events
from fluidtune.report.serving_report import (
    Batch,
    batches_png,
    is_serving,
    render_serving,
    serving_png,
    summarise_serving,
)
from fluidtune.serving.watching import LOOKS, MINUTE_S, Books, ServingLog, Watch, are_kept, demand, sample
from symphony_serve.autoscale import Autoscaler
from symphony_serve.profiles import Profile
from symphony_serve.shell.async_server import BatchSeen


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


class Published:
    """Stands for the gauges: keeps what it was told."""

    def __init__(self):
        self.spans, self.wanted = [], []

    def set(self, span, wanted):
        self.spans.append(span)
        self.wanted.append(wanted)


class Advice(Autoscaler):
    """Wants three devices after the first sample, and keeps the samples."""

    def __init__(self):
        super().__init__({"a": (Profile.from_seconds([0.01]), 0.1), "b": (Profile.from_seconds([0.01]), 0.1)})
        self.samples = []

    def add(self, sample):
        self.samples.append(sample)
        return 3 if len(self.samples) == 1 else sample.gpus


@pytest.fixture
def watched(tmp_path):
    clock, advice, published = Clock(), Advice(), Published()
    books = Books(["a", "b"], clock)
    log = ServingLog(tmp_path / "serving")
    return clock, books, Watch(books, log, published, lambda: 2, advice, lambda: None), published, advice, log


@pytest.mark.parametrize(
    ("counts", "hurried", "calm"),
    [
        ({"answered": 99, "refused: queue_full": 1}, {}, True),
        ({"answered": 99, "refused: queue_full": 2}, {}, False),
        ({"answered": 99, "late": 2}, {}, False),
        ({"answered": 1, "bad": 50, "failed": 50, "cancelled": 50}, {}, True),
        ({"answered": 1, "refused: body_late": 50}, {"refused: body_late": 50}, True),
        ({"answered": 1, "refused: late_on_arrival": 50}, {"refused: late_on_arrival": 50}, True),
        ({"answered": 1, "refused: late": 50}, {"refused: late": 50}, True),
        ({"answered": 1, "refused: late": 50}, {"refused: late": 49}, False),
        ({"bad": 50}, {}, False),
        ({"late": 50}, {"late": 50}, False),
        ({}, {}, False),
    ],
)
def test_calm_is_a_span_in_which_requests_were_answered_and_hardly_one_refused(tmp_path, counts, hurried, calm):
    """One that was hurried by its client is no sign of load. Seen: `serve plan` kept the times of the start."""
    clock, told = Clock(), []
    books = Books(["a"], clock)
    watch = Watch(books, ServingLog(tmp_path / "serving"), Published(), lambda: 2, Advice(), lambda: told.append(True))
    for what, count in counts.items():
        books.count("a", what, count - hurried.get(what, 0))
        books.count("a", what, hurried.get(what, 0), hurried=True)
    for _ in range(LOOKS):
        clock.now += 1.0
        watch.look()
    assert told == [True] * calm


def test_gauges_have_what_happened_since_the_last_look(watched):
    clock, books, watch, published, _, _ = watched
    for _ in range(3):
        books.count("a", "answered")
    books.batch(BatchSeen(0, "a", 3, clock.now, 0.25, 0.6))
    clock.now += 2.0
    watch.look()
    books.count("a", "answered")
    books.count("b", "refused: late")
    clock.now += 1.0
    watch.look()
    first, second = published.spans
    assert (first.seconds, first.requests["a"]["answered"], dict(first.batches["a"])) == (2.0, 3, {3: 1})
    assert (first.waited["a"], first.busy) == (0.6, 0.25)
    assert (second.requests["a"]["answered"], second.requests["b"]["refused: late"], second.busy) == (1, 1, 0.0)


def test_each_line_of_the_log_counts_everything_once(watched, tmp_path):
    clock, books, watch, published, advice, log = watched
    for number in range(2 * LOOKS + 3):
        books.count("a", "answered")
        books.count("b", "failed" if number % 2 else "refused: late")
        books.batch(BatchSeen(1, "a", 1, clock.now, 0.5, 0.125))
        clock.now += 1.0
        watch.look()
    watch.stop()
    watch.look()
    events = read_events(log.directory / "fluid_events.jsonl")
    served = [event for event in events if event["event"] == "served"]
    assert [event["seconds"] for event in served] == [LOOKS, LOOKS, 3]
    assert sum(event["requests"]["a"]["answered"] for event in served) == 2 * LOOKS + 3
    assert sum(event["batches"]["a"]["1"] for event in served) == 2 * LOOKS + 3
    # What a model fails with says nothing about the number of devices.
    assert advice.samples[0].offered == {"a": LOOKS, "b": LOOKS / 2}
    assert [event["wanted"] for event in events if event["event"] == "devices_wanted"] == [3, 2]
    assert set(published.wanted[LOOKS : 2 * LOOKS - 1]) == {3}


def test_devices_that_come_and_go_keep_what_is_wanted_until_more_is_known(tmp_path):
    clock, advice, there = Clock(), Advice(), [2]
    books, log = Books(["a"], clock), ServingLog(tmp_path / "serving")
    watch = Watch(books, log, Published(), lambda: there[0], advice, lambda: None)
    seen = []
    for devices in (2, 3, 3, 0, 0):
        there[0] = devices
        for _ in range(LOOKS):
            books.count("a", "refused: no_lease")
            clock.now += 1.0
            watch.look()
        seen.append(watch.wanted)
    # What was seen while the number changed is no sample. None of the others but the first wants another number.
    assert seen == [3, 3, 3, 3, 1]
    assert [one.gpus for one in advice.samples] == [2, 3, 0]
    assert advice.samples[0].offered == {"a": LOOKS} and advice.samples[0].good == 0
    served = [event for event in read_events(log.directory / "fluid_events.jsonl") if event["event"] == "served"]
    assert [event["devices"] for event in served] == [2, 3, 3, 0, 0]
    log.close()


@pytest.mark.parametrize("what", ["late", "late_on_arrival", "queue_full", "makes_way", "gpu_lost"])
def test_what_clients_want_sooner_than_the_slo_is_no_load(what):
    clock = Clock()
    books, before = Books(["a"], clock), Books(["a"], clock).total()
    for _ in range(100):
        books.answered("a", 0.05)
        books.count("a", f"refused: {what}", 2, hurried=True)
    clock.now += 10.0
    seen = sample(books.total().since(before), 4)
    assert (seen.offered, seen.good) == ({"a": 100}, 100)
    assert Autoscaler({"a": (Profile.from_seconds([0.01]), 0.1)}).add(seen) == 4
    books.count("a", "refused: late", 30)
    books.count("a", "refused: no_lease", 20, hurried=True)
    assert sample(books.total().since(before), 4).offered == {"a": 150}


@pytest.mark.parametrize(
    ("what", "hurried", "counts"),
    [
        ("answered", False, True),
        ("failed", False, True),
        ("late", False, True),
        ("refused: queue_full", False, True),
        ("refused: no_model_process", False, True),
        ("late", True, False),
        ("refused: late_on_arrival", True, False),
        ("bad", True, False),
        ("bad", False, False),
        ("cancelled", False, False),
    ],
)
@pytest.mark.serve
def test_models_are_placed_for_what_devices_could_answer(what, hurried, counts):
    """Seen: models were placed anew because of bodies that are no input."""
    books = Books(["a", "b"])
    books.count("a", "answered", 2)
    books.count("a", what, 3, hurried)
    assert demand(books.total()) == {"a": 5 if counts else 2, "b": 0}


def test_of_an_overload_no_times_are_kept():
    """Seen: after an overload, `fluidtune serve plan` said "give an SLO of at least 5.63 s"."""
    for seconds, kept in ((0.4, True), (0.5, False)):
        known = {"a": Profile.from_seconds([0.1]), "b": Profile.from_seconds([seconds])}
        assert are_kept(known, {"a": 0.0, "b": 0.1}, lambda name: 0.5) == kept


def test_nothing_is_logged_where_nothing_happens(watched):
    clock, _, watch, _, _, log = watched
    for _ in range(5 * LOOKS):
        clock.now += 1.0
        watch.look()
    watch.stop()
    assert [event["event"] for event in read_events(log.directory / "fluid_events.jsonl")] == [
        "devices_wanted",
        "devices_wanted",
    ]


def test_the_last_minute_of_batches_is_kept():
    clock = Clock()
    books = Books(["a"], clock)
    for number in range(3):
        books.batch(BatchSeen(0, "a", number + 1, clock.now, 0.1, 0.0))
        clock.now += MINUTE_S / 2
    assert [one.size for one in books.minute()] == [2, 3]
    assert books.total().batches == {"a": {1: 1, 2: 1, 3: 1}}


def test_only_the_answers_of_the_last_minute_are_kept():
    # Seen: a front's memory grew by 0.2 MiB a minute for 24 minutes at 7 requests a second.
    clock = Clock()
    books = Books(["a"], clock)
    for number in range(10 * int(MINUTE_S)):
        books.answered("a", 0.1 if number < 9 * MINUTE_S else 0.2)
        clock.now += 1.0
    assert len(books._answers["a"][1]) == MINUTE_S + 1, "a rate that stays takes memory that stays"
    assert books.pace("a") == (1.0, 0.2)


def test_a_log_that_cannot_be_written_is_said_once(tmp_path, caplog):
    log = ServingLog(tmp_path / "nowhere" / "serving")
    log.write("serving_ended", seconds=1.0)
    log.keep("profiles.json", "{}")
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "No events of this service are kept any more"
    ]
    assert log.directory is None and not (tmp_path / "nowhere").exists()


def test_the_report_of_a_service(watched, tmp_path):
    clock, books, watch, _, _, log = watched
    log.write(
        "serving_started",
        run="r",
        ray="",
        fluidtune="",
        python="",
        machine="",
        kind="cpu",
        devices=2,
        slo=0.1,
        starts="eager",
        trials=[{"trial": "a", "value": None}],
    )
    for what in ("answered", "answered", "late", "refused: late", "refused: makes_way", "bad"):
        books.count("a", what)
    books.batch(BatchSeen(0, "a", 3, clock.now, 0.5, 0.3))
    clock.now += 4.0
    watch.stop()
    log.write("worker_lost", worker="w", device=0, reason="killed")
    log.write("device_gained", device=2, node="m")
    log.write("device_returned", device=2)
    events = read_events(log.directory / "fluid_events.jsonl")
    assert is_serving(events)
    found = summarise_serving(events)
    assert (found.requests["a"]["answered"], found.lost, found.busy / found.device_seconds) == (2, 1, 0.0625)
    row = [str(next(iter(column.cells))) for column in render_serving(found).columns]
    assert row == ["a", "0.5", "2", "1", "2", "1", "3.0", "100.0"]
    assert serving_png(events, tmp_path / "serving.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 3, 400])
def test_the_picture_of_a_minute(tmp_path, count):
    batches = [Batch(number % 2, "ab"[number % 2], number + 1, number / 10, 0.05) for number in range(count)]
    assert batches_png(batches, 2, 60.0, tmp_path / "minute.png").read_bytes().startswith(b"\x89PNG")
