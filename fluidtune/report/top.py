"""`fluidtune top`: a run, or a service, as it is now, in the terminal.

Decides what is on the screen and in which order, so that what needs a person is never cut off. What is true of a run is
decided in fold.py and news.py. It reads the event log only: it needs neither Ray nor the job's process, and disturbs
neither.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fluidtune.report.causes import why_of
from fluidtune.report.events import EventDict
from fluidtune.report.fold import Fold, Trial
from fluidtune.report.log_tail import LOOK_S, LogTail, driver_state, seconds_since, wall_clock
from fluidtune.report.news import ended_since, news_of, states_of
from fluidtune.report.occupancy import busy_over_time, latest
from fluidtune.report.serving_report import ServingSummary, is_serving, render_serving, summarise_serving
from fluidtune.report.summary import best_of, duration, left_out, plural
from fluidtune.report.terminal_text import cell, printable
from fluidtune.report.trial_lookup import short_names

#: Devices are busy, and iterations are counted, over this many seconds: several iterations of most trials.
RECENT_S = 60.0
#: How many news are shown, and the least rows of each table on a small terminal.
NEWS_SHOWN, LEAST_ROWS = 5, 3
#: Characters of a node's name that are shown. Ray's are 56 hexadecimal digits.
NODE_LENGTH = 12
#: How much of a metric's name is shown, its end. Columns that a narrow terminal does not show, the first one first.
METRIC_WIDTH, SPARE = 16, ("devices", "last event", "s each", "why")
#: Trials in these states come first, in this order.
ORDER = ("silent", "resizing", "running", "waiting", "failed", "paused", "stopped")
#: Trials in these states have no row.
_DONE = ("paused", "stopped")


def watch(
    log: Path, console: Console, now: Callable[[], float] = time.time, sleep: Callable[[float], object] = time.sleep
) -> None:
    """Show the log's run until it ends, or until Ctrl-C. Without a terminal, it is shown once."""
    followed = _Followed(log)
    try:
        followed.look()
        if console.is_terminal:
            with Live(console=console, screen=True, auto_refresh=False) as display:
                while True:
                    display.update(followed.draw(now(), console.height), refresh=True)
                    if followed.screen.over:
                        break
                    sleep(LOOK_S)
                    followed.look()
    except KeyboardInterrupt:
        pass
    finally:
        followed.close()
    # The alternate screen is gone by now: the last picture stays.
    console.print(followed.draw(now(), console.height if console.is_terminal else 1000))


class _Followed:
    """The run, or the service, whose log is at this path. Another file there is another run."""

    def __init__(self, log: Path) -> None:
        self._log, self._tail = log, LogTail(log)
        self.screen: ServiceScreen | RunScreen = RunScreen(log)

    def look(self) -> None:
        """Read what is new. Where the log was deleted, what it had stays until there is another one."""
        if self._tail.anew():
            self.screen = RunScreen(self._log)
        events = self._tail.new()
        if is_serving(events) and isinstance(self.screen, RunScreen):
            self.screen = ServiceScreen()
        self.screen.hear(events)

    def draw(self, now: float, height: int) -> RenderableType:
        """The screen, and below it how much of the log it lacks."""
        if not self._tail.dropped:
            return self.screen.draw(now, height)
        said = f"event log: {left_out(self._tail.dropped)}"
        return Group(self.screen.draw(now, height - 1), Text(said, style="yellow", no_wrap=True, overflow="ellipsis"))

    def close(self) -> None:
        self._tail.close()


class ServiceScreen:
    """The requests of a service: of the last minute, and since its start."""

    def __init__(self) -> None:
        self._sum = ServingSummary()
        #: The events of the last minute.
        self._recent: deque[EventDict] = deque()
        #: No front answers any more.
        self.over = False

    def hear(self, events: list[EventDict]) -> None:
        summarise_serving(events, self._sum)
        self._recent.extend(events)
        for event in events[-1:]:
            self.over = event["event"] == "serving_ended"

    def draw(self, now: float, height: int) -> RenderableType:
        """The picture at ``now`` (unix seconds), for a terminal of ``height`` lines."""
        while self._recent and seconds_since(now, self._recent[0]["t"]) > RECENT_S:
            self._recent.popleft()
        return Group(
            Text("the last minute", style="bold"),
            render_serving(summarise_serving(self._recent)),
            Text("since the start", style="bold"),
            render_serving(self._sum),
        )


