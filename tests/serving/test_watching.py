"""What the front counts, logs and publishes, without Ray and on a clock of the test."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from fluidtune.report import EventLog, read_events
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
from tests.serve.driving import PATIENCE_S

MODELS = {name: (Profile.from_seconds([0.01]), 0.1) for name in "ab"}


class Watched:
    """What the front counts of models a and b on two devices. keep: is called when their times are to be kept.

    advice: three devices after the first sample, and then those that there are.
    """

    def __init__(self, directory):
        self.now, self.devices, self.directory = 1000.0, 2, directory
        self.published, self.keep, self.log = Mock(), Mock(), ServingLog(directory)
        self.advice = Mock(side_effect=lambda sample: 3 if self.advice.call_count == 1 else sample.gpus)
        self.books = Books(["a", "b"], lambda: self.now)
        scaler = SimpleNamespace(add=self.advice)
        self.watch = Watch(self.books, self.log, self.published, lambda: self.devices, scaler, self.keep)

    @property
    def samples(self):
        return [call.args[0] for call in self.advice.call_args_list]

    def look(self, seconds=1.0):
        self.now += seconds
        self.watch.look()

    def events(self, *names):
        """Those of these names, or all. The log ends."""
        self.log.close(PATIENCE_S)
        events = read_events(self.directory / "fluid_events.jsonl")
        return [event for event in events if not names or event["event"] in names]


@pytest.fixture
def watched(tmp_path):
    return Watched(tmp_path / "serving")


@pytest.fixture
def books(watched):
    return watched.books


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
def test_calm_is_a_span_in_which_requests_were_answered_and_hardly_one_refused(watched, books, counts, hurried, calm):
    """One that was hurried by its client is no sign of load. Seen: `serve plan` kept the times of the start."""
    for what, count in counts.items():
        books.count("a", what, count - hurried.get(what, 0))
        books.count("a", what, hurried.get(what, 0), hurried=True)
    for _ in range(LOOKS):
        watched.look()
    assert watched.keep.call_count == calm


def test_gauges_have_what_happened_since_the_last_look(watched, books):
    for _ in range(3):
        books.count("a", "answered")
    books.batch(BatchSeen(0, "a", 3, watched.now, 0.25, 0.6))
    watched.look(2.0)
    books.count("a", "answered")
    books.count("b", "refused: late")
    watched.look()
    first, second = [call.args[0] for call in watched.published.set.call_args_list]
    assert (first.seconds, first.requests["a"]["answered"], dict(first.batches["a"])) == (2.0, 3, {3: 1})
    assert (first.waited["a"], first.busy) == (0.6, 0.25)
    assert (second.requests["a"]["answered"], second.requests["b"]["refused: late"], second.busy) == (1, 1, 0.0)


def test_each_line_of_the_log_counts_everything_once(watched, books):
    for number in range(2 * LOOKS + 3):
        books.count("a", "answered")
        books.count("b", "failed" if number % 2 else "refused: late")
        books.batch(BatchSeen(1, "a", 1, watched.now, 0.5, 0.125))
        watched.look()
    watched.watch.stop()
    watched.watch.look()
    served = watched.events("served")
    assert [event["seconds"] for event in served] == [LOOKS, LOOKS, 3]
    assert sum(event["requests"]["a"]["answered"] for event in served) == 2 * LOOKS + 3
    assert sum(event["batches"]["a"]["1"] for event in served) == 2 * LOOKS + 3
    # What a model fails with says nothing about the number of devices.
    assert watched.samples[0].offered == {"a": LOOKS, "b": LOOKS / 2}
    assert [event["wanted"] for event in watched.events("devices_wanted")] == [3, 2]
    assert {call.args[1] for call in watched.published.set.call_args_list[LOOKS : 2 * LOOKS - 1]} == {3}


def test_devices_that_come_and_go_keep_what_is_wanted_until_more_is_known(watched, books):
    seen = []
    for watched.devices in (2, 3, 3, 0, 0):
        for _ in range(LOOKS):
            books.count("a", "refused: no_lease")
            watched.look()
        seen.append(watched.watch.wanted)
    # What was seen while the number changed is no sample. None of the others but the first wants another number.
    assert seen == [3, 3, 3, 3, 1]
    samples = watched.samples
    assert [one.gpus for one in samples] == [2, 3, 0]
    assert samples[0].offered == {"a": LOOKS, "b": 0} and samples[0].good == 0
    assert [event["devices"] for event in watched.events("served")] == [2, 3, 3, 0, 0]


@pytest.mark.parametrize("what", ["late", "late_on_arrival", "queue_full", "makes_way", "gpu_lost"])
def test_what_clients_want_sooner_than_the_slo_is_no_load(watched, books, what):
    before = books.total()
    for _ in range(100):
        books.answered("a", 0.05)
        books.count("a", f"refused: {what}", 2, hurried=True)
    watched.now += 10.0
    seen = sample(books.total().since(before), 4)
    assert (seen.offered, seen.good) == ({"a": 100, "b": 0}, 100)
    assert Autoscaler(MODELS).add(seen) == 4
    books.count("a", "refused: late", 30)
    books.count("a", "refused: no_lease", 20, hurried=True)
    assert sample(books.total().since(before), 4).offered == {"a": 150, "b": 0}


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
def test_models_are_placed_for_what_devices_could_answer(books, what, hurried, counts):
    """Seen: models were placed anew because of bodies that are no input."""
    books.count("a", "answered", 2)
    books.count("a", what, 3, hurried)
    assert demand(books.total()) == {"a": 5 if counts else 2, "b": 0}


def test_of_an_overload_no_times_are_kept():
    """Seen: after an overload, `fluidtune serve plan` said "give an SLO of at least 5.63 s"."""
    for seconds, kept in ((0.4, True), (0.5, False)):
        known = {"a": Profile.from_seconds([0.1]), "b": Profile.from_seconds([seconds])}
        assert are_kept(known, {"a": 0.0, "b": 0.1}, lambda name: 0.5) == kept


def test_nothing_is_logged_where_nothing_happens(watched):
    for _ in range(5 * LOOKS):
        watched.look()
    watched.watch.stop()
    assert [event["event"] for event in watched.events()] == ["devices_wanted"] * 2


def test_the_last_minute_of_batches_is_kept(watched, books):
    for number in range(3):
        books.batch(BatchSeen(0, "a", number + 1, watched.now, 0.1, 0.0))
        watched.now += MINUTE_S / 2
    assert [one.size for one in books.minute()] == [2, 3]
    assert books.total().batches["a"] == {1: 1, 2: 1, 3: 1}


def test_only_the_answers_of_the_last_minute_are_kept(watched, books):
    # Seen: a front's memory grew by 0.2 MiB a minute for 24 minutes at 7 requests a second.
    for number in range(10 * int(MINUTE_S)):
        books.answered("a", 0.1 if number < 9 * MINUTE_S else 0.2)
        watched.now += 1.0
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


def test_a_disk_that_hangs_holds_up_nobody_and_loses_nothing(tmp_path, monkeypatch):
    """A pipe stands for it, which nobody reads. Seen: all answers and `/healthz` waited for the log."""
    monkeypatch.setattr(EventLog, "open", lambda self, directory: vars(self).update(_path=directory, _fd=writes))
    reads, writes = os.pipe()
    log = ServingLog(tmp_path)
    for number in range(2000):
        log.write("serving_failed", reason=f"{number:100}")
    log.keep("profiles.json", "{}")
    log.close(0.01)
    assert log.directory is None and not (tmp_path / "profiles.json").exists()
    with os.fdopen(reads) as lines:
        assert [int(json.loads(line)["reason"]) for line in lines] == [*range(2000)]
    log.close(PATIENCE_S)
    assert (tmp_path / "profiles.json").read_text() == "{}" and len(list(tmp_path.iterdir())) == 1


def test_the_report_of_a_service(watched, books, tmp_path):
    log, about = watched.log, dict.fromkeys(("ray", "fluidtune", "python", "machine"), "")
    about |= {"run": "r", "kind": "cpu", "devices": 2, "slo": 0.1, "starts": "eager"}
    log.write("serving_started", trials=[{"trial": "a", "value": None}], **about)
    for what in ("answered", "answered", "late", "refused: late", "refused: makes_way", "bad"):
        books.count("a", what)
    books.batch(BatchSeen(0, "a", 3, watched.now, 0.5, 0.3))
    watched.now += 4.0
    watched.watch.stop()
    log.write("worker_lost", worker="w", device=0, reason="killed")
    log.write("device_gained", device=2, node="m")
    log.write("device_returned", device=2)
    events = watched.events()
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
