"""What the event log says of why something happened, for all who show it.

Decides which words are shown where, and which `resize_started` a `resized` belongs to. Which reasons there are is
decided in fluidtune/engine/reasons.py. Where a log has none, its reader says so.
"""

from __future__ import annotations

from fluidtune.report.events import EventDict

#: What is said where the log has no reason.
NO_REASON = "the log does not say why"
#: Events that come often, and after which each trial has the devices that it had before.
OFTEN = ("trial_result", "device_sample")


def words_of(event: EventDict | None) -> str | None:
    """The event's reason in words, its first line; None if it has none."""
    reason = str((event or {}).get("reason") or "").strip()
    return reason.splitlines()[0] if reason else None


def label_of(event: EventDict | None) -> str:
    """The name of the engine's reason in the event as people read it, "waiting trials"; empty if it has none."""
    why = (event or {}).get("why")
    return why.replace("_", " ") if isinstance(why, str) else ""


class Resizes:
    """Which `resize_started` each trial's resize under way began with."""

    def __init__(self) -> None:
        self._begun: dict[str, EventDict] = {}

    def step(self, event: EventDict) -> EventDict | None:
        """Take in the next event. Returns the event that says why a resize was done or failed, None if none does.

        For an event that neither begins nor ends a resize it returns None.
        """
        name = event["event"]
        if name == "run_started":
            self._begun.clear()
        elif name == "resize_started":
            self._begun[event["trial"]] = event
        elif name in ("resized", "resize_failed", "trial_started", "trial_ended", "trial_suspended"):
            begun = self._begun.pop(event["trial"], None)
            if name == "resized" and event.get("reason"):
                return event
            if name in ("resized", "resize_failed"):
                return begun
        return None

    def under_way(self, trial: str) -> EventDict | None:
        """The `resize_started` of the trial's resize that has not ended; None without one."""
        return self._begun.get(trial)
