"""State diagrams of the pages, and what a machine does when it is tried out in full."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from symphony_serve.errors import ServeError


def arrows_of(page: str, heading: str) -> dict[tuple[str, str], str]:
    """The arrows of the first diagram below this heading of a page, with their causes."""
    text = (Path(__file__).parents[1] / "docs" / page).read_text().split(heading, 1)[1].split("```", 2)[1]
    return {(begin, end): causes for begin, end, causes in re.findall(r"^ +(\w+) --> (\w+): (.+)$", text, re.MULTILINE)}


def changes_of(page: str, heading: str) -> set[tuple[str, str, str]]:
    """The same, each cause by itself: state, state after it, cause."""
    return {(*arrow, cause) for arrow, causes in arrows_of(page, heading).items() for cause in causes.split(", ")}


def tried(
    start: Any, events: Callable[[Any], Iterable[Any]], handle: Callable[[Any, Any], Any], depth: int
) -> Iterator[tuple[Any, Any, Any]]:
    """Each state that ``depth`` events can bring about, with each event, by name, and the state after it.

    What the machine refuses is left out, and is said in one line.
    """
    seen, found = {repr(start)}, [(start, 0)]
    for state, steps in found:
        for event in events(state):
            try:
                after = handle(state, event)
            except ServeError as error:
                assert "\n" not in str(error)
                continue
            yield state, type(event).__name__, after
            if steps < depth and repr(after) not in seen:
                seen.add(repr(after))
                found.append((after, steps + 1))
