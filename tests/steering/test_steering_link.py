"""The way of an act to a driver and back: real sockets, and why nobody answers."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fluidtune.errors import FluidTuneError
from fluidtune.report.events import this_machine
from fluidtune.steering import steering_link
from fluidtune.steering.acts import Act, Answer
from fluidtune.steering.asking import SteeringRefused, ask, parameters_from
from fluidtune.steering.json_values import LONGEST
from fluidtune.steering.steering_link import SteeringLink, own_name, send
from tests.report.makers import added, begin, over, written


@contextmanager
def driver(run: Path, answer: Answer) -> Iterator[list[Act]]:
    """A driver that gives this answer to whatever it is asked."""
    link, heard, ends = SteeringLink(run), [], threading.Event()

    def serve() -> None:
        while not ends.wait(0.01):
            for request in link.requests():
                heard.append(request.act)
                request.answer(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    yield heard
    ends.set()
    thread.join()
    link.close()


def test_an_act_that_is_too_long_is_not_sent(tmp_path: Path) -> None:
    run = run_of(tmp_path, steer=True)
    with driver(run, Answer(False, "as you wish")) as heard:
        assert ask(run, "clone", "t_1", [f'x="{"a" * (LONGEST - 1000)}"']) == "as you wish"
        with pytest.raises(FluidTuneError, match=f"of at most {LONGEST}"):
            ask(run, "clone", "t_1", [f'x="{"a" * LONGEST}"'])
    assert len(heard) == 1


def test_who_has_connected_and_speaks_after_the_end_is_refused(tmp_path: Path) -> None:
    """An act that is queued when the run ends is refused as well."""
    run = run_of(tmp_path, steer=True)
    link = SteeringLink(run)
    queued = link.ask(Act("1", "stop", "t_1", "ann", "page"))
    with socket.socket(socket.AF_UNIX) as late:
        late.settimeout(steering_link.PATIENCE_S)
        late.connect(steering_link._address(run))
        while not any("process_request_thread" in thread.name for thread in threading.enumerate()):
            time.sleep(0.01)  # the driver has taken the connection
        link.close()
        late.sendall(json.dumps(asdict(Act("2", "stop", "t_1", "ann", "page"))).encode() + b"\n")
        with late.makefile("rb") as answer:
            assert json.loads(answer.readline()) == {"refused": True, "words": "the run has just ended"}
    assert queued.result(timeout=0) == Answer(True, "the run has just ended")


def run_of(path: Path, **settings: Any) -> Path:
    start = {**begin(1000, 2), "settings": settings, "machine": this_machine()}
    return written(path / "run", [start, {**added(1000.0, "t_1"), "name": "first"}]).parent


def test_an_act_comes_to_the_driver_with_its_users_name(tmp_path: Path) -> None:
    """By the kernel's word: what the message says of the user does not count."""
    run = run_of(tmp_path, steer=True)
    with driver(run, Answer(False, "as you wish")) as heard:
        assert ask(run, "clone", "fresh", ["lr=0.5", 'act="relu"', "net/sizes=[1, 2]"], True) == "as you wish"
        send(run, Act("2", "stop", "t_1", "somebody else", "page"))
        with pytest.raises(OSError):  # one driver a run
            SteeringLink(run)
    clone, stop = heard
    assert (clone.kind, clone.trial, clone.by, clone.via) == ("clone", "fresh", own_name(), "command line")
    assert clone.parameters == {"lr": 0.5, "act": "relu", "net/sizes": [1, 2]} and clone.from_checkpoint
    assert (stop.by, stop.via) == (own_name(), "page")


def test_a_refusal_is_an_error_and_another_users_process_gets_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    run = run_of(tmp_path, steer=True)
    with driver(run, Answer(True, "it has ended already")) as heard:
        with pytest.raises(SteeringRefused, match="it has ended already"):
            ask(run, "stop", "t_1")
        monkeypatch.setattr(steering_link, "peer_user", lambda link: 4242)
        with pytest.raises(FluidTuneError, match="user 4242 answers in the place"):
            ask(run, "stop", "t_1")
    assert len(heard) == 1


@pytest.mark.parametrize(
    "said",
    [
        b"no json\n",
        b"[]\n",
        b'{"id": "1", "kind": "burn", "trial": "t", "via": "page"}\n',
        b"[" * 30000 + b"\n",
        b'{"id": "1", "kind": "clone", "trial": "t", "via": "page", "parameters": {"lr": NaN}}\n',
    ],
)
def test_what_is_no_act_is_refused_and_reaches_nobody(said: bytes, tmp_path: Path) -> None:
    run = run_of(tmp_path, steer=True)
    with driver(run, Answer(False, "done")) as heard, socket.socket(socket.AF_UNIX) as link:
        link.connect(steering_link._address(run))
        link.sendall(said)
        with link.makefile("rb") as answer:
            assert json.loads(answer.readline())["refused"]
    assert heard == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"settings": {}}, "this search cannot be steered: start it with `fluidtune run --steer SCRIPT`"),
        ({"settings": {"steer": True}, "machine": "far, 8 cores"}, "on another machine, and is steered there: far"),
        ({"settings": {"steer": True}}, "it has just ended, or has died; Tuner.restore goes on"),
    ],
)
def test_why_nobody_answers_is_said_in_one_line(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    start = {**begin(1000, 2), "machine": this_machine(), **change}
    run = written(tmp_path / "run", [start, added(1000.0, "t_1")]).parent
    with pytest.raises(SteeringRefused, match=why) as refused:
        ask(run, "stop", "t_1")
    assert "\n" not in str(refused.value)


def test_a_run_that_has_ended_says_so(tmp_path: Path) -> None:
    run = written(tmp_path / "run", [begin(1000, 2), added(1000.0, "t_1"), over(1001)]).parent
    with pytest.raises(SteeringRefused) as refused:
        ask(run, "keep", "t_1")
    assert str(refused.value) == "the run has ended"


@pytest.mark.parametrize(
    "pair", ["lr", "=1", " =1", "lr=0,1", "act=relu", "lr=", "lr=" + "[" * 30000, "lr=" + "1" * 5000]
)
def test_a_value_is_json(pair: str) -> None:
    with pytest.raises(SteeringRefused, match="no NAME=VALUE with a value in JSON") as refused:
        parameters_from([pair])
    assert len(str(refused.value)) < 400


def test_a_name_is_set_once() -> None:
    with pytest.raises(SteeringRefused, match="lr is set twice"):
        parameters_from(["lr=1", "lr =2"])


def test_a_driver_that_dies_before_it_answers_may_have_done_it(tmp_path: Path) -> None:
    run = run_of(tmp_path, steer=True)
    with socket.socket(socket.AF_UNIX) as driver:
        driver.bind(steering_link._address(run))
        driver.listen()

        def die() -> None:
            asked, _ = driver.accept()
            with asked, asked.makefile("rb") as act:
                act.readline()

        dies = threading.Thread(target=die)
        dies.start()
        with pytest.raises(FluidTuneError, match="before it answered, and may have saved the act: see fluidtune why"):
            ask(run, "stop", "t_1")
        dies.join()
