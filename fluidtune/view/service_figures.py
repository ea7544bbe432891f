"""What became of the requests of the service of a run, from its own log, which is followed like the run's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fluidtune.report.events import EVENT_LOG_NAME, SERVICE_DIRECTORY, EventLogError
from fluidtune.report.log_tail import LogTail
from fluidtune.report.serving_report import (
    COLUMNS,
    ServingSummary,
    rows_of_serving,
    summarise_serving,
    title_of_serving,
)

#: What the service does after an event.
STATES = {
    "serving_started": "starts",
    "served": "answers requests",
    "serving_failed": "cannot serve its models",
    "serving_ended": "was stopped",
}


class ServiceFigures:
    """The service of the run in ``run_dir``. It may begin, or be replaced by another one, while it is looked at."""

    def __init__(self, run_dir: Path) -> None:
        self._log = run_dir / SERVICE_DIRECTORY / EVENT_LOG_NAME
        self._tail: LogTail | None = None
        self._sum = ServingSummary()
        self._state = ""

    def figures(self) -> dict[str, Any] | None:
        """Its state, and its table as `fluidtune report RUN_DIR/serving` prints it; None: there is none."""
        try:
            if (self._tail is None or self._tail.left is None) and self._log.is_file():
                if self._tail is not None:
                    self._tail.close()
                self._tail, self._sum, self._state = LogTail(self._log), ServingSummary(), ""
            events = self._tail.new() if self._tail is not None else []
            for event in events:
                self._state = STATES.get(event["event"], self._state)
            self._sum = summarise_serving(events, self._sum)
        except (EventLogError, OSError, KeyError, TypeError, ValueError) as error:
            self._state = f"its log cannot be read: {error}"
        if not self._state:
            return None
        rows = [list(row) for row in rows_of_serving(self._sum)]
        return {"state": self._state, "title": title_of_serving(self._sum), "columns": COLUMNS, "rows": rows}
