"""One run in figures: its time, the use of its devices, its resizes, losses and recoveries, and its best trial.

Decides which figures describe a run and how a terminal shows them. CONTRIBUTING.md says what a new figure needs.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from fluidtune.report.causes import Resizes, label_of
from fluidtune.report.distance import Bound, bound_of
from fluidtune.report.events import EventDict, iterations_in, load_events
from fluidtune.report.occupancy import available_seconds, held_seconds, occupancy_of, packing_levels
from fluidtune.report.terminal_text import cell
from fluidtune.report.time_use import TimeUse, time_use

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class WidthFigures:
    """The iterations at one width: their number, their median time (s) and their device-seconds together."""

    iterations: int
    median_seconds: float
    device_seconds: float


@dataclass(frozen=True)
class Summary:
    """A run in figures. docs/summary.md says what each one is, in which unit; None there is null."""

    run: str
    machine: str
    kind: str
    algorithm: str
    metric: str | None
    mode: str | None
    finished: bool
    restored: int
    wall_seconds: float
    devices: int
    trials: int
    endings: dict[str, int]
    utilisation: float
    time_use: TimeUse
    held_device_seconds: float
    available_device_seconds: float
    packing_levels: dict[int, float]
    widths: dict[float, WidthFigures]
    resizes: int
    resizes_failed: int
    resize_reasons: dict[str, int]
    mean_resize_seconds: float | None
    workers_started: int
    workers_forked: int
    spares_started: int
    spare_seconds: float
    spares_used: int
    workers_lost: int
    workers_replaced: int
    devices_lost: int
    recoveries: int
    bound: Bound | None
    best_trial: str | None
    best_metric: float | None
    dropped_lines: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The content of summary.json: the same names; keys that are numbers become strings, as JSON requires."""
        result = asdict(self)
        result["widths"] = {f"{width:g}": figures for width, figures in result["widths"].items()}
        result["packing_levels"] = {str(level): seconds for level, seconds in self.packing_levels.items()}
        return result


