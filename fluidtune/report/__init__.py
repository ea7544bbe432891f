"""The report of an experiment: its event log, and the figures and pictures derived from the log.

Decides which events exist (events.py), which trial held which device when (occupancy.py), which figures describe a run
(summary.py, with distance.py for the bound) and what the pictures show (pictures.py, in the style of drawing.py).
write.py puts all of that into files. Everything follows from the events: the report works on a log alone, without Ray
and torch.

live.py and top.py follow a run that goes on. Start with events.py, then occupancy.py. This room does not decide when an
event is written (fluidtune/tune does) and has no influence on a run.
"""

from fluidtune.report.events import (
    EVENT_LOG_NAME,
    SCHEMA,
    EventLog,
    EventLogError,
    Events,
    NoEventLogError,
    find_log,
    read_events,
    this_machine,
)
from fluidtune.report.occupancy import (
    Interval,
    Occupancy,
    busy_over_time,
    held_part,
    occupancy_of,
    packing_levels,
)
from fluidtune.report.pictures import timeline_png, utilisation_png
from fluidtune.report.summary import Summary, render, summarise
from fluidtune.report.write import ReportPaths, write_report

__all__ = [
    "EVENT_LOG_NAME",
    "SCHEMA",
    "EventLog",
    "EventLogError",
    "Events",
    "Interval",
    "NoEventLogError",
    "Occupancy",
    "ReportPaths",
    "Summary",
    "busy_over_time",
    "find_log",
    "occupancy_of",
    "packing_levels",
    "read_events",
    "render",
    "summarise",
    "this_machine",
    "timeline_png",
    "held_part",
    "utilisation_png",
    "write_report",
]
