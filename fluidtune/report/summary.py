"""One run in figures: how long, how well used, what was resized, lost and recovered, and what was best.

This module decides which figures a run is described by and how they are said in a terminal; it does not draw
(pictures.py) and does not compare two runs (benchmarks/). What it says of seconds saved is an estimate whose
formula is in gain.py.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from fluidtune.report.events import EventDict, load
from fluidtune.report.gain import EstimatedGain, estimated_gain, width_of
from fluidtune.report.occupancy import (
    available_seconds,
    held_seconds,
    occupancy_of,
    packing_levels,
    utilisation,
)

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class WidthFigures:
    """The iterations at one width: how many, their median in seconds, and what they took together."""

    iterations: int
    median_seconds: float
    device_seconds: float


@dataclass(frozen=True)
class Summary:
    """A run in figures; times are seconds, widths devices."""

    run: str
    machine: str
    #: "gpu", "cpu", "emulated"; "" when the log does not say.
    kind: str
    algorithm: str
    metric: str | None
    mode: str | None
    #: Whether the log has a run_ended: False for a run that goes on or was killed.
    finished: bool
    #: How often a driver was started anew with this log.
    restored: int
    #: For how long drivers ran; not the time between a killed one and the next.
    wall_seconds: float
    #: Devices that were ever there.
    devices: int
    #: Every trial that was added or started.
    trials: int
    #: ending -> trials, by each trial's last ending; "unfinished" for those without one.
    endings: dict[str, int]
    #: Part of the available device-seconds that trials held, in [0, 1].
    utilisation: float
    held_device_seconds: float
    available_device_seconds: float
    #: Trials on a device at once -> device-seconds; 0 is idle.
    packing_levels: dict[int, float]
    #: width -> its iterations.
    widths: dict[float, WidthFigures]
    resizes: int
    resizes_failed: int
    #: Mean pause of a resize; None when there was none.
    mean_resize_seconds: float | None
    workers_started: int
    workers_lost: int
    workers_replaced: int
    devices_lost: int
    recoveries: int
    #: Estimated; None when no iteration was reported.
    estimated_gain: EstimatedGain | None
    #: The best trial and its metric; None when nothing was reported or nobody said what is best.
    best_trial: str | None
    best_metric: float | None
    #: Broken lines of the log, see read_events.
    dropped_lines: int = 0

    def as_dict(self) -> dict[str, Any]:
        """As JSON takes it: the same names; widths and packing levels are strings, to be keys."""
        result = asdict(self)
        result["widths"] = {f"{width:g}": figures for width, figures in result["widths"].items()}
        result["packing_levels"] = {str(level): seconds for level, seconds in self.packing_levels.items()}
        return result


def summarise(events_or_path: Iterable[EventDict] | str | os.PathLike[str]) -> Summary:
    """The figures of a run: from its events, its event log, or its directory. An empty log gives zeros."""
    events = load(events_or_path)
    use = occupancy_of(events)
    head: EventDict = {}
    counts: Counter[str] = Counter()
    endings: dict[str, str] = {}
    times: dict[float, list[float]] = defaultdict(list)
    pauses: list[float] = []
    ended: EventDict | None = None
    for event in events:
        name = event["event"]
        counts[name] += 1
        if name == "trial_result":
            if event["seconds"] is not None and event["width"] is not None:
                times[width_of(event["width"])].append(float(event["seconds"]))
        elif name in ("trial_added", "trial_started"):
            endings[event["trial"]] = "unfinished"
        elif name == "trial_ended":
            endings[event["trial"]] = event["ending"]
        elif name == "resized" and event["seconds"] is not None:
            pauses.append(float(event["seconds"]))
        elif name == "run_started":
            head, ended = event, None
        elif name == "run_ended":
            ended = event
    wall = use.wall_seconds
    held, available = held_seconds(use), available_seconds(use)
    best_trial, best_metric = _best(events, ended, head.get("mode"))
    return Summary(
        run=str(head.get("run", "")),
        machine=str(head.get("machine", "")),
        kind=str(head.get("kind", "")),
        algorithm=str(head.get("algorithm") or ""),
        metric=head.get("metric"),
        mode=head.get("mode"),
        finished=ended is not None,
        restored=max(0, counts["run_started"] - 1),
        wall_seconds=wall,
        devices=len(use.available),
        trials=len(endings),
        endings=dict(sorted(Counter(endings.values()).items())),
        utilisation=utilisation(use),
        held_device_seconds=held,
        available_device_seconds=available,
        packing_levels=packing_levels(use),
        widths={
            width: WidthFigures(len(seconds), median(seconds), width * sum(seconds))
            for width, seconds in sorted(times.items())
        },
        resizes=counts["resized"],
        resizes_failed=counts["resize_failed"],
        mean_resize_seconds=fmean(pauses) if pauses else None,
        workers_started=counts["worker_started"],
        workers_lost=counts["worker_lost"],
        workers_replaced=counts["worker_replaced"],
        devices_lost=counts["device_lost"],
        recoveries=counts["recovered"],
        estimated_gain=estimated_gain(events, wall, available / wall) if wall > 0 else None,
        best_trial=best_trial,
        best_metric=best_metric,
        dropped_lines=events.dropped,
    )


def _best(events: Iterable[EventDict], ended: EventDict | None, mode: str | None) -> tuple[str | None, float | None]:
    """What run_ended says; of a run without one, the best result so far."""
    if ended is not None and isinstance(ended.get("best"), dict):
        best = ended["best"]
        return best.get("trial"), best.get("metric")
    if mode not in ("min", "max"):
        return None, None
    results = (
        (event["metric"], event["trial"])
        for event in events
        if event["event"] == "trial_result" and isinstance(event["metric"], (int, float))
    )
    pick = min if mode == "min" else max
    metric, trial = pick(results, key=lambda result: result[0], default=(None, None))
    return trial, metric


def duration(seconds: float) -> str:
    """Seconds for people: 4.2 s, 3 min 05 s, 2 h 07 min."""
    if abs(seconds) < 1e-6:
        return "0 s"  # what is left of sums that cancel
    if abs(seconds) < 99.95:
        return f"{seconds:.3g} s"
    sign, whole = ("-" if seconds < 0 else ""), round(abs(seconds))
    if whole < 3600:
        return f"{sign}{whole // 60} min {whole % 60:02d} s"
    minutes = round(whole / 60)
    return f"{sign}{minutes // 60} h {minutes % 60:02d} min"


def plural(count: int, noun: str) -> str:
    """1 trial, 2 trials."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _rows(summary: Summary) -> list[tuple[str, str]]:
    """What the first table says: a name and a figure a row; rows about nothing are left out."""
    so_far = "" if summary.finished else " so far, or until it was killed"
    endings = ", ".join(f"{n} {ending}" for ending, n in summary.endings.items())
    rows = [
        ("time", duration(summary.wall_seconds) + so_far),
        ("devices", plural(summary.devices, "device") + (f" ({summary.kind})" if summary.kind else "")),
        ("trials", f"{summary.trials}: {endings}" if endings else "none"),
        (
            "utilisation",
            f"{summary.utilisation:.1%} ({duration(summary.held_device_seconds)} held of"
            f" {duration(summary.available_device_seconds)} device time)",
        ),
    ]
    if summary.machine:
        rows.insert(1, ("machine", summary.machine))
    if summary.algorithm:
        rows.insert(0, ("algorithm", summary.algorithm))
    if summary.resizes or summary.resizes_failed:
        mean = summary.mean_resize_seconds
        text = str(summary.resizes) + (f", {duration(mean)} each" if mean is not None else "")
        text += f", {summary.resizes_failed} failed" if summary.resizes_failed else ""
        rows.append(("resizes", text))
    if summary.workers_started or summary.workers_lost:
        rows.append(
            (
                "workers",
                f"{summary.workers_started} started, {summary.workers_lost} lost, {summary.workers_replaced} replaced",
            )
        )
    if summary.devices_lost:
        rows.append(("devices lost", str(summary.devices_lost)))
    if summary.recoveries or summary.restored:
        times = f", driver restored {plural(summary.restored, 'time')}" if summary.restored else ""
        rows.append(("recoveries", f"{summary.recoveries}{times}"))
    gain = summary.estimated_gain
    if gain is not None:
        rows += [
            (
                "estimated gain",
                f"{duration(gain.seconds_saved)} saved against every trial at width 1"
                f" (estimated {duration(gain.seconds_at_width_one)})",
            ),
            (
                "",
                f"device time saved by packing {duration(gain.packing_device_seconds)},"
                f" by growing {duration(gain.growing_device_seconds)}",
            ),
        ]
        if gain.iterations_without_comparison:
            what = plural(gain.iterations_without_comparison, "iteration")
            rows.append(("", f"{what} had nothing to compare with and count as no gain"))
    if summary.best_trial is not None:
        text = summary.best_trial
        if summary.best_metric is not None:
            text += f", {summary.metric or 'metric'} {summary.best_metric:.6g}"
        rows.append(("best trial", text))
    if summary.dropped_lines:
        rows.append(("event log", f"{plural(summary.dropped_lines, 'broken line')} dropped"))
    return rows


def render(summary: Summary) -> RenderableType:
    """The summary for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    # Text and not markup: names of trials and runs may have square brackets.
    title = f"{summary.run or 'run'}" + (" (emulated devices)" if summary.kind == "emulated" else "")
    figures = Table(title=Text(title, style="bold"), title_justify="left", show_header=False, box=None)
    figures.add_column(style="cyan", no_wrap=True)
    figures.add_column()
    for name, text in _rows(summary):
        figures.add_row(Text(name), Text(text))
    if not summary.widths:
        return figures
    widths = Table(title=Text("iterations by width", style="bold"), title_justify="left", box=None)
    widths.add_column("width", justify="right", style="cyan")
    widths.add_column("iterations", justify="right")
    widths.add_column("median s each", justify="right")
    widths.add_column("device time", justify="right")
    for width, at in summary.widths.items():
        widths.add_row(f"{width:g}", str(at.iterations), f"{at.median_seconds:.4g}", duration(at.device_seconds))
    return Group(figures, Text(""), widths)
