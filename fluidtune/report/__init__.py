"""The report of an experiment: its event log, and the figures and pictures derived from the log.

Decides which events exist (schema.py), how they are written (events.py), and what they mean: fold.py turns them into
tables of who held what, of iterations, and of all else. Everything else is a query on the tables: figures (summary.py),
pictures (pictures.py), one trial's story (story.py), the terminal's view of a run that goes on (top.py), and what the
twin is given (recorded.py). So the report works on a log alone, without Ray and torch.

Start with fold.py. fluidtune/tune decides when an event is written. This room has no influence on a run.
"""

from fluidtune.report.events import (
    EVENT_LOG_NAME,
    EventLog,
    EventLogError,
    read_events,
)
from fluidtune.report.occupancy import occupancy_of
from fluidtune.report.pictures import write_report
from fluidtune.report.run_logs import find_log
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
    "write_report",
]
