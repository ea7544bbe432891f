"""Why a trial never had more than one worker, as far as the event log shows it."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import Any

from fluidtune.report.causes import NO_REASON, words_of
from fluidtune.report.fold import Fold, Trial
from fluidtune.report.summary import duration, plural

#: Notes with which a resize of the trial begins, or ends without being done.
RESIZES = ("resize_started", "resize_failed", "trial_started", "trial_ended", "trial_suspended")


def never_grew(fold: Fold, trial: Trial) -> str | None:
    """The sentence that says why; None if it grew, or if its devices are what it asks for."""
    asked = [note.event["share"] for note in trial.noted("trial_added") if note.event.get("share")]
    if asked and asked[-1] > 1:
        return f"It was never resized: it asks for {plural(int(asked[-1]), 'device')} at once."
    if any(len(span.devices) > 1 for span in fold.spans_of(trial.trial)):
        return None
    return f"It never grew: {_why(fold, trial)}."


def _why(fold: Fold, trial: Trial) -> str:
    if not fold.spans_of(trial.trial):
        return "it has not been on a device"
    for note in reversed(trial.noted("growth_ended")):
        return f"several workers do not help it: {words_of(note.event) or NO_REASON}"
    if (fold.head.get("settings") or {}).get("max_workers") == 1:
        return "max_workers=1"
    if not trial.growable:
        return "no call of a torch module with parameters was seen in it"
    failed = [words for note in trial.noted("resize_failed") if (words := words_of(note.event))]
    if failed:
        return f"{plural(len(failed), 'growth')} failed, the last one because {failed[-1]}"
    begun = [note.event for note in trial.noted("resize_started")]
    if count := sum(len(event["devices_to"]) > len(event["devices_from"]) for event in begun):
        return f"{plural(count, 'growth')} began, and it left its devices before the growth was done"
    if fold.most_devices <= 1:
        return "the job never had a second device"
    if not trial.line_count:
        return "it has reported nothing, and a trial grows when its speed is known"
    beside_idle, unused = _seconds_beside_idle(fold, trial)
    if not beside_idle:
        return "no device was idle while it ran"
    if not unused:
        return f"other trials waited whenever a device was idle ({duration(beside_idle)} in all)"
    return (
        f"devices were idle for {duration(unused)} while it ran and no trial waited, but a trial grows only"
        " after a result, with two iterations or more to do, and where that is expected to end it sooner"
    )


def _seconds_beside_idle(fold: Fold, trial: Trial) -> tuple[float, float]:
    """Seconds in which it ran while a device was idle, and those of them in which no trial waited.

    Seconds in which a resize of it was under way do not count.
    """
    spans = fold.spans_of(trial.trial)
    # Seconds, what changes then, and to what. The order of equal times is that of the list.
    steps: list[tuple[float, str, Any]] = []
    for span in spans:
        steps += [(span.start, "held", True), (min(span.end, fold.now), "held", False)]
    for note in trial.notes:
        if note.name in RESIZES or note.resize:
            steps.append((note.at, "resizing", note.name == "resize_started"))
    begins = [at for at, _, _ in fold.load]
    first, last = max(0, bisect_right(begins, spans[0].start) - 1), bisect_right(begins, spans[-1].end)
    steps += ((at, "load", (idle, not waiting)) for at, idle, waiting in fold.load[first:last])
    now: dict[str, Any] = {"held": False, "resizing": False, "load": (False, False)}
    beside_idle = unused = 0.0
    for (at, what, value), (until, _, _) in pairwise(sorted(steps, key=lambda step: step[0])):
        now[what] = value
        idle, alone = now["load"]
        if now["held"] and not now["resizing"] and idle:
            beside_idle += until - at
            unused += (until - at) * alone
    return beside_idle, unused
