"""What became of the requests of the services of a run, from their own logs, which are followed like the run's."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fluidtune.report.events import EVENT_LOG_NAME, SERVICE_DIRECTORY, EventLogError, NoEventLogError, service_of
from fluidtune.report.log_tail import LogTail
from fluidtune.report.serving_report import (
    COLUMNS,
    ServingSummary,
    rows_of_serving,
    summarise_serving,
    title_of_serving,
)

#: Seconds from one look for new services to the next: it lists the run's directory. Judgement: none starts sooner.
LOOK_S = 5.0
#: What the service does after an event.
STATES = {
    "serving_started": "starts",
    "served": "answers requests",
    "serving_failed": "cannot serve its models",
    "serving_ended": "was stopped",
}


class ServicesFigures:
    """The services of the run in ``run_dir``. More may begin while they are looked at."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._known: dict[str, _ServiceFigures] = {}
        self._looked = float("-inf")

    def figures(self) -> list[dict[str, Any]]:
        """Of each service, the one of the run's name first, as `_ServiceFigures.figures`."""
        if (now := time.monotonic()) - self._looked >= LOOK_S:
            self._looked = now
            for log in self._run_dir.glob(f"{SERVICE_DIRECTORY}*/{EVENT_LOG_NAME}"):
                name = service_of(log.parent.name)
                if name is not None and name not in self._known:
                    self._known[name] = _ServiceFigures(name, log)
        return [found for _, one in sorted(self._known.items()) if (found := one.figures()) is not None]


class _ServiceFigures:
    """One service. It may be replaced by another one of its name while it is looked at."""

    def __init__(self, name: str, log: Path) -> None:
        self._name = name
        self._tail = LogTail(log)
        self._sum = ServingSummary()
        self._state = ""

    def figures(self) -> dict[str, Any] | None:
        """Its name ("": that of the run), its state, and its table as `fluidtune report` prints it; None: not begun."""
        try:
            if self._tail.anew():
                self._sum, self._state = ServingSummary(), ""
            events = self._tail.new()
            for event in events:
                self._state = STATES.get(event["event"], self._state)
            self._sum = summarise_serving(events, self._sum)
        except NoEventLogError:
            return None
        except (EventLogError, OSError, KeyError, TypeError, ValueError) as error:
            self._state = f"its log cannot be read: {error}"
        if not self._state:
            return None
        rows = [list(row) for row in rows_of_serving(self._sum)]
        found = {"name": self._name, "state": self._state}
        return {**found, "title": title_of_serving(self._sum), "columns": COLUMNS, "rows": rows}
