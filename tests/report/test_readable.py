"""Whatever an event lacks, or has in another form: it is counted and left out, and every command says the rest."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from fluidtune.profiles import ProfileError
from fluidtune.report.events import EventDict, record_of
from fluidtune.report.pictures import timeline_figure, utilisation_figure
from fluidtune.report.recorded import read_job
from fluidtune.report.schema import SCHEMA
from fluidtune.report.serving_report import render_serving, serving_png, summarise_serving
from fluidtune.report.story import story_of
from fluidtune.report.summary import render, summarise
from fluidtune.report.top import RunScreen
from fluidtune.view.run_model import RunModel
from tests.report.makers import added, begin, ended, ev, over, resized, resizing, result, started, text_of

STRANGE: list[Any] = [None, True, "x", "", 0, -1, 1.5, 10**400, [], {}, [None], [0, 0], {"a": None}, {"a": {"b": "c"}}]


def of_a_run() -> list[EventDict]:
    """Every event of a job, as the driver writes it."""
    why = {"reason": "words", "why": "idle_devices", "numbers": {}}
    steered = {"act": 1, "kind": "stop", "by": "me", "via": "command"}
    sample = {"utilisation": 0.5, "memory_used": 1, "memory_total": 2, "processes": []}
    return [
        begin(0, 2),
        ev(1, "device_gained", device=2, node="n"),
        ev(1, "group_announced", group="g", synchronous=True, algorithm="grid", concurrency=2),
        {**added(1, "a"), "share": 1.0, "name": "name", "parameters": {"x": 1}},
        added(1, "b"),
        ev(1, "kind_found", trial="a", kind="elastic"),
        ev(2, "worker_started", worker="w", device=0, pid=1, seconds=1.0, forked=True, spare=True),
        ev(2, "spare_taken", worker="w", device=0),
        ev(2, "trial_waits", trial="b", **{**why, "why": "devices_busy"}),
        {**started(2, "a", 0, share=0.5), **why},
        started(2, "b", 0, share=0.5),
        result(3, "b", 1, 1.0, 0.5, 2.0),
        {**result(4, "a", 2, 1.0, 0.5, 1.0), "iterations": 2, "began": 2.0, "memory": [0.1, 0.1]},
        ev(4, "device_sample", device=0, **sample),
        ev(4, "trial_silent", trial="a", seconds=5.0, usual=1.0),
        resizing(5, "a", [0], [0, 1], why="idle_devices", numbers={}),
        {**resized(6, "a", 0, 1), "share": 1.0, "reason": "words", "why": "idle_devices"},
        resizing(6, "a", [0, 1], [0]),
        ev(7, "resize_failed", trial="a", devices=[0], reason="words"),
        ev(1, "can_grow", trial="a"),
        ev(7, "not_committed", trial="a", reason="words"),
        ev(7, "growth_checked", trial="a", module="Net", verdict="divided", reason="words"),
        ev(7, "divided", trial="a", workers=2, seconds=0.1, stall=0.01),
        ev(7, "growth_ended", trial="a", reason="words"),
        ev(7, "steered", trial="a", state="asked", **steered),
        ev(7, "steered", trial="a", state="done", **{**steered, "kind": "clone"}, clone="b", parameters={"x": 2}),
        ev(8, "suspend_asked", trial="a", **why),
        ev(8, "trial_suspended", trial="a", reason="words"),
        started(8, "a", 0),
        ev(9, "worker_lost", worker="w", device=0, reason="words", trial="a"),
        ev(9, "worker_replaced", worker="w", device=0, reason="words"),
        ev(9, "recovered", trial="a", iteration=2, reason="words"),
        ev(9, "went_on", trial="a", iteration=1, reported=2),
        ev(9, "room_lacking", trial="a", device=0, memory=1, reason="words"),
        started(9, "a", 1),
        ev(9, "device_lost", device=0, reason="words"),
        ev(9, "device_returned", device=2),
        result(10, "a", 3, 1.0, 1.0, 0.5),
        {**ended(11, "a"), "reason": "words"},
        over(12, 12.0, 2, {"trial": "a", "metric": 0.5}),
    ]


def of_a_service() -> list[EventDict]:
    start = dict.fromkeys(["run", "ray", "fluidtune", "python", "machine", "kind", "slo", "starts", "trials"], "x")
    counts = {"requests": {"a": {"answered": 3}}, "batches": {"a": {"1": 3}}, "waited": {"a": 1.0}}
    return [
        ev(0, "serving_started", **start, devices=1),
        ev(1, "devices_wanted", devices=1, wanted=2),
        ev(1, "device_gained", device=1, node="n"),
        ev(9, "served", seconds=8.0, **counts, busy=1.0, devices=1),
        ev(9, "device_lost", device=1, reason="words"),
        ev(9, "serving_ended", seconds=9.0),
    ]


def changed(events: list[EventDict]) -> Iterator[tuple[int, EventDict]]:
    """Each event with a field less, or another value in it; and its place."""
    for place, event in enumerate(events):
        for name in event.keys() - {"event"}:
            less = {field: value for field, value in event.items() if field != name}
            yield place, less
            yield from ((place, {**event, name: copy.deepcopy(value)}) for value in STRANGE)


def read(events: list[EventDict]) -> list[EventDict]:
    """What a reader gets of them."""
    found = [record_of(json.dumps(event).encode()) for event in events]
    return [event for event in found if event]


def tell_all(events: list[EventDict]) -> None:
    """All that is said of a run, but for its pictures."""
    text_of(render(summarise(events)))
    for trial in ("a", "b"):
        story_of(events, trial).lines()
    screen = RunScreen()
    screen.hear(events)
    text_of(screen.draw(20.0, 40))
    model = RunModel()
    model.hear(events)
    model.changes()
    with suppress(ProfileError):
        read_job(events)


def test_every_event_is_among_those_of_a_run_or_of_a_service_and_can_be_read() -> None:
    events = [*of_a_run(), *of_a_service()]
    assert read(events) == events
    assert {event["event"] for event in events} >= {name for name, schema in SCHEMA.items() if schema.relied}
    tell_all(of_a_run())


def test_what_can_be_read_of_a_run_is_told_whatever_it_lacks() -> None:
    events = of_a_run()
    others = list(changed(events))
    kept = [(place, each) for place, other in others for each in read([other])]
    assert len(others) - len(kept) > 500 < len(kept)
    for place, each in kept:
        tell_all([*events[:place], each, *events[place + 1 :]])
    for place in range(len(events)):
        tell_all([*events[:place], *events[place + 1 :]])
    # All of them in one run, which also has its pictures.
    mixed = [each for place, event in enumerate(events) for each in [*(e for at, e in kept if at == place), event]]
    tell_all(mixed)
    timeline_figure(mixed)
    utilisation_figure(mixed)


def test_what_can_be_read_of_a_service_is_told_whatever_it_lacks(tmp_path: Path) -> None:
    events = of_a_service()
    for place, other in changed(events):
        found = [*events[:place], *read([other]), *events[place + 1 :]]
        text_of(render_serving(summarise_serving(found)))
    mixed = [each for place, event in enumerate(events) for each in [event, *read([e for _, e in changed([event])])]]
    serving_png(mixed, tmp_path / "serving.png")