@dataclass
class Durations:
    """Seconds of iterations, where a line of the log may stand for several of them.

    Each of these counts as long as their mean. So their number and their seconds together are exact, and the median is
    one of the means where most iterations share lines.
    """

    #: Number of iterations.
    count: int = 0
    #: Their seconds together.
    total: float = 0.0
    #: Of each line the (mean) seconds of an iteration, and their number.
    _lines: list[tuple[float, int]] = field(default_factory=list)

    def add(self, result: EventDict) -> None:
        """Count a ``trial_result``, whose seconds are known."""
        seconds, times = float(result["seconds"]), iterations_in(result)
        self.count += times
        self.total += times * seconds
        self._lines.append((seconds, times))

    def median(self) -> float:
        """The median of all iterations. There must be one."""
        if len(self._lines) == self.count:
            return median(seconds for seconds, _ in self._lines)
        lines = sorted(self._lines)
        until = list(accumulate(times for _, times in lines))

        def at(place: int) -> float:
            return next(seconds for (seconds, _), end in zip(lines, until, strict=True) if place < end)

        return (at((self.count - 1) // 2) + at(self.count // 2)) / 2


@dataclass
class _Tally:
    """What one pass over the events counts; each field becomes one or more figures in `summarise`."""

    #: The last run_started; empty if there is none.
    head: EventDict = field(default_factory=dict)
    #: The run_ended of the last driver; None while it runs or if it was killed.
    ended: EventDict | None = None
    #: Event name -> number of such events.
    events: Counter[str] = field(default_factory=Counter)
    #: trial -> its last ending, or "unfinished".
    endings: dict[str, str] = field(default_factory=dict)
    #: width -> the iterations at that width.
    at_width: dict[float, Durations] = field(default_factory=lambda: defaultdict(Durations))
    #: Label of the reason -> number of resizes that were done for it; and the resizes under way.
    reasons: Counter[str] = field(default_factory=Counter)
    under_way: Resizes = field(default_factory=Resizes)
    #: Seconds of each resize's pause.
    pauses: list[float] = field(default_factory=list)
    #: Processes that were forked.
    forked: int = 0
    #: Seconds of each spare process until it was ready.
    spares: list[float] = field(default_factory=list)

    def count(self, event: EventDict) -> None:
        name = event["event"]
        self.events[name] += 1
        cause = self.under_way.step(event)
        if name == "resized":
            self.reasons[label_of(cause) or "unknown"] += 1
        if name == "trial_result":
            if event["seconds"] is not None and event["width"] is not None:
                # Rounded, so that 1/3 is one width however it was computed.
                self.at_width[round(float(event["width"]), 4)].add(event)
        elif name in ("trial_added", "trial_started"):
            self.endings[event["trial"]] = "unfinished"
        elif name == "trial_ended":
            self.endings[event["trial"]] = event["ending"]
        elif name == "resized" and event["seconds"] is not None:
            self.pauses.append(float(event["seconds"]))
        elif name == "worker_started":
            self.forked += bool(event.get("forked"))
            if event.get("spare"):
                self.spares.append(float(event["seconds"]))
        elif name == "run_started":
            self.head, self.ended = event, None
        elif name == "run_ended":
            self.ended = event


def summarise(events_or_path: Iterable[EventDict] | str | os.PathLike[str]) -> Summary:
    """The figures of a run: from its events, its event log, or its directory. An empty log gives zeros."""
    events = load_events(events_or_path)
    use = occupancy_of(events)
    tally = _Tally()
    for event in events:
        tally.count(event)
    head = tally.head
    wall, available = use.wall_seconds, available_seconds(use)
    spent = time_use(events, use)
    best_trial, best_metric = _best(events, tally.ended, head.get("mode"))
    return Summary(
        run=str(head.get("run", "")),
        machine=str(head.get("machine", "")),
        kind=str(head.get("kind", "")),
        algorithm=str(head.get("algorithm") or ""),
        metric=head.get("metric"),
        mode=head.get("mode"),
        finished=tally.ended is not None,
        restored=max(0, tally.events["run_started"] - 1),
        wall_seconds=wall,
        devices=len(use.available),
        trials=len(tally.endings),
        endings=dict(sorted(Counter(tally.endings.values()).items())),
        utilisation=spent.iterating / available if available else 0.0,
        time_use=spent,
        held_device_seconds=held_seconds(use),
        available_device_seconds=available,
        packing_levels=packing_levels(use),
        widths={
            width: WidthFigures(found.count, found.median(), width * found.total)
            for width, found in sorted(tally.at_width.items())
        },
        resizes=tally.events["resized"],
        resizes_failed=tally.events["resize_failed"],
        resize_reasons={label.replace(" ", "_"): count for label, count in tally.reasons.most_common()},
        mean_resize_seconds=fmean(tally.pauses) if tally.pauses else None,
        workers_started=tally.events["worker_started"],
        workers_forked=tally.forked,
        spares_started=len(tally.spares),
        spare_seconds=sum(tally.spares),
        spares_used=tally.events["spare_taken"],
        workers_lost=tally.events["worker_lost"],
        workers_replaced=tally.events["worker_replaced"],
        devices_lost=tally.events["device_lost"],
        recoveries=tally.events["recovered"],
        bound=bound_of(events, use),
        best_trial=best_trial,
        best_metric=best_metric,
        dropped_lines=events.dropped,
    )


def _best(events: Iterable[EventDict], ended: EventDict | None, mode: str | None) -> tuple[str | None, float | None]:
    """The best trial and its metric, as run_ended says; without a run_ended, by the last results so far.

    As `ResultGrid.get_best_result` by default, and as run_ended, it compares the trials' last results.
    """
    if ended is not None and isinstance(ended.get("best"), dict):
        best = ended["best"]
        return best.get("trial"), best.get("metric")
    if mode not in ("min", "max"):
        return None, None
    last = {event["trial"]: event["metric"] for event in events if event["event"] == "trial_result"}
    return best_of(last, mode) or (None, None)


def best_of(last: Mapping[str, float | None], mode: str) -> tuple[str, float] | None:
    """The best trial and its metric. ``last``: each trial's last metric, None if it has none."""
    known = {trial: metric for trial, metric in last.items() if metric is not None}
    if not known:
        return None
    trial = (min if mode == "min" else max)(known, key=lambda trial: known[trial])
    return trial, known[trial]


def duration(seconds: float) -> str:
    """Seconds for people: 4.2 s, 3 min 05 s, 2 h 07 min."""
    if abs(seconds) < 1e-6:
        return "0 s"  # the rounding error of sums that cancel
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
    """The rows of the first table: a name and the figure as text. A figure that says nothing gets no row."""
    so_far = "" if summary.finished else " so far, or until it was killed"
    endings = ", ".join(f"{n} {ending}" for ending, n in summary.endings.items())
    rows = [
        ("time", duration(summary.wall_seconds) + so_far),
        ("devices", plural(summary.devices, "device") + (f" ({summary.kind})" if summary.kind else "")),
        ("trials", f"{summary.trials}: {endings}" if endings else "none"),
        *_use_rows(summary),
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
        if set(summary.resize_reasons) - {"unknown"}:
            reasons = [f"{count} x {reason.replace('_', ' ')}" for reason, count in summary.resize_reasons.items()]
            rows.append(("", f"why: {', '.join(reasons)}"))
    if summary.workers_started or summary.workers_lost:
        started = f"{summary.workers_started} started ({summary.workers_forked} forked)"
        rows.append(("workers", f"{started}, {summary.workers_lost} lost, {summary.workers_replaced} replaced"))
    if summary.spares_started:
        spares = f"{summary.spares_started} started in {duration(summary.spare_seconds)}, {summary.spares_used} used"
        rows.append(("spare workers", spares))
    if summary.devices_lost:
        rows.append(("devices lost", str(summary.devices_lost)))
    if summary.recoveries or summary.restored:
        times = f", driver restored {plural(summary.restored, 'time')}" if summary.restored else ""
        rows.append(("recoveries", f"{summary.recoveries}{times}"))
    if summary.bound is not None:
        rows.append(("bound", f"{duration(summary.bound.seconds)}, the run took {summary.bound.ratio:.2f} times that"))
    if summary.best_trial is not None:
        text = summary.best_trial
        if summary.best_metric is not None:
            text += f", {summary.metric or 'metric'} {summary.best_metric:.6g}"
        rows.append(("best trial", text))
    if summary.dropped_lines:
        rows.append(("event log", left_out(summary.dropped_lines)))
    return rows


def left_out(lines: int) -> str:
    """What is said of lines of the log that cannot be read."""
    return f"{plural(lines, 'line')} left out: broken, or of another version"


def _use_rows(summary: Summary) -> list[tuple[str, str]]:
    """What became of the device time: iterations first, then the rest by what it was spent on."""
    use, available = summary.time_use, summary.available_device_seconds
    rest = {
        "starts": use.starting,
        "resizes": use.moving,
        "between iterations": use.between,
        "no trial": use.idle,
    }
    rows = [
        (
            "utilisation",
            f"{summary.utilisation:.1%} ({duration(use.iterating)} in iterations of {duration(available)} device time)",
        )
    ]
    parts = [f"{what} {seconds / available:.1%}" for what, seconds in rest.items() if available and seconds > 0]
    return rows + ([("other device time", ", ".join(parts))] if parts else [])


def render(summary: Summary) -> RenderableType:
    """The summary for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    title = f"{summary.run or 'run'}" + (" (emulated devices)" if summary.kind == "emulated" else "")
    figures = Table(title=cell(title, style="bold"), title_justify="left", show_header=False, box=None)
    figures.add_column(style="cyan", no_wrap=True)
    figures.add_column()
    for name, text in _rows(summary):
        figures.add_row(name, cell(text))
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
