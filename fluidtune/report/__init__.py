"""What an experiment did: its event log, and the pictures and figures made from it.

This room decides what is recorded, in which words, and what is derived from it. It decides nothing about the
run itself, and works without Ray and torch, on a log alone.
"""

from fluidtune.report.events import (
    EVENT_LOG_NAME,
    SCHEMA,
    EventLog,
    EventLogError,
    Events,
    read_events,
)
from fluidtune.report.gain import EstimatedGain
from fluidtune.report.occupancy import (
    Interval,
    Occupancy,
    busy_over_time,
    device_utilisation,
    occupancy_of,
    packing_levels,
    utilisation,
)
from fluidtune.report.pictures import timeline_png, utilisation_png
from fluidtune.report.stock import events_from_tune_results
from fluidtune.report.summary import Summary, render, summarise
from fluidtune.report.write import ReportPaths, write_report

__all__ = [
    "EVENT_LOG_NAME",
    "SCHEMA",
    "EstimatedGain",
    "EventLog",
    "EventLogError",
    "Events",
    "Interval",
    "Occupancy",
    "ReportPaths",
    "Summary",
    "busy_over_time",
    "device_utilisation",
    "events_from_tune_results",
    "occupancy_of",
    "packing_levels",
    "read_events",
    "render",
    "summarise",
    "timeline_png",
    "utilisation",
    "utilisation_png",
    "write_report",
]
