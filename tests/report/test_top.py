"""`fluidtune top`: what is said of a run that goes on, that it fits the terminal, and that it follows the log."""

from __future__ import annotations

import io
import json
import os
import re
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fluidtune.cli import cli
from fluidtune.driver_lock import hold, this_machine
from fluidtune.engine import Reason, because
from fluidtune.report import top
from fluidtune.report.events import EventDict, EventLogError
from fluidtune.report.fold import Fold
from fluidtune.report.log_tail import LogTail, driver_state
from fluidtune.report.news import states_of
from fluidtune.report.occupancy import latest, occupancy_of
from fluidtune.view.followed_run import FollowedRun
from fluidtune.view.run_list import RunList
from tests.report.makers import (
    added,
    begin,
    ended,
    ev,
    group,
    over,
    random_run,
    resized,
    resizing,
    result,
    started,
    text_of,
    written,
)
from tests.report.test_summary import by_hand

#: No process has this number: Linux gives at most 2^22.
GONE = 2**22 + 1


def screen_of(events: list[EventDict]) -> top.RunScreen:
    screen = top.RunScreen(Path())
    screen.hear(events)
    return screen


def test_what_is_said_in_the_middle_of_a_run() -> None:
    """At 108 s trials a and b have ended, and c has two devices."""
    lines = text_of(screen_of(by_hand()[:18]).draw(109.0, 40)).splitlines()
    assert lines[0] == "test: running for 9 s, grid, cpu devices"
    assert lines[1] == "2 of 2 devices busy, 5 iterations in the last minute"
    assert lines[2] == "trials: 1 running, 1 failed, 1 stopped"
    assert lines[3] == "best: c, loss 0.5"
    assert lines[4] == "processes: 2 started, 0 of them forked"
    # Device 0: busy from 102 to 106 and from 107 to 109, of 100 to 109. Device 1: from 102 to 109.
    assert lines[6].split() == ["0", "local", "67%", "c", "(1)"]
    assert lines[7].split() == ["1", "local", "78%", "c", "(1)"]
    assert lines[9].split() == ["c", "running", "2", "0-1", "3/10", "1", "0.5", "1", "s", "ago"]
    assert lines[10].split() == ["b", "failed", "1/10", "3", "0.8", "3", "s", "ago"]
    assert [line.partition(" ")[2] for line in lines[11:]] == ["b failed"]


def test_the_reason_of_a_trials_last_change_is_shown() -> None:
    def last(events: list[EventDict]) -> str:
        return text_of(screen_of(events).draw(100.0, 40)).rstrip().splitlines()[-1].partition("ago")[2].strip()

    events = [begin(0, 2), group(0), added(0, "a"), {**started(1, "a", 0), "why": "free_device"}]
    assert last(events) == "free device"
    events.append(resizing(2, "a", [0], (0, 1), why="idle_devices"))
    assert last(events) == "idle devices"
    events += [resized(3, "a", 0, 1), result(4, "a", 1, 1.0, 2.0)]
    assert last(events) == "idle devices"
    events += [resizing(5, "a", [0, 1], (0,)), ev(6, "resize_failed", trial="a", devices=[0, 1], reason="x")]
    assert "resize failed" in text_of(screen_of(events).draw(100.0, 40))
    old = [begin(0, 2), group(0), added(0, "a"), started(1, "a", 0), resized(3, "a", 0, 1)]
    assert last(old) == ""
    refused = {**ended(4, "a", "failed"), "reason": "it asks for 9", "why": "job_small"}
    assert "job small" in text_of(screen_of([*old, refused]).draw(100.0, 40))


def test_what_went_wrong_is_news() -> None:
    text = text_of(screen_of(by_hand()).draw(112.0, 40))
    news = [line.partition(" ")[2] for line in text.splitlines() if ":" in line[:4]]
    assert news == [
        "b failed",
        "the worker w0 on device 0 died: killed",
        "c is in another worker, with 3 iterations reported",
        "c was not resized: x",
    ]
    assert "ended after 12 s" in text and "device  node" not in text  # it has no devices any more


def test_a_silent_trial_comes_first_until_it_reports() -> None:
    events = [begin(0, 2), group(0), added(0, "a"), added(0, "b"), started(0, "a", 0), started(0, "b", 1)]
    events += [result(1, "b", 1, 1.0, 1.0), ev(50, "trial_silent", trial="b", seconds=49.0, usual=1.0)]
    screen = screen_of(events)
    lines = text_of(screen.draw(50.0, 40)).splitlines()
    rows = [line.split()[:2] for line in lines if line.startswith(("a ", "b "))]
    assert rows == [["b", "silent"], ["a", "running"]] and "b has not reported for 49 s" in lines[-1]
    screen.hear([result(60, "b", 2, 59.0, 1.0)])
    assert states_of(screen.run) == {"running": 2}


