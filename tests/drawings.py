"""State diagrams of the pages, and the changes of a machine that is tried out in full."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from symphony_serve.errors import ServeError

State, Event = TypeVar("State"), TypeVar("Event")


def arrows_of(page: str, heading: str) -> dict[tuple[str, str], str]:
    """The arrows of the first diagram below this heading of a page, with their causes."""
    text = (Path(__file__).parents[1] / "docs" / page).read_text().split(heading, 1)[1].split("```", 2)[1]
    return {(begin, end): causes for begin, end, causes in re.findall(r"^ +(\w+) --> (\w+): (.+)$", text, re.MULTILINE)}


def tried(
    start: State, events: Callable[[State], Iterable[Event]], handle: Callable[[State, Event], State], depth: int
) -> Iterator[tuple[State, Event, State]]:
    """Each state that fewer than ``depth`` events can bring about, with each event, and the state after it.

    What the machine refuses is left out, and is said in one line.
    """
    seen, edge = {repr(start)}, [start]
    for _ in range(depth):
        begin, edge = edge, []
        for state in begin:
            for event in events(state):
                try:
                    after = handle(state, event)
                except ServeError as error:
                    assert "\n" not in str(error)
                    continue
                yield state, event, after
                if repr(after) not in seen:
                    seen.add(repr(after))
                    edge.append(after)


def causes_of(changes: Iterable[tuple[str, str, object]]) -> dict[tuple[str, str], set[str]]:
    """The arrows that these changes make, each (state, state after it, event), with the names of their causes."""
    found: dict[tuple[str, str], set[str]] = {}
    for begin, end, event in changes:
        if begin != end:
            found.setdefault((begin, end), set()).add(type(event).__name__)
    return found
