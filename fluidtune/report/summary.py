"""One run in figures: its time, the use of its devices, its resizes, losses and recoveries, and its best trial.

Decides which figures describe a run and how a terminal shows them. CONTRIBUTING.md says what a new figure needs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from fluidtune.profiles import ProfileError
from fluidtune.report.causes import label_of
from fluidtune.report.fold import Fold, Restore, Run, fold_of
from fluidtune.report.json_text import VERSION
from fluidtune.report.metric_values import ranked
from fluidtune.report.occupancy import available_seconds, held_seconds, occupancy_of, packing_levels
from fluidtune.report.recorded import read_job
from fluidtune.report.terminal_text import cell, listed
from fluidtune.report.time_use import time_use
from fluidtune.twin import LeastMakespan, least_makespan

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Bound(LeastMakespan):
    """``ratio``: the run's time divided by ``seconds``, which no schedule of its work could have undercut."""

    ratio: float


@dataclass(frozen=True)
class WidthFigures:
    """The iterations at one width: their number, their median time (s) and their device-seconds together."""

    iterations: int
    median_seconds: float
    device_seconds: float


class Summary:
    """A run in figures. docs/summary.md says what each one is, in which unit; None there is null."""

    def __init__(self, run: Run) -> None:
        fold = fold_of(run)
        use, head, counts = occupancy_of(fold), fold.head, fold.counts
        available, spent = available_seconds(use), time_use(fold, use)
        turns = (trial.noted("trial_added", "trial_started", "trial_ended") for trial in fold.trials.values())
        endings = Counter(str(notes[-1].event.get("ending", "unfinished")) for notes in turns if notes)
        resizes = [note for note in fold.notes if note.resize]
        reasons = Counter((label_of(note.cause) or "unknown").replace(" ", "_") for note in resizes)
        workers = [note.event for note in fold.noted("worker_started")]
        spares = [float(event["seconds"]) for event in workers if event.get("spare")]
        self.run = str(head.get("run", ""))
        self.machine = str(head.get("machine", ""))
        self.kind = str(head.get("kind", ""))
        self.algorithm = str(head.get("algorithm") or "")
        self.metric: str | None = head.get("metric")
        self.mode: str | None = head.get("mode")
        self.finished = fold.over
        self.restored = max(0, counts["run_started"] - 1)
        self.wall_seconds = use.wall_seconds
        self.devices = len(use.available)
        self.trials = endings.total()
        self.endings = dict(sorted(endings.items()))
        self.utilisation = spent.iterating / available if available else 0.0
        self.time_use = spent
        self.held_device_seconds = held_seconds(use)
        self.available_device_seconds = available
        self.packing_levels = packing_levels(use)
        self.widths = _widths(fold)
        self.resizes = len(resizes)
        self.resizes_failed = counts["resize_failed"]
        self.resize_reasons = dict(reasons.most_common())
        self.workers_started = len(workers)
        self.workers_forked = sum(bool(event.get("forked")) for event in workers)
        self.spares_started = len(spares)
        self.spare_seconds = sum(spares)
        self.spares_used = counts["spare_taken"]
        self.workers_lost = counts["worker_lost"]
        self.devices_lost = counts["device_lost"]
        self.recoveries = counts["recovered"]
        self.restores = _restores(fold)
        self.done_twice = sum(note.again for note in fold.noted("went_on"))
        self.bound = _bound(fold, use.wall_seconds)
        self.best_trial: str | None
        self.best_metric: float | None
        self.best_trial, self.best_metric = best_of(fold) or (None, None)
        self.dropped_lines = fold.dropped

    def as_dict(self) -> dict[str, Any]:
        """The content of summary.json: the same names; keys that are numbers become strings, as JSON requires."""
        return {
            "version": VERSION,
            **vars(self),
            "time_use": asdict(self.time_use),
            "packing_levels": {str(level): seconds for level, seconds in self.packing_levels.items()},
            "widths": {f"{width:g}": asdict(figures) for width, figures in self.widths.items()},
            "bound": self.bound and asdict(self.bound),
        }


def summarise(run: Run) -> Summary:
    """The figures of a run: from its fold, its events, its event log, or its directory. An empty log gives zeros."""
    return Summary(run)


