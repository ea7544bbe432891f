"""The marks of the timeline: where a trial grew or shrank and why, and where a worker or a device was lost.

Decides which events have a mark, and which marks have their reason in words. Bars and legend are in pictures.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fluidtune.report.causes import label_of, words_of
from fluidtune.report.drawing import INK
from fluidtune.report.fold import Fold, Note
from fluidtune.report.occupancy import Occupancy
from fluidtune.report.terminal_text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Unix seconds -> the x coordinate of a picture.
TimeAxis = Callable[[float], float]

#: Markers of lost workers and devices: Okabe and Ito's vermillion (Color Universal Design, 2008).
LOSS = "#D55E00"


def mark_of(note: Note) -> tuple[str, int, str] | None:
    """The kind of the note's mark in `MARKS`, its device, and why it happened; None if it has none."""
    if note.resize and note.resize.after.devices:
        return "grown" if note.resize.grown else "shrunk", note.resize.after.devices[0], label_of(note.cause)
    if note.name in ("worker_lost", "device_lost"):
        return "lost", note.event["device"], words_of(note.event) or ""
    return None


class Mark(NamedTuple):
    """How a kind of marks is drawn, and what the legend says."""

    marker: str
    face: str
    edge: str
    label: str


MARKS = {
    "grown": Mark("^", "white", INK, "resize: more devices"),
    "shrunk": Mark("v", "white", INK, "resize: fewer devices"),
    "lost": Mark("X", LOSS, "white", "worker or device lost"),
}
#: With more resizes than this no triangle gets its reason in words: they would cover each other.
LABELLED_RESIZES = 40
#: The least distance of two reasons in words, as a part of the picture's width: "waiting trials" has this length.
LABEL_GAP = 0.06


def draw_marks(
    axes: Axes, fold: Fold, use: Occupancy, rows: Mapping[int, int], at: TimeAxis
) -> dict[str, Counter[str]]:
    """A triangle where a trial grew (up) or shrank (down), and why; a cross where a worker or device was lost.

    Returns for both kinds of triangles how many resizes there were for each reason.
    """
    marks: dict[str, list[tuple[float, float]]] = {name: [] for name in MARKS}
    reasons: list[tuple[float, float, str, bool]] = []
    counts: dict[str, Counter[str]] = {"grown": Counter(), "shrunk": Counter()}
    for note in fold.notes:
        found = mark_of(note)
        if found is None:
            continue
        kind, device, why = found
        if device not in rows or (kind == "lost" and not use.start <= note.at <= use.end):
            continue
        place = at(note.at), rows[device] + 0.5
        marks[kind].append(place)
        if kind != "lost":
            reasons.append((*place, printable(why), kind == "grown"))
            counts[kind].update(filter(None, [printable(why)]))
    many = sum(len(points) for points in marks.values()) > 150 or len(rows) > 32
    size = 9 if many else 30
    if len(reasons) <= LABELLED_RESIZES:
        _write_reasons(axes, reasons, max(at(use.end), 1e-9))
    for name, mark in MARKS.items():
        if marks[name]:
            x, y = zip(*marks[name], strict=True)
            axes.scatter(
                x,
                y,
                marker=mark.marker,
                s=size * (2.2 if name == "lost" else 1),
                c=mark.face,
                edgecolors=mark.edge,
                linewidths=0.4 if many else 0.8,
                zorder=6,
                clip_on=False,
                gid=name,
            )
    return counts


def _write_reasons(axes: Axes, reasons: Sequence[tuple[float, float, str, bool]], span: float) -> None:
    """Write the reason of each resize below its triangle: of a growth to the left, else to the right.

    ``reasons``: x, y, the label, and whether it is a growth. ``span``: the length of the x axis. Where a label would
    cover the one before, only the legend has the reason.
    """
    last: dict[tuple[float, bool], float] = {}
    for x, y, label, grows in reasons:
        if not label or x - last.get((y, grows), -span) < LABEL_GAP * span:
            continue
        last[y, grows] = x
        axes.annotate(
            label,
            (x, y),
            xytext=(-4 if grows else 4, -5),
            textcoords="offset points",
            fontsize=5.5,
            color=INK,
            ha="right" if grows and x > LABEL_GAP * span else "left",
            va="top",
            bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.7},
            zorder=6,
            gid="why",
        )
