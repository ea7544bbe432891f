"""A long job's event log stays small, and its report says what it would say of all lines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fluidtune.engine.messages import Start
from fluidtune.report.events import EventDict, read_events
from fluidtune.report.iteration_lines import SHARED_SECONDS, WHOLE_AFTER_CHANGE, WHOLE_ITERATIONS, IterationLines
from fluidtune.report.measured import measure
from fluidtune.report.recorded import read_job
from fluidtune.report.summary import summarise
from fluidtune.tune.job_log import JobLog
from tests.engine.helpers import Bench, elastic
from tests.report.makers import added, begin, ended, group, over, resized, result, started

#: What docs/events.md says of a trial's lines: bytes of a line, and seconds between two lines.
BYTES, SECONDS = 250, 10


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def long_job(iterations: int, seconds: float, turn: float = 0.0005) -> list[EventDict]:
    """Two trials share a device until the second ends; the first grows and shrinks, and goes on alone."""
    t = 1_000_000.0
    events = [begin(t, 2), group(t, synchronous=False), added(t, "a"), added(t, "b")]
    events += [started(t + 1, "a", 0, share=0.5), started(t + 1, "b", 0, share=0.5)]
    t += 3
    for number in range(1, iterations + 1):
        width = 0.5 if number <= iterations // 10 else 2.0 if 0.6 < number / iterations < 0.7 else 1.0
        before = events[-1].get("width")
        if number == iterations // 10 + 1:
            events.append(ended(t, "b"))
        if before and before != width and 2.0 in (before, width):
            events.append(resized(t + 0.1, "a", *range(int(width)), seconds=0.1))
            t += 0.1
        took = seconds * (0.6 if width > 1 else 1.0) * (1 + number % 7 / 10)
        t += took + turn
        if width < 1:
            events.append(result(t, "b", number, took, width, 2 / number))
        events.append(result(t, "a", number, took, width, 1 / number))
    return [*events, ended(t, "a"), over(t + 1, t + 1 - 1_000_000, 2, {"trial": "a", "metric": 1 / iterations})]


def logged(directory: Any, events: list[EventDict]) -> list[EventDict]:
    """The log that a job writes of these events."""
    clock = Clock()
    log = JobLog("job", directory, SimpleNamespace(), clock)  # type: ignore[arg-type]
    log._report = SimpleNamespace(prepare=lambda: None)  # type: ignore[assignment]
    for event in events:
        fields = {name: value for name, value in event.items() if name not in ("t", "event")}
        clock.now = event["t"]
        if event["event"] == "trial_result":
            reply: Any = SimpleNamespace(seconds=fields["seconds"], memory=None, kept=False)
            log.iteration(fields["trial"], fields["iteration"], fields["width"], reply, fields["metric"], memory=False)
        else:
            log.write(event["event"], **fields)
    return read_events(directory / "fluid_events.jsonl")


def test_a_device_that_a_trial_is_only_promised_is_not_said_to_be_held(tmp_path):
    """The engine starts the trial at width two; until its other worker is there, the trial has one device."""
    bench = Bench(2)
    (told,) = bench(elastic("a"))
    assert isinstance(told, Start) and told.devices == (0, 1)
    JobLog("job", tmp_path, bench.engine, Clock()).instructions_given([told])
    assert [line["devices"] for line in read_events(tmp_path / "fluid_events.jsonl")] == [[0]]


def test_a_hundred_thousand_iterations_of_a_trial_are_a_small_log_with_the_same_figures(tmp_path):
    every = long_job(100_000, 0.01)
    kept = logged(tmp_path, every)
    took = every[-1]["t"] - every[0]["t"]
    lines = 2 * (WHOLE_ITERATIONS + took / SECONDS) + 100
    assert (tmp_path / "fluid_events.jsonl").stat().st_size < lines * BYTES < 200_000
    told, whole = summarise(kept), summarise(every)
    assert sum(at.iterations for at in told.widths.values()) == 110_000
    assert {width: at.iterations for width, at in told.widths.items()} == {
        width: at.iterations for width, at in whole.widths.items()
    }
    for width, at in whole.widths.items():
        assert told.widths[width].device_seconds == pytest.approx(at.device_seconds, rel=1e-9)
        assert told.widths[width].median_seconds == pytest.approx(at.median_seconds, rel=0.15)
    assert told.utilisation == pytest.approx(whole.utilisation, rel=1e-9)
    assert (told.best_trial, told.best_metric, told.endings) == (whole.best_trial, whole.best_metric, whole.endings)
    assert told.bound is not None and whole.bound is not None
    assert told.bound.seconds == pytest.approx(whole.bound.seconds, rel=0.1)


def test_what_plan_reads_of_a_short_log_is_what_it_reads_of_all_lines(tmp_path):
    every = long_job(20_000, 0.01)
    kept = logged(tmp_path, every)
    one, two = read_job(kept), read_job(every)
    for job in (one, two):
        assert [[stage.iterations for stage in trial.stages] for trial in job.trials] == [[20_000], [2_000]]
    assert one.costs.turn == pytest.approx(two.costs.turn, abs=1e-4)
    found, expected = measure(kept).profile, measure(every).profile
    for place in ({"nodes": (1,)}, {"nodes": (2,)}, {"trials": 2}):
        assert found.iteration(**place) == pytest.approx(expected.iteration(**place), rel=0.15)


def whole(lines: list[Any]) -> list[tuple[int, int]]:
    return [(line["iteration"], line.get("iterations", 1)) for line in lines]


def test_iterations_after_a_change_have_lines_of_their_own():
    lines = IterationLines()
    wrote: list[Any] = []
    now = 0.0

    def run(count: int, seconds: float = 0.01, trial: str = "a", width: float = 1.0) -> list[tuple[int, int]]:
        nonlocal now
        before = len(wrote)
        for _ in range(count):
            now += seconds
            number = 1 + sum(line.get("iterations", 1) for line in wrote if line["trial"] == trial)
            open_ones = lines._by_trial[trial].count if lines._by_trial[trial].last else 0
            line = {"trial": trial, "iteration": number + open_ones, "seconds": seconds, "width": width, "metric": 1.0}
            wrote.extend(lines.iteration(line, now))
        return whole(wrote[before:])

    def say(event: str, **fields: Any) -> list[tuple[int, int]]:
        before = len(wrote)
        wrote.extend(lines.before(event, fields))
        return whole(wrote[before:])

    assert say("trial_started", trial="a", devices=[0], share=1.0, resumed=False) == []
    assert len(run(WHOLE_ITERATIONS)) == WHOLE_ITERATIONS
    assert run(50) == []
    # A neighbour comes: the line of the iterations before it comes first, and the later ones have their own.
    assert say("trial_started", trial="b", devices=[0], share=0.5, resumed=False) == [(150, 50)]
    assert run(WHOLE_AFTER_CHANGE + 2) == [(151, 1), (152, 1), (153, 1)]
    # One on another device changes nothing.
    assert say("trial_started", trial="c", devices=[1], share=1.0, resumed=False) == []
    assert say("device_sample", device=0) == []
    # Another width is another line.
    assert run(1, width=0.5) == [(155, 2)]
    assert say("trial_silent", trial="a", seconds=9.0, usual=1.0) == [(156, 1)]
    # Slow iterations have each their line.
    assert run(3, SHARED_SECONDS) == [(157, 1), (158, 1), (159, 1)]
    assert run(1) == []
    assert say("run_ended", seconds=1.0, trials=3, best=None) == [(160, 1)]


def test_a_pause_gives_a_trial_no_further_hundred_lines_and_its_end_lets_go_of_it():
    lines = IterationLines()
    wrote: list[Any] = []
    pauses = 1_000
    now = 0.0
    for turn in range(pauses):
        wrote += lines.before("trial_started", {"trial": "a", "devices": [0], "share": 1.0, "resumed": turn > 0})
        for number in range(100):
            now += 0.01
            line = {"trial": "a", "iteration": 100 * turn + number + 1, "seconds": 0.01, "width": 1.0, "metric": 1.0}
            wrote += lines.iteration(line, now)
        wrote += lines.before("trial_ended", {"trial": "a", "ending": "paused"})
    assert sum(line.get("iterations", 1) for line in wrote) == 100 * pauses
    assert len(wrote) <= WHOLE_ITERATIONS + (WHOLE_AFTER_CHANGE + 1) * pauses
    assert lines.before("trial_ended", {"trial": "a", "ending": "stopped"}) == []
    assert not lines._by_trial
