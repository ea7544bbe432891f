"""A page without a browser: it puts increments together as view.js does. And logs that grow."""

from __future__ import annotations

import json
from typing import Any

from fluidtune.report.events import EventDict


class Page:
    """What a page shows after the increments that it got."""

    def __init__(self) -> None:
        self.columns: tuple[str, ...] = ()
        self.trials: dict[str, dict[str, Any]] = {}
        self.parts: dict[str, Any] = {}
        self.marks: list[Any] = []
        self.intervals: list[tuple[Any, ...]] = []

    def take(self, change: dict[str, Any]) -> Page:
        if change["whole"]:
            self.__init__()  # type: ignore[misc]
        self.columns = change.get("columns") or self.columns
        for row in change["trials"]:
            trial = dict(zip(self.columns, row, strict=True))
            self.trials[trial["id"]] = trial
        skipped = ("whole", "columns", "trials", "marks", "intervals", "cursor")
        self.parts |= {name: value for name, value in change.items() if name not in skipped}
        self.marks += change.get("marks", [])
        self.intervals += zip(*change.get("intervals", []), strict=True)
        return self

    @property
    def shown(self) -> tuple[Any, ...]:
        return self.trials, self.parts, self.marks, self.intervals


def lines_of(events: list[EventDict]) -> bytes:
    return "".join(f"{json.dumps(event)}\n" for event in events).encode()
