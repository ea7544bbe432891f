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
from fluidtune.report.fold import Fold
from fluidtune.report.pictures import timeline_figure, utilisation_figure
from fluidtune.report.recorded import read_job
from fluidtune.report.schema import SCHEMA
from fluidtune.report.serving_report import render_serving, serving_png, summarise_serving
from fluidtune.report.story import story_of
from fluidtune.report.summary import render, summarise
from fluidtune.report.top import RunScreen
from fluidtune.view.run_model import changes
from tests.report.makers import ev, text_of

STRANGE: list[Any] = [None, True, "x", "", 0, -1, 1.5, 10**400, [], {}, [None], [0, 0], {"a": None}, {"a": {"b": "c"}}]


#: Form of a field that readers rely on -> a value. Any other field is a text.
SOME: dict[str, Any] = {
    **{"given": "x", "text": "a", "number": 1.0, "amount": 1.0, "size": 1.0, "whole": 0, "count": 1, "table": {}},
    **{
        "texts": ["a"],
        "places": [0, 1],
        "devices": [{"device": 0, "node": "n"}, {"device": 1, "node": "n"}],
        "numbers": {"a": 1.0},
    },
    **{"best": {"trial": "a", "metric": 1.0}, "outcomes": {"a": {"answered": 3}}, "batches": {"a": {"1": 3}}},
}
OF_A_JOB, OF_A_SERVICE = list(SCHEMA)[: list(SCHEMA).index("run_ended")], list(SCHEMA)[len(SCHEMA) - 10 :]


def whole(name: str) -> EventDict:
    """The event with all of its fields."""
    schema = SCHEMA[name]
    forms = {field: SOME[form] for field, _, form, _ in schema.relied}
    more = {"parameters": {"x": 1}, "processes": [], "state": "asked", "kind": "elastic", "why": "idle_devices"}
    return ev(1, name, **{each: forms.get(each, more.get(each, "x")) for each in (*schema.required, *schema.optional)})


def of_a_run() -> list[EventDict]:
    """Every event of a job. After one that takes its devices from the trial it is started."""
    takes = ("trial_added", "trial_suspended", "trial_ended")
    names = [each for name in OF_A_JOB for each in ([name, "trial_started"] if name in takes else [name])]
    return [whole(name) for name in (*names, "run_ended")]


def of_a_service() -> list[EventDict]:
    return [whole(name) for name in OF_A_SERVICE]


def changed(events: list[EventDict]) -> Iterator[tuple[int, EventDict]]:
    """Each event with a field less, or another value in it; and its place."""
    for name in dict.fromkeys(event["event"] for event in events):
        place = next(place for place, event in enumerate(events) if event["event"] == name)
        event = events[place]
        for field in event.keys() - {"event"}:
            yield place, {other: value for other, value in event.items() if other != field}
            yield from ((place, {**event, field: copy.deepcopy(value)}) for value in STRANGE)


def read(events: list[EventDict]) -> list[EventDict]:
    """What a reader gets of them."""
    found = [record_of(json.dumps(event).encode()) for event in events]
    return [event for event in found if event]


def tell_all(events: list[EventDict]) -> None:
    """All that is said of a run, but for its pictures."""
    text_of(render(summarise(events)))
    story_of(events, "a").lines()
    screen = RunScreen(Path())
    screen.hear(events)
    text_of(screen.draw(20.0, 40))
    changes(Fold(events))
    with suppress(ProfileError):
        read_job(events)


def test_every_event_can_be_read() -> None:
    events = [*of_a_run(), *of_a_service()]
    assert read(events) == events and {event["event"] for event in events} == SCHEMA.keys()
    tell_all(of_a_run())
    # Seen: a KeyError where a log had lost its first lines and named a clone.
    tell_all([whole("steered")])


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
