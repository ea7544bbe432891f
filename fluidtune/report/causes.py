"""What the event log says of why something happened, for all who show it.

Decides which words are shown where. Which reasons there are, and their remedies, is decided in
fluidtune/engine/reasons.py. Where a log has none, its reader says so.
"""

from __future__ import annotations

from fluidtune.engine import Reason
from fluidtune.report.events import EventDict
from fluidtune.report.fold import Trial

#: What is said where the log has no reason.
NO_REASON = "the log does not say why"


def words_of(event: EventDict | None) -> str | None:
    """The event's reason in words, its first line; None if it has none."""
    reason = str((event or {}).get("reason") or "").strip()
    return reason.splitlines()[0] if reason else None


def label_of(event: EventDict | None) -> str:
    """The name of the engine's reason in the event as people read it, "waiting trials"; empty if it has none."""
    why = (event or {}).get("why")
    return why.replace("_", " ") if isinstance(why, str) else ""


def why_of(trial: Trial) -> str:
    """Why it waits, is paused or was refused, or why its devices changed last or change: the reason's label; or ""."""
    for note in reversed(trial.notes):
        if note.name == "resize_failed":
            return "resize failed"
        if note.resize or note.name in ("trial_started", "resize_started", "suspend_asked") or remedy_of(note.event):
            return label_of(note.cause or note.event)
    return ""


def remedy_of(event: EventDict) -> str:
    """What can be done about a wait or a refusal; "" if the event is neither, or of another version."""
    reason = Reason.__members__.get(str(event.get("why")).upper())
    return reason.remedy if reason else ""


def wait_of(trial: Trial) -> EventDict | None:
    """The event that says why it waits, is paused, or was refused; None if it does none of that."""
    turns = trial.noted("trial_waits", "trial_started", "trial_ended")
    return turns[-1].event if turns and remedy_of(turns[-1].event) else None