def _median(lines: Iterable[tuple[float, int]]) -> float:
    """The median of iterations, where a line of the log may stand for several of them: each counts as long as their
    mean. ``lines``: of each line the seconds of an iteration, and their number; there must be one.
    """
    ordered = sorted(lines)
    until = list(accumulate(times for _, times in ordered))

    def at(place: int) -> float:
        return ordered[bisect_right(until, place)][0]

    return (at((until[-1] - 1) // 2) + at(until[-1] // 2)) / 2


def _widths(fold: Fold) -> dict[float, WidthFigures]:
    """The iterations at each width."""
    found: dict[float, list[tuple[float, int]]] = defaultdict(list)
    for _, line in fold.lines():
        # Rounded, so that 1/3 is one width however it was computed.
        found[round(line.width, 4)].append((line.seconds, int(line.times)))
    return {
        width: WidthFigures(
            sum(times for _, times in lines), _median(lines), width * sum(seconds * times for seconds, times in lines)
        )
        for width, lines in sorted(found.items())
    }


def _restores(fold: Fold) -> list[dict[str, Any]]:
    """The restores, oldest first, as docs/summary.md says."""
    found: list[dict[str, Any]] = []
    for note in fold.noted("run_started", "went_on"):
        trial = note.event.get("trial")
        if note.restore is not None:
            found.append({"at": note.at - fold.origin, **note.restore._asdict(), "trials": {}})
        elif found and trial is not None and fold.trials[trial].added < found[-1]["at"] + fold.origin:
            found[-1]["trials"].setdefault(trial, [note.event["iteration"], note.again])
    return found


def restored(restore: Restore) -> str:
    """What is said of a restore."""
    end = "died" if restore.died else "ended"
    return f"another driver goes on, {duration(restore.seconds)} after the one before it {end}"


def _bound(fold: Fold, wall_seconds: float) -> Bound | None:
    """The bound of a run that took so long, for the most devices that it had at one moment.

    None if there is no finished iteration, or if `Tuner.restore` continued the run: what its start-ups cost cannot be
    told apart from iterations that ran again.
    """
    if fold.counts["run_started"] > 1 or wall_seconds <= 0 or not all(line.seconds for _, line in fold.lines()):
        return None
    try:
        found = least_makespan(read_job(fold), max(1, fold.most_devices))
    except ProfileError:
        return None
    return Bound(**vars(found), ratio=wall_seconds / found.seconds) if found.seconds else None


def best_of(fold: Fold) -> tuple[str, float] | None:
    """The best trial and its metric, as run_ended says; without a run_ended, by the last results so far: `ranked`."""
    if fold.over and isinstance(best := fold.noted("run_ended")[-1].event.get("best"), dict):
        return best["trial"], best["metric"]
    last = ((name, trial.metric) for name, trial in fold.trials.items())
    return next(iter(ranked(last, fold.head.get("mode"))), None)


def duration(seconds: float) -> str:
    """Seconds for people: 4.2 s, 3 min 05 s, 2 h 07 min."""
    if abs(seconds) < 1e-3:
        return "0 s" if abs(seconds) < 1e-6 else "less than 1 ms"  # sums that cancel have rounding errors
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
    resizes = str(summary.resizes)
    resizes += f", {summary.resizes_failed} failed" if summary.resizes_failed else ""
    reasons = [f"{count} x {reason.replace('_', ' ')}" for reason, count in summary.resize_reasons.items()]
    started = f"{summary.workers_started} started ({summary.workers_forked} forked)"
    workers = f"{started}, {summary.workers_lost} lost"
    spares = f"{summary.spares_started} started in {duration(summary.spare_seconds)}, {summary.spares_used} used"
    recoveries = str(summary.recoveries)
    recoveries += f", driver restored {plural(summary.restored, 'time')}" if summary.restored else ""
    recoveries += f", {plural(summary.done_twice, 'iteration')} done twice" if summary.done_twice else ""
    metric = f", {summary.metric or 'metric'} {summary.best_metric:.6g}" if summary.best_metric is not None else ""
    use, available = summary.time_use, summary.available_device_seconds
    iterating = f"{duration(use.iterating)} in iterations of {duration(available)} device time"
    rest = {"starts": use.starting, "between iterations": use.between, "no trial": use.idle}
    other = [f"{what} {seconds / available:.1%}" for what, seconds in rest.items() if available and seconds > 0]
    bound = summary.bound
    rows = [
        ("algorithm", summary.algorithm),
        ("time", duration(summary.wall_seconds) + so_far),
        ("machine", summary.machine),
        ("devices", plural(summary.devices, "device") + (f" ({summary.kind})" if summary.kind else "")),
        ("trials", f"{summary.trials}: {endings}" if endings else "none"),
        ("utilisation", f"{summary.utilisation:.1%} ({iterating})"),
        ("other device time", ", ".join(other)),
        ("resizes", resizes if summary.resizes or summary.resizes_failed else ""),
        ("", f"why: {', '.join(reasons)}" if set(summary.resize_reasons) - {"unknown"} else ""),
        ("workers", workers if summary.workers_started or summary.workers_lost else ""),
        ("spare workers", spares if summary.spares_started else ""),
        ("devices lost", str(summary.devices_lost or "")),
        ("recoveries", recoveries if recoveries != "0" else ""),
        *(("restore", _restore_in_words(each)) for each in summary.restores),
        ("bound", f"{duration(bound.seconds)}, the run took {bound.ratio:.2f} times that" if bound else ""),
        ("best trial", f"{summary.best_trial}{metric}" if summary.best_trial is not None else ""),
        ("event log", left_out(summary.dropped_lines) if summary.dropped_lines else ""),
    ]
    return [(name, text) for name, text in rows if text]


def _restore_in_words(found: dict[str, Any]) -> str:
    said = f"after {duration(found['at'])}: {restored(Restore(found['seconds'], found['died']))}"
    ways = [f"{name} from iteration {at} ({again} done twice)" for name, (at, again) in found["trials"].items()]
    return said + (f": {listed(ways)}" if ways else "")


def left_out(lines: int) -> str:
    """What is said of lines of the log that cannot be read."""
    return f"{plural(lines, 'line')} left out: broken, or of another version"


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
