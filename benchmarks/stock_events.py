"""A stock Ray Tune run as events, so that it can be drawn beside ours.

Stock Tune writes no event log. Its results say when each trial ran, but usually not on which device. This module
decides only how such results become the events that occupancy.py reads: a trial has its device to itself from its
start to its end. A trial whose device is unknown gets the free device with the lowest number.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fluidtune.report.drawing import OTHER, save_png, time_unit
from fluidtune.report.events import EventDict, EventLogError, Events
from fluidtune.report.fold import Run
from fluidtune.report.occupancy import busy_over_time, held_part, occupancy_of
from fluidtune.report.pictures import UTILISATION_ROW, WINDOWS, utilisation_figure

_EXPECTED = 'expected {"trial": id, "start": unix seconds, "end": unix seconds, "device": number or list}'


def events_from_tune_results(
    records: Iterable[Mapping[str, Any] | str | os.PathLike[str]] | str | os.PathLike[str],
    *,
    devices: int | Sequence[int] | None = None,
    run: str = "stock Ray Tune",
    kind: str = "",
) -> Events:
    """The events run_started, trial_started, trial_ended and run_ended of a run that has no event log.

    ``records``: mappings with "trial", "start", "end" and optionally "device" and "share", one per time that a trial
    ran. Times are unix seconds; "device" is a number or a list of numbers; "share" is 1 if not given. Instead of
    mappings, ``records`` may be one or several paths: a JSON file with a list of records, a JSON-lines file of
    records, the ``result.json`` that Ray Tune keeps for each trial, or a run's directory that contains such files.
    ``devices``: how many devices the cluster had, or their numbers, so that unused ones count as idle; None: only
    those that the records need.
    Raises `EventLogError` for a record that lacks a field or ends before it starts.
    """
    rows = _checked_rows(records)
    given = range(devices) if isinstance(devices, int) else devices
    placed = _place(rows, given)
    timed: list[tuple[float, int, EventDict]] = []
    for row, held in zip(rows, placed, strict=True):
        start, end = float(row["start"]), float(row["end"])
        share = float(row.get("share", 1.0))
        started = {"trial": str(row["trial"]), "devices": list(held), "share": share, "resumed": False}
        timed.append((start, 1, {"t": start, "event": "trial_started", **started}))
        ended = {"trial": str(row["trial"]), "ending": row.get("ending", "stopped")}
        timed.append((end, 0, {"t": end, "event": "trial_ended", **ended}))
    # At one instant the ends come before the starts, so that a device changes hands without an overlap.
    timed.sort(key=lambda item: item[:2])
    begin = timed[0][0] if timed else 0.0
    over = timed[-1][0] if timed else 0.0
    names = sorted({device for held in placed for device in held} | set(given or ()))
    tail = {"seconds": over - begin, "trials": len({row["trial"] for row in rows}), "best": None}
    return Events(
        [
            {"t": begin, "event": "run_started", **_run_fields(run, kind, names)},
            *(event for _, _, event in timed),
            {"t": over, "event": "run_ended", **tail},
        ]
    )


def _checked_rows(
    records: Iterable[Mapping[str, Any] | str | os.PathLike[str]] | str | os.PathLike[str],
) -> list[Mapping[str, Any]]:
    """All records that took time, by start. Raises `EventLogError` as `events_from_tune_results` does."""
    if isinstance(records, (str, os.PathLike)):
        records = [records]
    rows: list[Mapping[str, Any]] = []
    for record in records:
        rows += [record] if isinstance(record, Mapping) else _rows_of(Path(record))
    for row in rows:
        if not {"trial", "start", "end"} <= row.keys() or row["end"] < row["start"]:
            raise EventLogError(f"{dict(row)!r} is no record of a trial's time: {_EXPECTED}, end >= start")
    # A record that took no time held no device.
    return sorted((row for row in rows if row["end"] > row["start"]), key=lambda row: row["start"])


def _run_fields(run: str, kind: str, devices: Iterable[int]) -> dict[str, Any]:
    """The fields of run_started; what only a FluidTune driver knows is null or empty."""
    return {
        "run": run,
        "ray": None,
        "fluidtune": None,
        "python": None,
        "machine": "",
        "kind": kind,
        "devices": [{"device": device, "node": "local"} for device in devices],
        "settings": {},
        "algorithm": "",
        "metric": None,
        "mode": None,
    }


def _place(rows: Sequence[Mapping[str, Any]], devices: Sequence[int] | None) -> list[tuple[int, ...]]:
    """The devices of each row; ``rows`` are sorted by start."""
    #: device -> when the last trial that was placed on it ends.
    free_at: dict[int, float] = dict.fromkeys(devices or (), float("-inf"))
    placed = []
    for row in rows:
        device = row.get("device")
        if device is None:
            free = [name for name in sorted(free_at) if free_at[name] <= row["start"]]
            if free:
                device = free[0]
            elif devices:
                # Tune records when results came, not when actors ran, so records may overlap a little.
                device = min(free_at, key=lambda name: (free_at[name], name))
            else:
                device = len(free_at)
        held = (int(device),) if isinstance(device, (int, float)) else tuple(int(name) for name in device)
        for name in held:
            free_at[name] = max(free_at.get(name, float("-inf")), row["end"])
        placed.append(held)
    return placed


def _rows_of(path: Path) -> list[Mapping[str, Any]]:
    """The records in a file or directory, whichever of the formats it has."""
    if path.is_dir():
        return [row for file in sorted(path.rglob("result.json")) for row in _rows_of(file)]
    text = path.read_text()
    try:
        found = json.loads(text)
    except ValueError:
        try:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError:
            raise EventLogError(f"{path} is neither JSON nor JSON lines: {_EXPECTED}") from None
    rows = found if isinstance(found, list) else [found]
    if rows and all(isinstance(row, dict) and {"timestamp", "time_this_iter_s"} <= row.keys() for row in rows):
        # One trial's results in Tune's format. The first iteration began `time_this_iter_s` before its result.
        start = rows[0]["timestamp"] - rows[0]["time_this_iter_s"]
        trial = rows[0].get("trial_id", path.parent.name)
        return [{"trial": trial, "start": start, "end": rows[-1]["timestamp"]}]
    if not all(isinstance(row, dict) for row in rows):
        raise EventLogError(f"{path} holds no records of trials: {_EXPECTED}")
    return rows


def beside_png(ours: Run, stock: Run | None, out: str | os.PathLike[str]) -> Path:
    """Draw the use of devices over time, and as a line that of a run under stock Ray Tune, if there is one. Returns the
    PNG's path.

    Time is counted from each run's own start. Their devices are matched in ascending order. What ours lacks has no row.
    """
    figure = utilisation_figure(ours)
    if stock is None:
        return save_png(figure, out)
    uses = [occupancy_of(ours), occupancy_of(stock)]
    longest = max(use.end - use.start for use in uses)
    unit, unit_name = time_unit(uses[0].end - uses[0].start)
    seconds = uses[1].end - uses[1].start
    edges = np.linspace(0, seconds, WINDOWS + 1)
    busy = busy_over_time(uses[1], uses[1].start + edges)
    above, below = figure.axes
    label = f"stock Ray Tune: {held_part(uses[1]):.0%} held, {seconds / unit:.3g} {unit_name}"
    above.stairs(100 * busy.total, edges / unit, baseline=0, color=OTHER, linewidth=1.6, label=label, zorder=4)
    for row, values in zip(reversed(range(len(uses[0].available))), busy.devices.values(), strict=False):
        curve = row + UTILISATION_ROW * values
        below.stairs(curve, edges / unit, baseline=row, color=OTHER, linewidth=0.8, zorder=4)
    above.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, fontsize=9.5, frameon=False, borderaxespad=0.2)
    below.set_xlim(0, longest / unit)
    return save_png(figure, out)
