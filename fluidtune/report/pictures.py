"""The report of a run as files: its trials over its devices in time, how much of the devices was held, and the summary.

Decides what a picture shows and where. fold.py decides what an event means for a device, and drawing.py how any
picture looks.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fluidtune.device_kinds import KINDS
from fluidtune.report.drawing import (
    COLOURS,
    GRID,
    INK,
    OURS,
    PALETTE,
    as_written,
    new_figure,
    polish_axes,
    save_png,
    time_unit,
)
from fluidtune.report.events import EventDict
from fluidtune.report.fold import Fold, Run, Span, fold_of
from fluidtune.report.marks import MARKS, TimeAxis, draw_marks
from fluidtune.report.occupancy import (
    Occupancy,
    available_seconds,
    busy_over_time,
    held_part,
    occupancy_of,
)
from fluidtune.report.summary import Summary, plural
from fluidtune.report.terminal_text import printable
from fluidtune.report.time_use import starting, time_use
from fluidtune.report.trial_lookup import short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: How much lighter than a trial that iterates one that starts is.
LIGHTER = 0.6
#: A device that no trial holds.
IDLE = "#ECEFF1"
#: With more trials than this the legend does not list them: twelve entries fill two rows.
LEGEND_TRIALS = 12
#: With more bars than this no bar gets a label: labels would not fit, and trying takes time.
LABELLED_SPANS = 600
#: Characters in a line of the legend, and those that an entry needs beside its label. 12 inches of 8.5
#: points, at 0.55 of its size a character, are 184.
LEGEND_WIDTH, LEGEND_HANDLE = 165, 8
#: The legend has this many reasons of growing, and of shrinking, so that an entry stays on one line.
LEGEND_REASONS = 3
#: A row of the timeline is `ROW` of its height tall and begins `MARGIN` below its top, so that rows stay apart.
ROW, MARGIN = 0.88, 0.06
#: Most windows of the utilisation picture: an hour gets the 30 s of the dissertation's figure 3.2.
WINDOWS = 150
#: A row of the lower utilisation picture is this part of its height tall at 100 %.
UTILISATION_ROW = 0.86


def _device_ticks(axes: Axes, devices: Sequence[int], at: Callable[[int], float]) -> None:
    """Name the rows, the n-th at the y value ``at(n)``. Where rows are low, every second, fourth, ... gets a name."""
    every = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 1 << 20) if len(devices) <= 40 * step)
    axes.set_yticks([at(row) for row in range(0, len(devices), every)], [str(device) for device in devices[::every]])
    axes.set_ylabel("device", color=INK)


def _row_height(devices: int) -> float:
    """Height of a device's row in inches: one row must not look like a ribbon, and 64 rows must fit a screen."""
    return float(np.clip(9.0 / max(devices, 1), 0.13, 0.6))


def _title(head: EventDict, use: Occupancy) -> str:
    trials = len({span.trial for span in use.spans})
    kind = KINDS.get(str(head.get("kind")))
    noun = "device" if kind is None else kind.noun
    run = printable(str(head.get("run") or "run"))
    return f"{run}, {plural(trials, 'trial')} on {plural(len(use.available), noun)}"


def _slots(spans: Sequence[Span]) -> list[float]:
    """Where each span of one device begins in the device's row: 0 is the row's top edge, 1 its bottom edge.

    A trial keeps its place when it is resized. Otherwise it gets the free place with the smallest value.
    """
    placed: list[float] = []
    open_now: list[tuple[float, float, float, str]] = []  # end, bottom, top, trial
    last: dict[str, float] = {}
    for span in spans:
        # A span that ends at the moment when this one starts no longer takes up room.
        open_now = [slot for slot in open_now if slot[0] > span.start]
        bottoms = [last[span.trial]] if span.trial in last else []
        bottoms += sorted({0.0, *(top for _, _, top, _ in open_now)})
        for bottom in bottoms:
            top = bottom + span.share
            free = all(top <= low + 1e-9 or bottom >= high - 1e-9 for _, low, high, _ in open_now)
            if free and top <= 1 + 1e-9:
                break
        else:
            # The free room is in pieces that are too small, for example 1/2 between two separate thirds. Draw over
            # a neighbour rather than outside the row.
            bottom = max(0.0, 1 - span.share)
        last[span.trial] = bottom
        open_now.append((span.end, bottom, bottom + span.share, span.trial))
        placed.append(bottom)
    return placed