class RunScreen:
    """The devices and trials of a tuning job, whose log this is."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self.run = Fold()
        #: When the last event was written. Other than the fold's, it goes back if the clock is set back.
        self._last = 0.0
        #: The run has ended. Or its driver is gone without a word, and another one may go on.
        self.over = self.died = False

    def hear(self, events: list[EventDict]) -> None:
        for event in events:
            self.run.step(event)
            self._last = float(event["t"])
        self.over = self.run.over
        self.died = driver_state(self._log, self.run.last_driver) == "died"

    def draw(self, now: float, height: int) -> RenderableType:
        now = self._last if self.over or self.died else max(now, self._last)
        news = news_of(self.run, NEWS_SHOWN)
        # Five lines of head, one above each table, and one is kept for the cursor.
        left = max(2 * LEAST_ROWS, height - 5 - 2 - 1 - len(news))
        devices = sorted(self.run.there)
        rows = min(len(devices), max(LEAST_ROWS, left // 2))
        tables = [self._devices(devices, rows, now), self._trials(max(LEAST_ROWS, left - rows), now)]
        parts = [
            *self._head(now),
            *(table for table in tables if table.rows),
            *(cell(f"{wall_clock(at)} {line}", style="yellow", no_wrap=True, overflow="ellipsis") for at, line in news),
        ]
        return Group(*parts)

    def _head(self, now: float) -> list[RenderableType]:
        run, head = self.run, self.run.head
        kind = "emulated devices" if head.get("kind") == "emulated" else f"{head.get('kind', '')} devices"
        since = seconds_since(now, head.get("t", now))
        state = f"ended after {duration(since)}" if self.over else f"running for {duration(since)}"
        if self.died:
            state = f"its driver, process {head['pid']}, died after {duration(since)}"
        silence = seconds_since(now, self._last)
        if not self.over and silence > RECENT_S:
            state += f", nothing was written for {duration(silence)}"
        states = states_of(run)
        trials = ", ".join(f"{states[state]} {state}" for state in ORDER if states[state]) or "none"
        rate = ended_since(run, now - RECENT_S)
        then = " when it died" if self.died else ""
        busy = f"{len(run.busy)} of {plural(len(run.there), 'device')} busy{then}"
        lines = [
            f"{head.get('run', 'run')}: {state}, {head.get('algorithm', '')}, {kind}",
            plural(len(run.available), "device") + " in all"
            if self.over
            else busy + ("" if self.died else f", {plural(rate, 'iteration')} in the last minute"),
            f"trials{then}: {trials}",
        ]
        if best := best_of(run):
            lines.append(f"best: {best[0]}, {head.get('metric') or 'metric'} {best[1]:.6g}")
        if workers := [note.event for note in run.noted("worker_started")]:
            spare, forked = (sum(bool(event.get(what)) for event in workers) for what in ("spare", "forked"))
            spares = f"; spares: {spare} started, {run.counts['spare_taken']} used" if spare else ""
            lines.append(f"processes: {len(workers)} started, {forked} of them forked{spares}")
        style = {"no_wrap": True, "overflow": "ellipsis"}
        return [cell(line, style="" if place else "bold", **style) for place, line in enumerate(lines)]

    def _devices(self, devices: list[int], rows: int, now: float) -> _Rows:
        run = self.run
        recent = busy_over_time(latest(run, now, RECENT_S), [now - RECENT_S, now]).devices
        rows = rows if len(devices) <= rows else rows - 1
        sampled = bool(run.samples)
        columns = ("device", "node", "busy", *(["GPU", "memory"] if sampled else []), "trials")
        table, short = _Rows(columns, "trials", ("node",), len(devices) - rows), short_names(list(run.trials))
        for device in devices[:rows]:
            names = ", ".join(f"{short[trial]} ({run.of(trial).share:.2g})" for trial in run.holders(device))
            part = float(recent[device][0]) if device in recent else float("nan")
            row = [str(device), run.nodes.get(device, "")[:NODE_LENGTH], "" if part != part else f"{part:.0%}"]
            table.rows.append((None, [*row, *(_gpu(run.samples.get(device, [])) if sampled else ()), names]))
        return table

    def _trials(self, rows: int, now: float) -> _Rows:
        shown = sorted(
            (trial for trial in self.run.trials.values() if trial.state not in _DONE),
            key=lambda trial: (ORDER.index(trial.state) if trial.state in ORDER else len(ORDER), trial.trial),
        )
        metric = _end_of(str(self.run.head.get("metric") or "metric"), METRIC_WIDTH)
        columns = ("trial", "state", "width", "devices", "iteration", "s each", metric, "last event", "why")
        rows = rows if len(shown) <= rows else rows - 1
        table, short = _Rows(columns, "trial", SPARE, len(shown) - rows), short_names(list(self.run.trials))
        for trial in shown[:rows]:
            style = "yellow" if trial.state in ("silent", "failed") else None
            table.rows.append((style, [short[trial.trial], *self._row(trial, now)]))
        return table

    def _row(self, trial: Trial, now: float) -> list[str]:
        held = self.run.of(trial.trial)
        return [
            trial.state,
            f"{held.width:.2g}" if held.devices else "",
            _ranges(held.devices),
            f"{trial.iteration}" if trial.target is None else f"{trial.iteration}/{trial.target}",
            "" if trial.seconds is None else f"{trial.seconds:.3g}",
            "" if trial.metric is None else f"{trial.metric:.5g}",
            f"{duration(round(seconds_since(now, trial.since)))} ago",
            why_of(trial),
        ]


class _Rows:
    """A table that fits the terminal, and a line that counts the ``hidden`` rows.

    Where the terminal is narrow, the columns of ``spare`` are left out, the first one first; then the texts of the
    column ``long`` lose their beginnings, because ids differ at their ends.
    """

    def __init__(self, columns: tuple[str, ...], long: str, spare: tuple[str, ...], hidden: int) -> None:
        self._columns, self._hidden = columns, hidden
        self._long, self._spare = columns.index(long), [columns.index(name) for name in spare]
        self.rows: list[tuple[str | None, list[str]]] = []

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = [
            [printable(text) for text in texts]
            for texts in zip(self._columns, *(row for _, row in self.rows), strict=True)
        ]
        wide = {place: max(map(cell_len, texts)) for place, texts in enumerate(columns)}
        while self._spare and sum(wide.values()) + 2 * (len(wide) - 1) > options.max_width:
            del wide[self._spare.pop(0)]
        table = Table(box=None, pad_edge=False, header_style="cyan")
        room = options.max_width - sum(width + 2 for place, width in wide.items() if place != self._long)
        wide[self._long] = max(min(wide[self._long], room), len(self._columns[self._long]))
        for place, width in wide.items():
            table.add_column(Text(columns[place][0]), no_wrap=True, overflow="ellipsis", min_width=width)
        for line, (style, _) in enumerate(self.rows, start=1):
            table.add_row(*(Text(_end_of(columns[place][line], width)) for place, width in wide.items()), style=style)
        yield table
        if self._hidden > 0:
            yield Text(f"and {self._hidden} more")


def _end_of(text: str, width: int) -> str:
    """The end of ``text`` that fits ``width`` columns of a terminal."""
    shown = text
    while cell_len(shown) > width:
        text = text[1:]
        shown = f"…{text}"
    return shown


def _gpu(samples: list[tuple[float, float | None, float, float]]) -> tuple[str, str]:
    """The utilisation of a GPU's last sample, and its memory in use of all."""
    if not samples:
        return "", ""
    _, part, used, total = samples[-1]
    return "" if part is None else f"{part:.0%}", f"{used / 2**30:.1f} of {total / 2**30:.0f} GiB"


def _ranges(devices: tuple[int, ...]) -> str:
    """Numbers of devices, those that follow each other as a range: 0-3, 6."""
    parts = []
    for _, group in groupby(enumerate(sorted(devices)), key=lambda pair: pair[1] - pair[0]):
        numbers = [str(device) for _, device in group]
        parts.append(numbers[0] if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ", ".join(parts)
