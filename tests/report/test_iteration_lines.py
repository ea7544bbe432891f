"""A long job's event log stays small, and its report says what it would say of all lines."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
            events.append(resized(t + 0.1, "a", *range(int(width))))
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


def test_a_hundred_thousand_iterations_are_a_small_log_with_the_same_figures_also_for_plan(tmp_path):
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
    one, two = read_job(kept), read_job(every)
    for job in (one, two):
        assert [[stage.iterations for stage in trial.stages] for trial in job.trials] == [[100_000], [10_000]]
    assert one.costs.turn == pytest.approx(two.costs.turn, abs=1e-4)
    found, expected = measure(kept).profile, measure(every).profile
    for place in ({"nodes": (1,)}, {"nodes": (2,)}, {"trials": 2}):
        assert found.iteration(**place) == pytest.approx(expected.iteration(**place), rel=0.15)


#: A trial's iterations (how many, their seconds and width), or a trial that starts on one of two devices.
STEPS = st.lists(
    st.tuples(
        st.sampled_from("ab"), st.integers(1, 60), st.sampled_from([0.01, 1.0, SHARED_SECONDS + 1]), st.integers(1, 2)
    )
    | st.tuples(st.sampled_from("abc"), st.integers(0, 1)),
    max_size=30,
)


@given(STEPS)
def test_every_iteration_is_in_one_line_and_those_around_a_change_have_their_own(steps):
    lines, now, on = IterationLines(), 0.0, {"a": 0, "b": 1}
    done, told, own = Counter[str](), Counter[str](), dict.fromkeys("abc", WHOLE_ITERATIONS)
    took: dict[str, list[float]] = {trial: [] for trial in "abc"}

    def take(wrote: list[Any]) -> set[str]:
        """The trials of these lines, each of which says what came after the one before it."""
        for line in wrote:
            trial, count = line["trial"], line.get("iterations", 1)
            assert line["iteration"] == told[trial] + count and len({width for _, width in took[trial][:count]}) == 1
            assert line["seconds"] == pytest.approx(sum(seconds for seconds, _ in took[trial][:count]) / count)
            del took[trial][:count]
            told[trial] += count
        return {line["trial"] for line in wrote}

    for trial, device in on.items():
        lines.before("trial_started", {"trial": trial, "devices": [device], "share": 1.0, "resumed": False})
    for trial, count, *seconds_width in steps:
        if seconds_width:
            for _ in range(count):
                seconds, width = seconds_width
                now, done[trial] = now + seconds, done[trial] + 1
                took[trial].append((seconds, width))
                line = {"trial": trial, "iteration": done[trial], "seconds": seconds, "width": width, "metric": 1.0}
                take(lines.iteration(line, now))
                # Those that are slow, and those after a change, do not wait.
                assert told[trial] == done[trial] or (own[trial] <= 0 and seconds < SHARED_SECONDS)
                own[trial] -= 1
        else:
            concerned = {trial, *(each for each in on if on[each] in (count, on.get(trial)))}
            on[trial] = count
            told_now = take(lines.before("trial_started", {"trial": trial, "devices": [count], "share": 0.5}))
            assert told_now <= concerned and all(told[each] == done[each] for each in concerned)
            own |= {each: max(own[each], WHOLE_AFTER_CHANGE) for each in concerned}
            assert not take(lines.before("device_sample", {"device": count}))
    take(lines.before("run_ended", {"seconds": 1.0, "trials": 3, "best": None}))
    assert told == done


def test_a_pause_gives_a_trial_no_further_hundred_lines():
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