def timeline_figure(run: Run) -> Figure:
    """The timeline: one row per device, and in it one bar per trial that holds it, as tall as the trial's share.

    A trial has one colour, which is lighter while it starts. Colours repeat when there are more than `COLOURS`. A
    device is grey while it is idle and white while the job does not have it.
    """
    fold = fold_of(run)
    use = occupancy_of(fold)
    devices = list(use.available)
    rows = {device: row for row, device in enumerate(devices)}
    unit, unit_name = time_unit(use.end - use.start)
    figure = new_figure(12, 1.5 + _row_height(len(devices)) * max(len(devices), 1))
    axes = figure.add_subplot()
    polish_axes(axes)

    def at(seconds: float) -> float:
        return (seconds - use.start) / unit

    for device, spans in use.available.items():
        axes.broken_barh(
            [(at(start), (end - start) / unit) for start, end in spans],
            (rows[device] + MARGIN, ROW),
            facecolor=IDLE,
            linewidth=0,
            zorder=1,
        )
    colours = {span.trial: COLOURS[fold.trials[span.trial].colour] for span in use.spans}
    boxes = _boxes(use, rows)
    # White seams separate neighbours of one colour. They must stay thinner than bars that are a pixel wide.
    seam = 0.8 if len(boxes) <= 300 else 0.25 if len(boxes) <= 3000 else 0.0
    faces = [colours[span.trial] for span, _, _ in boxes]
    _draw_boxes(axes, boxes, at, "trials", facecolors=faces, edgecolors="white", linewidths=seam, zorder=2)
    begun = {(span.trial, span.start): span for span in _begun(fold)}
    veils = [(begun[key], low, high) for i, low, high in boxes if (key := (i.trial, i.start)) in begun]
    _draw_boxes(axes, veils, at, "starts", facecolors="white", alpha=LIGHTER, linewidths=0, zorder=2.5)
    reasons = draw_marks(axes, fold, use, rows, at)
    for start, _ in use.drivers[1:]:
        axes.axvline(at(start), color=INK, linestyle=(0, (4, 3)), linewidth=1, zorder=4)
    axes.set_xlim(0, max(at(use.end), 1e-9))
    axes.set_ylim(max(len(devices), 1), 0)
    _device_ticks(axes, devices, lambda row: row + 0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"time since start ({unit_name})", color=INK)
    axes.set_title(f"{_title(fold.head, use)}, {_use_in_words(fold, use)}", loc="left", fontsize=12, color=INK, pad=10)
    names = short_names(list(colours))
    _draw_labels(figure, axes, boxes, names, colours, at)
    _draw_legend(figure, names, colours, axes, len(use.drivers) > 1, reasons)
    return figure


#: A span, and the two y values between which it is drawn.
_Box = tuple[Span, float, float]


def _boxes(use: Occupancy, rows: Mapping[int, int]) -> list[_Box]:
    boxes: list[_Box] = []
    for device, spans in use.by_device().items():
        for span, bottom in zip(spans, _slots(spans), strict=True):
            low = rows[device] + MARGIN + ROW * bottom
            boxes.append((span, low, low + ROW * span.share))
    return boxes


def _begun(fold: Fold) -> list[Span]:
    """The spans' parts in which trials start; none in a log without iterations, which does not say."""
    return starting(fold) if fold.counts["trial_result"] else []


def _use_in_words(fold: Fold, use: Occupancy) -> str:
    """How much of the devices was of use, as the summary has it."""
    if not fold.counts["trial_result"]:
        return f"{held_part(use):.0%} held"
    spent, available = time_use(fold, use), available_seconds(use) or 1.0
    return f"{spent.iterating / available:.0%} in iterations, {spent.starting / available:.0%} in starts"


def _draw_boxes(axes: Axes, boxes: Sequence[_Box], at: TimeAxis, gid: str, **style: Any) -> None:
    # One collection for all bars: 10,000 separate rectangles would take minutes.
    from matplotlib.collections import PolyCollection

    corners = [[(at(i.start), low), (at(i.end), low), (at(i.end), high), (at(i.start), high)] for i, low, high in boxes]
    axes.add_collection(PolyCollection(corners, gid=gid, **style), autolim=False)


