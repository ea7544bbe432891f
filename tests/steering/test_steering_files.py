"""The way of an act to a driver and back: real files, and why nobody answers."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fluidtune.driver_lock import hold, this_machine
from fluidtune.errors import FluidTuneError
from fluidtune.steering.acts import Act
from fluidtune.steering.json_values import LONGEST
from fluidtune.steering.steering_files import SteeringFiles, SteeringRefused, ask, ask_driver, parameters_from
from tests.contracts.processes import until
from tests.report.makers import added, begin, over, written

ME = pwd.getpwuid(os.geteuid()).pw_name


@contextmanager
def driver(run: Path, words: str) -> Iterator[list[Act]]:
    """A driver that gives this answer to whatever it is asked."""
    lock, files, heard, ends = hold(run), SteeringFiles(run), [], threading.Event()

    def serve() -> None:
        while not ends.wait(0.01):
            for act, answer in files.requests():
                heard.append(act)
                answer(False, words)

    thread = threading.Thread(target=serve)
    thread.start()
    yield heard
    ends.set()
    thread.join()
    files.close()
    lock.close()


def test_an_act_that_is_too_long_or_sets_a_name_twice_is_not_sent(tmp_path: Path) -> None:
    run = run_of(tmp_path, steer=True)
    with driver(run, "as you wish") as heard:
        assert ask(run, "clone", "t_1", [f'x="{"a" * (LONGEST - 1000)}"']) == "as you wish"
        with pytest.raises(FluidTuneError, match=f"of at most {LONGEST}"):
            ask(run, "clone", "t_1", [f'x="{"a" * LONGEST}"'])
        with pytest.raises(SteeringRefused, match="lr is set twice"):
            ask(run, "clone", "t_1", ["lr=1", "lr =2"])
    assert len(heard) == 1


def run_of(path: Path, pid: int | None = None, **settings: Any) -> Path:
    start = begin(time.time(), 2, settings=settings, machine=this_machine(), pid=pid or os.getpid())
    return written(path / "run", [start, {**added(1000.0, "t_1"), "name": "first"}]).parent


def test_an_act_comes_to_the_driver_with_its_users_name(tmp_path: Path) -> None:
    """By the file's owner: what the message says of the user does not count. No other user can write there."""
    run = run_of(tmp_path, steer=True)
    with driver(run, "as you wish") as heard:
        (run / "fluid_driver.lock").unlink()  # Seen: of a driver that lives and has no lock, that it has died
        assert ask(run, "clone", "fresh", ["lr=0.5", 'act="relu"', "net/sizes=[1, 2]"], True) == "as you wish"
        ask_driver(run / "fluid_events.jsonl", Act("2", "stop", "t_1", "somebody else", "page"))
        assert (run / "steer").stat().st_mode & 0o777 == 0o700
    assert not (run / "steer").exists()
    clone, stop = heard
    assert (clone.kind, clone.trial, clone.by, clone.via) == ("clone", "fresh", ME, "command line")
    assert clone.parameters == {"lr": 0.5, "act": "relu", "net/sizes": [1, 2]} and clone.from_checkpoint
    assert (stop.by, stop.via) == (ME, "page")


def test_what_nobody_has_answered_when_the_run_ends_or_goes_on_is_refused(tmp_path: Path) -> None:
    run, answers = run_of(tmp_path, steer=True), {}
    for words in ("ask again", "just ended"):
        files = SteeringFiles(run)
        (run / "steer" / "1.ask").write_text('{"kind": "stop", "trial": "t_1", "via": "page", "parameters": {}}')
        if words == "just ended":
            files.close()
        else:  # as a killed driver leaves it
            files = SteeringFiles(run)
        answers[words] = (run / "steer" / "1.answer").read_text()
    assert all(words in answer and "true" in answer for words, answer in answers.items())


@pytest.mark.parametrize(
    "said",
    [
        "no json",
        "[]",
        '{"kind": "burn", "trial": "t", "via": "page"}',
        "[" * 30000,
        '{"kind": "clone", "trial": "t", "via": "page", "parameters": {"lr": NaN}}',
        "/etc/hostname",
    ],
)
def test_what_is_no_act_is_refused_and_reaches_nobody(said: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, steer=True)
    with driver(run, "done") as heard:
        ask, answer = run / "steer" / "1.part", run / "steer" / "1.answer"
        ask.symlink_to(said) if said.startswith("/") else ask.write_text(said)
        ask.rename(run / "steer" / "1.ask")
        assert '"refused": true' in until(lambda: answer.exists() and answer.read_text())
    assert heard == []


@pytest.mark.parametrize(
    ("settings", "later", "why"),
    [
        ({}, [], "this search cannot be steered: start it with `fluidtune run --steer SCRIPT`"),
        ({"steer": True}, [], "it has just ended, or has died; Tuner.restore goes on"),
        ({}, [over(1001)], "^the run has ended$"),
    ],
)
def test_why_nobody_answers_is_said_in_one_line(settings: Any, later: Any, why: str, tmp_path: Path) -> None:
    run = written(tmp_path / "run", [begin(1000, 2, settings=settings), added(1000.0, "t_1"), *later]).parent
    with pytest.raises(SteeringRefused, match=why) as refused:
        ask(run, "stop", "t_1")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "pair", ["lr", "=1", " =1", "lr=0,1", "act=relu", "lr=", "lr=" + "[" * 30000, "lr=" + "1" * 5000]
)
def test_a_value_is_json(pair: str) -> None:
    with pytest.raises(SteeringRefused, match="no NAME=VALUE with a value in JSON") as refused:
        parameters_from([pair])
    assert len(str(refused.value)) < 400


DIES = """
import sys, time
from pathlib import Path
from fluidtune.driver_lock import hold, this_machine
from fluidtune.steering.steering_files import SteeringFiles
lock, files = hold(Path(sys.argv[1])), SteeringFiles(Path(sys.argv[1]))
print("there", flush=True)
while not list(files.requests()):
    time.sleep(0.01)
print("taken", flush=True)
time.sleep(600)
"""


def test_a_driver_that_is_killed_before_it_answers_may_have_done_it(tmp_path: Path) -> None:
    run = run_of(tmp_path, steer=True)
    with subprocess.Popen([sys.executable, "-c", DIES, str(run)], stdout=subprocess.PIPE, text=True) as dies:
        run_of(tmp_path, dies.pid, steer=True)
        assert dies.stdout is not None and dies.stdout.readline() == "there\n"

        def kill() -> None:
            assert dies.stdout is not None and dies.stdout.readline() == "taken\n"
            dies.send_signal(signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises(FluidTuneError, match="before it answered, and may have saved the act: see fluidtune why"):
            ask(run, "stop", "t_1")
        thread.join()
    with pytest.raises(SteeringRefused, match="it has just ended, or has died"):
        ask(run, "stop", "t_1")


def test_a_driver_that_does_not_take_an_act_has_not_done_it(tmp_path: Path) -> None:
    run = run_of(tmp_path, steer=True)
    files = SteeringFiles(run)
    with pytest.raises(SteeringRefused, match="no driver of this run answers"):
        ask_driver(run / "fluid_events.jsonl", Act("2", "stop", "t_1", "anna", "page"), 0.2)
    assert list(files.requests()) == []
    files.close()
