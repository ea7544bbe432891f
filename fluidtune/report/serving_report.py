"""The report of a service: what became of its requests, from its log, and pictures of load and of batches.

Decides what the table and the pictures show. `serving_events` has the events.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fluidtune.report.drawing import INK, PALETTE, new_figure, polish_axes, save_png, time_unit
from fluidtune.report.events import EventDict
from fluidtune.report.marks import LOSS
from fluidtune.report.terminal_text import cell, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

#: What the upper panel of the picture shows, from below: its colour, and the beginning of the outcomes. A request that
#: failed or was bad says nothing about the service.
SHOWN = {"answered": PALETTE[0], "late": PALETTE[1], "refused": LOSS}
#: What an event of a lease adds to the devices that are there.
CHANGES = {"device_gained": 1, "device_returned": -1, "device_lost": -1}
#: With more batches than this, none has the number of its requests written on it: they would not be readable.
NUMBERED = 150
#: The table of requests, one row for each trial.
COLUMNS = (
    "trial",
    "requests/s in time",
    "answered",
    "late",
    "refused",
    "failed, bad",
    "mean batch",
    "mean wait (ms)",
)
#: Most bars of the picture of load. A day has 8,640 spans, and to draw these takes a minute.
BARS = 300


class Batch(NamedTuple):
    """A batch on a device: when it began and how long it took, s, on a clock whose 0 is the picture's left edge."""

    device: int
    trial: str
    size: int
    begin: float
    seconds: float


@dataclass
class ServingSummary:
    """What became of the requests of a service, over all of its fronts.

    requests: by trial, then by outcome. batches: by trial, then by size. seconds: for which the log has counts.
    waited: seconds of waiting by trial, added up. lost: model processes that died. starts: fronts.
    """

    requests: dict[str, Counter[str]] = field(default_factory=dict)
    batches: dict[str, Counter[int]] = field(default_factory=dict)
    waited: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    busy: float = 0.0
    device_seconds: float = 0.0
    lost: int = 0
    starts: int = 0


def is_serving(events: Iterable[EventDict]) -> bool:
    """Whether this is the log of a service."""
    return any(event["event"] == "serving_started" for event in events)


def summarise_serving(events: Iterable[EventDict], before: ServingSummary | None = None) -> ServingSummary:
    """Add up the log of a service. ``before``: the sum of its earlier events, which is continued."""
    found = before or ServingSummary()
    for event in events:
        if event["event"] == "serving_started":
            found.starts += 1
        elif event["event"] == "worker_lost":
            found.lost += 1
        elif event["event"] == "served":
            found.seconds += event["seconds"]
            found.busy += event["busy"]
            found.device_seconds += event["seconds"] * event["devices"]
            for trial, counts in event["requests"].items():
                found.requests.setdefault(trial, Counter()).update(counts)
            for trial, counts in event["batches"].items():
                sizes = {int(size): count for size, count in counts.items()}
                found.batches.setdefault(trial, Counter()).update(sizes)
            found.waited.update(event["waited"])
    return found


def render_serving(found: ServingSummary) -> RenderableType:
    """The summary as a table for `rich`, one row for each trial."""
    from rich.table import Table

    table = Table(title=title_of_serving(found), title_justify="left")
    table.add_column(COLUMNS[0], overflow="fold")  # the ends of ids differ
    for name in COLUMNS[1:]:
        table.add_column(name, justify="right")
    for row in rows_of_serving(found):
        table.add_row(*map(cell, row))
    return table


def title_of_serving(found: ServingSummary) -> str:
    """The summary in one line."""
    use = found.busy / found.device_seconds if found.device_seconds else 0.0
    return f"{found.seconds:.0f} s with requests, devices busy {use:.0%}, {found.lost} model processes lost"


def rows_of_serving(found: ServingSummary) -> Iterator[tuple[str, ...]]:
    """What became of each trial's requests, as `COLUMNS` names it."""
    for trial, counts in found.requests.items():
        refused = sum(count for what, count in counts.items() if what.startswith("refused"))
        sizes = found.batches.get(trial, Counter())
        answered = sum(size * count for size, count in sizes.items())
        yield (
            trial,
            f"{counts['answered'] / found.seconds:.1f}" if found.seconds else "-",
            str(counts["answered"]),
            str(counts["late"]),
            str(refused),
            str(counts["failed"] + counts["bad"]),
            f"{answered / sizes.total():.1f}" if sizes else "-",
            f"{1e3 * found.waited[trial] / answered:.1f}" if answered else "-",
        )