def _readable_on(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "white"


def _draw_labels(
    figure: Figure,
    axes: Axes,
    boxes: Sequence[_Box],
    names: Mapping[str, str],
    colours: Mapping[str, str],
    at: TimeAxis,
) -> None:
    """Write a trial's short name into each of its bars that is large enough."""
    if len(boxes) > LABELLED_SPANS or not boxes:
        return
    as_written(figure)
    figure.draw_without_rendering()  # computes the layout, from which we get the size of a bar in points
    to_points = 72 / figure.dpi
    for span, low, high in boxes:
        colour = colours[span.trial]
        (left, top), (right, bottom) = axes.transData.transform([(at(span.start), low), (at(span.end), high)])
        wide, tall = (right - left) * to_points, abs(bottom - top) * to_points
        size = min(8.5, tall * 0.72)
        # A digit is about 0.6 em wide. 14 points are left free for a triangle at the bar's start.
        if size >= 5 and len(names[span.trial]) * 0.62 * size + 14 <= wide:
            axes.text(
                at((span.start + span.end) / 2),
                (low + high) / 2,
                names[span.trial],
                ha="center",
                va="center_baseline",
                fontsize=size,
                color=_readable_on(colour),
                zorder=5,
                clip_on=True,
            )


def _columns(labels: Sequence[str]) -> int:
    """In how many columns the legend fits the picture's width, if it is read line by line; 7 at most."""
    for columns in range(min(len(labels), 7), 1, -1):
        widths = [max(map(len, labels[column::columns])) + LEGEND_HANDLE for column in range(columns)]
        if sum(widths) <= LEGEND_WIDTH:
            return columns
    return 1


def _draw_legend(
    figure: Figure,
    names: Mapping[str, str],
    colours: Mapping[str, str],
    axes: Axes,
    restored: bool,
    reasons: Mapping[str, Counter[str]],
) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[Any] = []
    drawn = {collection.get_gid() for collection in axes.collections if len(collection.get_paths())}
    if len(colours) <= LEGEND_TRIALS:
        entries += [Patch(color=colour, label=f"trial {names[trial]}"[:28]) for trial, colour in colours.items()]
    else:
        entries.append(Patch(color=PALETTE[0], label="a trial"))
    if "starts" in drawn:
        entries.append(Patch(color=PALETTE[0], alpha=1 - LIGHTER, label="it starts"))
    entries.append(Patch(color=IDLE, label="idle"))
    for name, mark in MARKS.items():
        if name in drawn:
            found = reasons.get(name, Counter()).most_common(LEGEND_REASONS)
            why = ", ".join(f"{count} x {reason}" for reason, count in found)
            style = {"linestyle": "", "marker": mark.marker, "markersize": 7}
            colours_of = {"markerfacecolor": mark.face, "markeredgecolor": mark.edge}
            entries.append(Line2D([], [], label=mark.label + (f" ({why})" if why else ""), **style, **colours_of))
    if restored:
        entries.append(Line2D([], [], color=INK, linestyle=(0, (4, 3)), linewidth=1, label="driver restored"))
    # Matplotlib fills the legend column by column, and people read it line by line: transpose the order.
    columns = _columns([entry.get_label() for entry in entries])
    entries = [entry for column in range(columns) for entry in entries[column::columns]]
    figure.legend(handles=entries, loc="outside lower left", ncols=columns, fontsize=8.5, frameon=False)


def _window(seconds: float) -> float:
    """The length of an averaging window: a round number of seconds that gives at most `WINDOWS` windows."""
    for window in (0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600):
        if seconds <= WINDOWS * window:
            return float(window)
    return float(np.ceil(seconds / WINDOWS / 3600) * 3600)


def utilisation_figure(run: Run) -> Figure:
    """The held part of all devices (above) and of each device (below) over time, as in figures 3.2 and 3.6.

    While trials start, their part is lighter.
    """
    fold = fold_of(run)
    use = occupancy_of(fold)
    length = use.end - use.start
    window = _window(length)
    unit, unit_name = time_unit(length)
    rows = max(1, len(use.available))
    low = _row_height(rows) * rows
    figure = new_figure(12, 4.2 + low)
    above, below = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [2.6, max(low, 0.6)]})
    if length > 0:
        inside = np.arange(1, np.ceil(length / window - 1e-9)) * window
        edges = use.start + np.concatenate([[0.0], inside, [length]])
        busy, starts = (busy_over_time(of, edges) for of in (use, replace(use, spans=_begun(fold))))
        x = (edges - use.start) / unit
        text = f"FluidTune: {_use_in_words(fold, use)}, {length / unit:.3g} {unit_name}"
        _draw_use(above, x, 100 * busy.total, 100 * starts.total, 0.0, text)
        for row, device in enumerate(busy.devices):
            held, begun = (UTILISATION_ROW * found.devices[device] for found in (busy, starts))
            _draw_use(below, x, held, begun, rows - 1 - row, None)
        above.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, fontsize=9.5, frameon=False, borderaxespad=0.2)
    _draw_samples(below, fold, use, unit)
    above.set_ylim(0, 104)
    above.set_yticks([0, 25, 50, 75, 100])
    above.set_ylabel("all devices, held (%)", color=INK)
    above.grid(axis="y", color=GRID, linewidth=0.6)
    title = f"{_title(fold.head, use)}: devices held by trials"
    above.set_title(title, loc="left", fontsize=12, color=INK, pad=28)
    polish_axes(above)
    # Device 0 is on top, as in the timeline. Row r is drawn between y = r and y = r + UTILISATION_ROW.
    _device_ticks(below, list(use.available), lambda row: rows - 1 - row + UTILISATION_ROW / 2)
    below.set_ylim(-0.05, rows)
    below.set_xlim(0, max(length / unit, 1e-9))
    below.set_xlabel(f"time since start ({unit_name}), averaged over {window:g} s", color=INK)
    below.set_title("each device, a row is 0 to 100 %", loc="left", fontsize=10, color=INK)
    for row in range(rows):
        below.axhline(row, color=GRID, linewidth=0.6, zorder=0)
    polish_axes(below)
    below.tick_params(axis="y", length=0)
    return figure