AT_0 = [begin(0, 1), group(0), added(0, "a"), started(0, "a", 0)]


@pytest.mark.parametrize(
    ("events", "now", "said"),
    [
        (AT_0, 60.0, ["running for "]),
        # It was killed, or stands still: the log cannot say which.
        (AT_0, 100.0, ["nothing was written for 1 min 40 s"]),
        ([begin(3600, 1), added(0, "a")], 100.0, ["nothing was written for 1 min 40 s"]),  # the clock was set back
        (
            [*AT_0, result(5, "a", 1, 5.0, 1.0), begin(90, 1)],
            90.0,
            ["1 waiting", "0 of 1 device busy", "85 s after the"],
        ),
        ([*by_hand()[:2], added(105, "a")], 50.0, ["running for 5 s"]),  # the clock of another machine is behind
    ],
)
def test_how_long_a_driver_runs_or_is_silent(events: list[EventDict], now: float, said: list[str]) -> None:
    text = text_of(screen_of(events).draw(now, 40), width=200)
    assert all(each in text for each in said) and ("nothing was written" in text) == (now == 100.0)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 60), st.floats(0, 1), st.integers(14, 80))
def test_any_moment_of_any_run_fits_the_terminal(
    seed: int, devices: int, trials: int, part: float, height: int
) -> None:
    """And says of each trial what the occupancy says."""
    events = random_run(seed, devices=devices, trials=trials, iterations=4)
    events = events[: max(1, int(part * len(events)))]
    screen = screen_of(events)
    now = float(events[-1]["t"]) + 1
    lines = text_of(screen.draw(now, height), width=80).splitlines()
    assert len(lines) < max(height, 5 + 2 + 2 * top.LEAST_ROWS + top.NEWS_SHOWN + 1)
    # What has no room is counted.
    shown = sum(bool(re.match(r"\d+ +(local|running|waiting|resizing) ", line)) for line in lines)
    hidden = sum(int(line.split()[1]) for line in lines if re.fullmatch(r"and \d+ more *", line))
    live = [name for name, trial in screen.run.trials.items() if trial.state not in ("paused", "stopped")]
    assert shown + hidden == (0 if screen.over else devices + len(live))
    held = screen.run.held
    working = {name for name, trial in screen.run.trials.items() if trial.state in ("running", "resizing", "silent")}
    assert working == set(held)
    # What is held in the last minute, as the whole log has it.
    recent = latest(screen.run, now, top.RECENT_S)
    whole = occupancy_of([*events, over(now)])
    shown = [{(*i[:4], i.end) for i in use.spans if i.end >= now - top.RECENT_S} for use in (whole, recent)]
    assert shown[0] == shown[1]


@pytest.mark.parametrize("width", [80, 60, 40])
def test_a_narrow_terminal_shows_states_whole_and_ids_at_their_end(width: int) -> None:
    """Seen: 24 trials with one name, "5bb21_000…", in the state "runni…"."""
    names = [f"5bb21_{number:05d}" for number in range(3)] + ["f" * 70 + "42"]
    events = [begin(0, 2, metric="eval/mean_accuracy"), *(added(0, name) for name in names)]
    events += [started(1, names[0], 0), result(2, names[0], 14, 1.25, 1.0, 0.98765)]
    shown = text_of(screen_of(events).draw(99.0, 40), width)
    assert {"0", "1", "2"} <= {
        line.split()[0] for line in text_of(screen_of(events[:4] + events[5:]).draw(9.0, 40), width).splitlines()[7:]
    }
    assert "42 " in shown and shown.count("waiting ") == 3 and "running " in shown and "accuracy" in shown
    assert all(len(line) <= width for line in shown.splitlines())


