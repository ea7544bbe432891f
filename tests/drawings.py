"""State diagrams of the pages, and what a machine does when it is tried out in full."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from symphony_serve.errors import ServeError


def changes_of(page: str, heading: str) -> set[tuple[str, str, str]]:
    """State, state after it and cause, of each arrow of the first diagram below this heading of a page."""
    text = (Path(__file__).parents[1] / "docs" / page).read_text().split(heading, 1)[1].split("```", 2)[1]
    arrows = re.findall(r"^ +(\w+) --> (\w+): (.+)$", text, re.MULTILINE)
    return {(begin, end, cause) for begin, end, causes in arrows for cause in causes.split(", ")}


def tried(start: Any, events: Callable[[Any], Any], handle: Callable[[Any, Any], Any], depth: int) -> Iterator[Any]:
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