def _draw_samples(axes: Axes, fold: Fold, use: Occupancy, unit: float) -> None:
    """Draw what NVML measured on each of our devices over the curve of what trials held."""
    rows = {device: len(use.available) - 1 - row for row, device in enumerate(use.available)}
    for what, style in (("computing", "-"), ("memory in use", ":")):
        label: str | None = f"{what}, by NVML"
        for device in rows.keys() & fold.samples:
            points = [
                ((at - use.start) / unit, rows[device] + UTILISATION_ROW * part)
                for at, computing, used, total in fold.samples[device]
                if (part := computing if style == "-" else used / total) is not None
            ]
            if points:
                axes.plot(*zip(*points, strict=True), color=INK, linewidth=0.9, linestyle=style, label=label, zorder=5)
                label = None
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1.0), fontsize=8.5, frameon=False, borderaxespad=0.2)


def _draw_use(
    axes: Axes, edges: np.ndarray, values: np.ndarray, starts: np.ndarray, base: float, label: str | None
) -> None:
    """One step curve above ``base``: ``values`` (NaN while the device is not there) in the windows between ``edges``.

    The area below it is lighter where trials start, in ``starts`` of the device.
    """
    of_use = np.maximum(values - starts, 0.0)
    for top, alpha in ((values, 0.15), (of_use, 0.45)):
        axes.stairs(base + top, edges, baseline=base, fill=True, color=OURS, alpha=alpha, linewidth=0, zorder=2)
    axes.stairs(base + values, edges, baseline=base, color=OURS, linewidth=1.6 if label else 0.8, label=label, zorder=3)


#: Every picture of a run: the name of its file, and what draws it.
PICTURES: dict[str, Callable[[Run], Figure]] = {"timeline.png": timeline_figure, "utilisation.png": utilisation_figure}
#: The names of the report's files.
REPORT_FILES = ("summary.json", *PICTURES)


def write_report(fold: Fold, summary: Summary, out: Path) -> list[Path]:
    """Write the run's `REPORT_FILES` into the directory ``out``. Returns the paths of the pictures."""
    (out / REPORT_FILES[0]).write_text(json.dumps(summary.as_dict(), indent=2) + "\n")
    return [save_png(draw(fold), out / name) for name, draw in PICTURES.items()]