@pytest.mark.parametrize(
    ("lock", "where", "process", "state"),
    [
        ("held", "another node", "gone", "lives"),
        ("held", "this one", "gone", "lives"),  # `Tuner.restore` on another node has written nothing yet
        ("free", "another node", "gone", "unknown"),  # its file system may pass no locks on
        ("free", "this one", "gone", "died"),
        ("none", "this one", "here", "lives"),
        ("free", "this one", "over", "ended"),
        ("held", "this one", "over", "lives"),  # `Tuner.restore` has written nothing yet
    ],
)
def test_whether_a_driver_lives_is_said_alike(lock: str, where: str, process: str, state: str, tmp_path: Path) -> None:
    """Seen: "running for 64.4 s" of a run whose driver had been killed a minute before."""
    machine, pid = this_machine() if where == "this one" else where, os.getpid() if process == "here" else GONE
    start, waits = begin(time.time(), 1, pid=pid, machine=machine), because(Reason.DEVICES_BUSY).as_fields()
    events = [start, added(time.time(), "a"), ev(time.time(), "trial_waits", line=1, trials=["a"], **waits)]
    events += [over(time.time())] * (process == "over")
    log, out = written(tmp_path / "run", events), io.StringIO()
    held = hold(log.parent)
    {"held": lambda: None, "free": held.let_go, "none": held.close}[lock]()
    top.watch(log, Console(file=out))
    why = json.loads(CliRunner().invoke(cli, ["why", str(log), "a", "--json"]).stdout)
    page, died = FollowedRun(log), RunList(tmp_path).glances()[0]["died"]
    story = page.story("a")
    assert driver_state(log, Fold(events).last_driver) == state and "\x1b" not in out.getvalue()
    assert page.as_dict()["state"] == ("ended" if process == "over" else "died" if died else "running")
    assert (story["head"], story["end"]) == (why["head"], why["end"]), "the page's story is that of `fluidtune why`"
    assert [text for *_, text in story["told"]] == [each["text"] for each in why["entries"]]
    assert bool(story["end"]) == (process != "over" and not died) and died == (state == "died")
    assert (f"test: its driver, process {pid}, died after" in out.getvalue()) == died
    assert ("\n0 of 1 device busy when it died\n" in out.getvalue()) == died


@pytest.mark.parametrize("removed", [False, True])
def test_a_log_that_is_replaced_is_followed_anew(removed: bool, tmp_path: Path) -> None:
    # The driver died, and the script starts again under the same name. Seen: `top` showed the dead run for ever.
    log = written(tmp_path, [*by_hand()[:5], begin(103, 1, run="of the dead driver")])
    looks: list[float] = []

    def next_look(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) > 5:
            raise KeyboardInterrupt  # so that the test ends where it fails
        if len(looks) == 1:
            log.unlink() if removed else log.rename(tmp_path / "set_aside.jsonl")
        elif len(looks) == 2:
            written(tmp_path, [])
        elif len(looks) == 3:
            written(tmp_path, [begin(200, 1, run="anew"), over(205)])

    out = io.StringIO()
    top.watch(log, Console(file=out, force_terminal=True, width=100, height=30), lambda: 208.0, next_look)
    last = out.getvalue().rpartition("\x1b[?1049l")[2]
    assert len(looks) == 3 and "anew: ended after 5 s" in last and "dead" not in last


def test_a_log_that_this_user_may_not_see_any_more_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tail = LogTail(written(tmp_path, by_hand()))
    assert tail.anew()
    with pytest.raises(EventLogError, match=r"cannot be read: Permission denied$"), monkeypatch.context() as patched:
        patched.setattr("os.stat", Mock(side_effect=PermissionError(1, "Permission denied")))
        tail.anew()


def test_ctrl_c_leaves_the_last_picture(tmp_path: Path) -> None:
    log = written(tmp_path, by_hand()[:10])

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    out = io.StringIO()
    top.watch(log, Console(file=out, force_terminal=True, width=100, height=30), lambda: 103.0, interrupted)
    assert "3 running" in out.getvalue().rpartition("\x1b[?1049l")[2]


def test_a_service(tmp_path: Path) -> None:
    """Of the last minute, and in all; what goes on for long is summed up once."""
    start = {"run": "r", "ray": "2.60", "fluidtune": "0.1", "python": "3.11", "machine": "m", "kind": "cpu"}
    start |= {"devices": 1, "slo": 0.5, "starts": "eager", "trials": [{"trial": "a", "value": 1.0}]}

    def served(at: float, answered: int) -> EventDict:
        counts = {"a": {"answered": answered}}
        more = {"requests": counts, "batches": {"a": {"1": answered}}, "waited": {"a": 1.0}, "busy": 2.0, "devices": 1}
        return ev(at, "served", seconds=10.0, **more)

    events = [ev(0, "serving_started", **start), served(10, 100), *(served(at, 3) for at in range(20, 500, 10))]
    out = io.StringIO()
    top.watch(written(tmp_path, [*events, served(500, 30)]), Console(file=out, width=120), now=lambda: 505.0)
    rows = [line.split("│")[1:3] for line in out.getvalue().splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [["a", "0.8"], ["a", "0.5"]]
    screen = top.ServiceScreen()
    screen.hear(events)
    assert not screen.over
    screen.hear([ev(510, "serving_ended", seconds=1.0)])
    assert screen.over
