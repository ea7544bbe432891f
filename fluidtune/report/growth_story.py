"""Why a trial never had more than one worker, as far as the event log shows it."""

from __future__ import annotations

from itertools import pairwise

from fluidtune.report.causes import NO_REASON, words_of
from fluidtune.report.fold import Fold, Trial
from fluidtune.report.summary import duration, plural


def never_grew(fold: Fold, trial: Trial) -> str | None:
    """The sentence that says why; None if it grew, was on no device, or has the devices that it asks for."""
    asked = [note.event["share"] for note in trial.noted("trial_added") if note.event.get("share")]
    if asked and asked[-1] > 1:
        return f"It was never resized: it asks for {plural(int(asked[-1]), 'device')} at once."
    spans = fold.spans_of(trial.trial)
    if not spans or any(len(span.devices) > 1 for span in spans):
        return None
    return f"It never grew: {_why(fold, trial)}."


def _why(fold: Fold, trial: Trial) -> str:
    for note in reversed(trial.noted("growth_ended")):
        return words_of(note.event) or NO_REASON
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
    if beside_idle < 0.1:  # devices change hands
        return "no device was idle while it ran" + (", but for less than 0.1 s" if beside_idle else "")
    if not unused:
        return f"other trials waited whenever a device was idle ({duration(beside_idle)} in all)"
    return (
        f"devices were idle for {duration(unused)} while it ran and no trial waited, but a trial grows only"
        " after a result, with two iterations or more to do, and where that is expected to end it sooner"
    )


def _seconds_beside_idle(fold: Fold, trial: Trial) -> tuple[float, float]:
    """Seconds in which it ran while a device was idle, and those of them in which no trial waited."""
    spans, beside_idle, unused = fold.spans_of(trial.trial), 0.0, 0.0
    for (at, idle, waiting), (until, _, _) in pairwise([*fold.load, (fold.now, False, 0)]):
        if idle:
            held = sum(max(0.0, min(until, span.end) - max(at, span.start)) for span in spans)
            beside_idle, unused = beside_idle + held, unused + (0.0 if waiting else held)
    return beside_idle, unused
