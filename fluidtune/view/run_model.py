"""A run as the page shows it: all that has changed since any earlier event, from the fold of its log.

Pure. What happens to devices and trials is decided in fluidtune/report (fold.py). Here it is decided what
the page gets, in which form, and that it gets nothing twice. Times are seconds since the run's first event;
docs/view.md has the form.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Any

from fluidtune.report.causes import wait_of, why_of, words_of
from fluidtune.report.drawing import COLOURS
from fluidtune.report.fold import Fold, Trial
from fluidtune.report.marks import mark_of
from fluidtune.report.news import ended_since, line_of, news_of, states_of
from fluidtune.report.occupancy import held_part, occupancy_of
from fluidtune.report.summary import best_of

#: Seconds over which iterations are counted, as by `fluidtune top`.
RECENT_S = 60.0
#: A curve has at most this many points: a wide screen has about twice as many pixels in a row.
CURVE_POINTS = 1000
#: So many of the latest news are sent.
NEWS_SENT = 50
#: What is sent of `run_started`.
HEAD = ("run", "algorithm", "kind", "metric", "mode", "machine", "fluidtune", "ray", "python", "settings", "no_keep")
#: The columns of the table's rows.
ROW = (
    *("number", "name", "id", "group", "kind", "parameters", "state", "since", "iteration", "target"),
    *("metric", "record", "seconds", "why", "waits", "iterations", "added", "colour"),
)


def _seconds(fold: Fold, at: float) -> float:
    return round(at - fold.origin, 3)


def changes(fold: Fold, since: int = 0) -> dict[str, Any]:
    """What has changed after the first ``since`` events; 0: all there is."""
    found: dict[str, Any] = {
        "whole": since == 0,
        "origin": fold.origin,
        "now": _seconds(fold, fold.now),
        "over": fold.over,
        "best": best_of(fold),
        "rate": ended_since(fold, fold.now - RECENT_S),
        "unknown": fold.unknown,
        "trials": _rows(fold, since),
    }
    if since == 0:
        found["columns"] = ROW
    new = fold.since(since)
    if any(note.name == "run_started" for note in new):
        found["head"] = {name: fold.head.get(name) for name in HEAD}
    if new:
        found |= _devices(fold)
    if fold.sampled > since:
        found["samples"] = [[device, *samples[-1][1:]] for device, samples in sorted(fold.samples.items())]
    if any(map(line_of, new)) and (news := news_of(fold, NEWS_SENT)):
        found["news"] = [[_seconds(fold, at), line] for at, line in news]
    marks = [(note, mark) for note in new if (mark := mark_of(note))]
    if marks:
        found["marks"] = [(_seconds(fold, note.at), device, kind, why) for note, (kind, device, why) in marks]
    spans = fold.spans[bisect_right(fold.spans, since, key=lambda span: span.last) :]
    pairs = [(span, device) for span in spans if span.end > span.start for device in span.devices]
    if pairs:
        found["intervals"] = [
            [fold.trials[span.trial].place for span, _ in pairs],
            [device for _, device in pairs],
            [round(span.share, 4) for span, _ in pairs],
            [_seconds(fold, span.start) for span, _ in pairs],
            [_seconds(fold, span.end) for span, _ in pairs],
        ]
    return found


def _devices(fold: Fold) -> dict[str, Any]:
    there = {device: _seconds(fold, since) for device, since in fold.there.items()}
    begins = [start for start, _ in fold.drivers] + [fold.driver_since]
    return {
        # Of each device that the run ever had: its machine, since when it is there, and when it was there before.
        "devices": [
            [device, fold.nodes.get(device, ""), there.get(device), [[_seconds(fold, at) for at in s] for s in spans]]
            for device, spans in sorted(fold.available.items())
        ],
        "held": [
            [fold.trials[trial].place, span.devices, round(span.share, 4), _seconds(fold, span.start)]
            for trial, span in fold.held.items()
        ],
        "drivers": [_seconds(fold, begin) for begin in begins[1:] if begin is not None],
    }


def _rows(fold: Fold, since: int) -> list[list[Any]]:
    found: list[list[Any]] = []
    for name in reversed(fold.recent):
        trial = fold.trials[name]
        if trial.stamp <= since:
            break
        found.append(_row(fold, trial))
    return found


def _row(fold: Fold, trial: Trial) -> list[Any]:
    return [
        *(trial.place, trial.name, trial.trial, trial.group, trial.sort, trial.parameters, trial.state),
        *(_seconds(fold, trial.since), trial.iteration, trial.target, trial.metric, trial.best, trial.seconds),
        *(why_of(trial), _waits(fold, trial), trial.iterations, _seconds(fold, trial.added)),
        COLOURS[trial.colour],
    ]


def _waits(fold: Fold, trial: Trial) -> str:
    """Why the trial waits; "" if it does not."""
    if trial.state != "waiting":
        return ""
    if trial.stamp <= fold.began:
        return "its driver ended, and another one goes on"
    return words_of(wait_of(trial)) or ""


def curve(fold: Fold, trial: str) -> dict[str, list[Any]]:
    """The trial's results as columns, at most `CURVE_POINTS` of them, and its width whenever that changed.

    Raises KeyError if there is no such trial.
    """
    its = fold.trials[trial]
    count = its.line_count
    every = -(-count // CURVE_POINTS) or 1
    # The last result is always among them.
    lines = [its.line(place) for place in range((count - 1) % every if count else 0, count, every)]
    return {
        "seconds": [_seconds(fold, line.at) for line in lines],
        "iterations": [line.iteration for line in lines],
        "metric": [None if math.isnan(line.metric) else line.metric for line in lines],
        "widths": _widths(fold, trial),
    }


def _widths(fold: Fold, trial: str) -> list[list[float]]:
    """When the trial's width became what it is from then on: seconds, and the width in devices."""
    steps: list[list[float]] = []
    until = -math.inf
    for span in fold.spans_of(trial):
        if span.end <= span.start:
            continue
        if steps and span.start > until:
            steps.append([_seconds(fold, until), 0.0])
        if not steps or steps[-1][1] != round(span.width, 4):
            steps.append([_seconds(fold, span.start), round(span.width, 4)])
        until = span.end
    return steps if until == math.inf or not steps else [*steps, [_seconds(fold, until), 0.0]]


def glance(fold: Fold) -> dict[str, Any]:
    """The run in a few figures, to stand beside other runs."""
    every = -(-len(fold.records) // CURVE_POINTS) or 1
    records = [*fold.records[::every], *fold.records[-1:]]
    return {
        **{name: fold.head.get(name) for name in ("run", "algorithm", "kind", "metric", "mode")},
        "origin": fold.origin,
        "seconds": _seconds(fold, fold.now),
        "over": fold.over,
        "trials": len(fold.trials),
        "states": dict(states_of(fold)),
        "iterations": sum(trial.iterations for trial in fold.trials.values()),
        "devices": len(fold.available),
        "use": held_part(occupancy_of(fold)),
        "best": best_of(fold),
        "records": [[_seconds(fold, at), value] for at, value in records],
    }
