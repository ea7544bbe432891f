"""How much work an event is where there are many trials or devices, counted in calls of Python functions.

The work of an event must not grow with what the event does not concern.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.many_trials import Case, Job
from fluidtune.engine import Engine, placing
from fluidtune.engine import messages as m

#: The package whose function calls are counted.
ENGINE = placing.__file__.rpartition("/")[0]


def count_calls(what: Callable[[], Any]) -> int:
    """How many Python functions of the engine ``what`` calls, itself and what they call."""
    count = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(ENGINE)

    sys.setprofile(note)
    try:
        what()
    finally:
        sys.setprofile(None)
    return count


def calls_per_event(case: Case, before: int, events: int = 300) -> float:
    """Calls for each of ``events`` events of the job, after ``before`` others."""
    job = Job(case)
    job.arrive(1_000)
    job.run(before, 1e9)
    done = len(job.calls)
    return count_calls(lambda: job.run(done + events, 1e9)) / (len(job.calls) - done)


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("packing", [1, 3])
def test_an_event_is_as_much_work_with_10_000_trials_as_with_1_000(synchronous: bool, packing: int) -> None:
    few, many = (
        calls_per_event(Case("same", trials, 50, "plain", synchronous, packing, varied=False), 200)
        for trials in (1_000, 10_000)
    )
    assert many < 1.1 * few


@pytest.mark.parametrize("kind", ["plain", "checkpointing"])
def test_the_search_for_c_is_as_much_work_on_many_devices(kind: Any) -> None:
    # While an attempt goes on and none is possible, nothing must look at all devices.
    few, many = (calls_per_event(Case("same", 2 * n, n, kind, False, None, varied=False), n + 10) for n in (50, 500))
    assert many < 2 * few


def test_growing_trials_are_as_much_work_where_many_run() -> None:
    # Seen: with 900 elastic trials on 1,000 devices the engine took 114 events a second.
    few, many = (calls_per_event(Case("same", n * 9 // 10, n, "elastic", True), n, 400) for n in (64, 640))
    assert many < 2 * few


def test_a_batch_is_planned_anew_with_few_calls_for_each_trial() -> None:
    # Seen: with 10,000 trials in synchronous groups single events took 0.15 s and more.
    engine = Engine()
    engine.handle(m.DeviceGained(0), m.GroupAnnounced("g"), now=0.0)
    engine.handle(
        *(m.TrialAdded(f"t{k}", "g", "elastic", 5.0, 1.0, (("w", str(k % 3)), ("lr", str(k)))) for k in range(1_000)),
        now=0.0,
    )
    order = engine.waiting
    planned = 0
    for number in range(8):
        (running,) = engine.held_devices()
        seconds = 1.0 + int(running[1:]) % 3
        engine.handle(*[m.Result(running, seconds, 1.0)] * 5, now=number)
        calls = count_calls(lambda name=running, now=number: engine.handle(m.TrialEnded(name, "stopped"), now=now))
        assert calls < 4 * 1_000
        before, order = order, engine.waiting
        left = set(order)
        planned += order != tuple(name for name in before if name in left)
    assert planned, "the trials' traits never changed the plan: this test sees nothing"