def serving_png(events: Sequence[EventDict], out: str | os.PathLike[str]) -> Path:
    """Draw requests per second by outcome, and devices busy, there and wanted, over time. Returns the PNG's path."""
    spans = _joined([event for event in events if event["event"] == "served"])
    first = min((event["t"] - event["seconds"] for event in spans), default=events[0]["t"])
    unit, name = time_unit(max((event["t"] - first for event in spans), default=1.0))
    figure = new_figure(12.0, 5.0)
    upper, lower = figure.subplots(2, 1, sharex=True)
    labelled: set[str] = set()
    for event in spans:
        place, width, bottom = (event["t"] - event["seconds"] - first) / unit, event["seconds"] / unit, 0.0
        for what, colour in SHOWN.items():
            height = _count(event, what) / event["seconds"]
            label = None if what in labelled or not height else what
            upper.bar(place, height, width, bottom=bottom, align="edge", color=colour, label=label)
            labelled |= {what} if height else set()
            bottom += height
        lower.bar(place, event["busy"] / event["seconds"], width, align="edge", color=PALETTE[0])
    _draw_devices(lower, events, first, unit)
    if labelled:
        upper.legend(frameon=False, ncols=3)
    upper.set_ylabel("requests/s", color=INK)
    lower.set_ylabel("devices", color=INK)
    lower.set_xlabel(f"time ({name})", color=INK)
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
        polish_axes(axes)
    return save_png(figure, out)


def _draw_devices(axes: Any, events: Sequence[EventDict], first: float, unit: float) -> None:
    """Steps of the devices that are there, and of those that are wanted."""
    there: list[tuple[float, float]] = []
    wanted: list[tuple[float, float]] = []
    for event in events:
        at = max(0.0, event["t"] - first) / unit
        if event["event"] == "serving_started" and "devices" in event:
            there.append((at, event["devices"]))
            wanted.append((at, max(1, event["devices"])))
        elif event["event"] in CHANGES and there:
            there.append((at, there[-1][1] + CHANGES[event["event"]]))
        elif event["event"] == "devices_wanted":
            wanted.append((at, event["wanted"]))
    end = max(0.0, events[-1]["t"] - first) / unit
    for steps, colour, label in ((there, INK, "there"), (wanted, PALETTE[1], "wanted")):
        if steps:
            times, counts = zip(*steps, (end, steps[-1][1]), strict=True)
            axes.step(times, counts, where="post", color=colour, label=label)
    axes.legend(frameon=False, ncols=2)


def _joined(spans: Sequence[EventDict]) -> list[EventDict]:
    """The spans as `BARS` at most: neighbours are added up, with the time between them."""
    each, found = -(-len(spans) // BARS) or 1, []
    for begin in range(0, len(spans), each):
        some = spans[begin : begin + each]
        total, seconds = summarise_serving(some), some[-1]["t"] - some[0]["t"] + some[0]["seconds"]
        found.append({"t": some[-1]["t"], "seconds": seconds, "busy": total.busy, "requests": total.requests})
    return found


def _count(event: EventDict, what: str) -> int:
    return sum(
        count for counts in event["requests"].values() for name, count in counts.items() if name.startswith(what)
    )


def batches_png(batches: Sequence[Batch], devices: int, seconds: float, out: str | os.PathLike[str]) -> Path:
    """Draw batches over devices: a row for each device, a colour for each trial. Returns the PNG's path.

    seconds: the width of the picture. A few batches also show how many requests are in them.
    """
    figure = new_figure(12.0, 1.5 + 0.5 * devices)
    axes = figure.subplots()
    for place, trial in enumerate(sorted({one.trial for one in batches})):
        mine = [one for one in batches if one.trial == trial]
        colour = PALETTE[place % len(PALETTE)]
        for device in range(devices):
            bars = [(one.begin, one.seconds) for one in mine if one.device == device]
            axes.broken_barh(bars, (device - 0.4, 0.8), facecolor=colour, edgecolor="white", linewidth=0.2)
        axes.plot([], [], color=colour, linewidth=6, label=printable(trial))
    if len(batches) <= NUMBERED:
        for one in batches:
            axes.text(one.begin + one.seconds / 2, one.device, str(one.size), ha="center", va="center", fontsize=7)
    axes.set_xlim(0, seconds)
    axes.set_ylim(devices - 0.5, -0.5)
    axes.set_yticks(range(devices))
    axes.set_ylabel("device", color=INK)
    axes.set_xlabel("time (s)", color=INK)
    mean = sum(one.size for one in batches) / max(1, len(batches))
    axes.set_title(f"{len(batches)} batches of {mean:.1f} requests in the mean", loc="left", fontsize=10)
    if batches:
        axes.legend(frameon=False, ncols=4, loc="upper right", bbox_to_anchor=(1, 1.3))
    polish_axes(axes)
    return save_png(figure, out)
