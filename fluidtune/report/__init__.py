"""The report of an experiment: its event log, and the figures and pictures derived from the log.

Decides which events exist (events.py), what readers rely on of each (readable.py), which trial held which device when
(occupancy.py), which figures describe a run (summary.py, with distance.py for the bound), what the pictures show and
where the files are (pictures.py, in the style of drawing.py). Everything follows from the events: the report works on a
log alone, without Ray and torch.

live.py and top.py follow a run that goes on; story.py tells of one trial. Start with events.py, then occupancy.py.
fluidtune/tune decides when an event is written. This room has no influence on a run.
"""

from fluidtune.report.events import (
    EVENT_LOG_NAME,
    EventLog,
    EventLogError,
    find_log,
    read_events,
    this_machine,
)
from fluidtune.report.occupancy import occupancy_of
from fluidtune.report.pictures import utilisation_png, write_report
from fluidtune.report.summary import render, summarise

__all__ = [
    "EVENT_LOG_NAME",
    "EventLog",
    "EventLogError",
    "find_log",
    "occupancy_of",
    "read_events",
    "render",
    "summarise",
    "this_machine",
    "utilisation_png",
    "write_report",
]
