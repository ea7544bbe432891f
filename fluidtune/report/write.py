"""A run's report as files: two pictures and summary.json, next to the event log.

This module decides only the names of the files and their directory.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from fluidtune.report.events import find_log, read_events
from fluidtune.report.pictures import EventSource, timeline_png, utilisation_png
from fluidtune.report.summary import summarise


@dataclass(frozen=True)
class ReportPaths:
    """The paths of the report's files."""

    timeline: Path
    utilisation: Path
    summary: Path


def write_report(
    run_dir_or_event_log: str | os.PathLike[str],
    out_dir: str | os.PathLike[str] | None = None,
    *,
    compare: EventSource | None = None,
) -> ReportPaths:
    """Write timeline.png, utilisation.png and summary.json.

    ``out_dir``: the directory for the files; None: that of the event log. ``compare``: another run for the utilisation
    picture. Raises `NoEventLogError` if there is no event log, and `EventLogError` if the file is not one.
    """
    log = find_log(run_dir_or_event_log)
    events = read_events(log)
    out = log.parent if out_dir is None else Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    summary = out / "summary.json"
    summary.write_text(json.dumps(summarise(events).as_dict(), indent=2) + "\n")
    return ReportPaths(
        timeline_png(events, out / "timeline.png"),
        utilisation_png(events, out / "utilisation.png", compare),
        summary,
    )
