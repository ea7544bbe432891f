"""A notice goes from SIGTERM to the end of the run, or of its time; a second one, and a script's own way, hold."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from fluidtune.tune.notice import COMMITS_PART, Notice, seconds_for, why_not_again


@pytest.fixture(autouse=True)
def default() -> Iterator[None]:
    found = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, found)


@pytest.mark.parametrize("in_time", [True, False])
def test_trials_are_saved_first_and_then_the_run_ends(in_time: bool) -> None:
    now = [5.0]
    notice = Notice(30.0, clock=lambda: now[0])
    notice.listen()
    assert not notice.advance(lambda: False)
    signal.raise_signal(signal.SIGTERM)
    assert notice.advance(lambda: False) and notice.state == "leaving"
    assert not notice.advance(lambda: True)
    now[0] += 0.0 if in_time else COMMITS_PART * 30.0
    assert notice.advance(lambda: not in_time) and notice.state == "over"
    assert not notice.advance(lambda: False)
    notice.close()


@pytest.mark.parametrize("later", [True, False])
def test_a_second_signal_and_the_end_of_the_time_end_the_driver(later: bool) -> None:
    """Seen: a driver that its notice's end had ended was not run again, as its status was 15."""

    def drive() -> None:
        now = [5.0]
        notice = Notice(30.0 if later else 0.05, lambda: 76, lambda: now[0])
        notice.listen()
        for _ in range(2):  # as from Slurm, and from the program that started this one
            signal.raise_signal(signal.SIGTERM)
        now[0] += 2.0
        while True:
            with suppress(BaseException):  # as code of Ray's does, in which the main thread may be
                if later:
                    signal.raise_signal(signal.SIGTERM)
                time.sleep(60.0)

    driver = multiprocessing.get_context("fork").Process(target=drive)
    driver.start()
    driver.join(60.0)
    assert driver.exitcode == 76


def test_a_scripts_own_way_holds() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    own, notice = signal.getsignal(signal.SIGTERM), Notice(30.0)
    notice.listen()
    assert signal.getsignal(signal.SIGTERM) is own
    notice.close()


def test_a_job_of_slurm_that_ends_sooner_leaves_less(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    assert seconds_for(30.0) == 30.0
    monkeypatch.setenv("FLUIDTUNE_NOTICE_S", "50")
    assert seconds_for(30.0) == 30.0 and not caplog.text
    assert seconds_for(120.0) == 50.0 and "notice_s=120: this Slurm job leaves its driver 50 s" in caplog.text


@pytest.mark.parametrize("count", ["", "0", "1"])
def test_a_job_that_gets_nowhere_is_not_begun_again(count: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by reading: a script without `Tuner.restore` was requeued for ever."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", count)
    whys = [why_not_again(restored, reported) for restored, reported in [(True, True), (False, True), (True, False)]]
    assert [bool(why) for why in whys] == [False, count == "1", count == "1"]
