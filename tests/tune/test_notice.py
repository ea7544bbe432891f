"""A notice goes from SIGTERM to the end of the run, or of its time; a second one, and a script's own way, hold."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from fluidtune.tune.notice import COMMITS_PART, Notice


@pytest.fixture
def before() -> Any:
    """What SIGTERM does before a test, and after it."""
    found = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield signal.SIG_DFL
    signal.signal(signal.SIGTERM, found)


@pytest.mark.parametrize("ends", ["all saved", "time over"])
def test_trials_are_saved_first_and_then_the_run_ends(ends: str, before: Any) -> None:
    now = [5.0]
    notice = Notice(30.0, lambda: now[0])
    notice.listen()
    assert not notice.advance(lambda: False) and not notice.given
    signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before, "the next one ends the driver at once"
    assert notice.advance(lambda: False) and notice.state == "leaving"
    assert not notice.advance(lambda: True)
    if ends == "time over":
        now[0] += COMMITS_PART * 30.0
    assert notice.advance(lambda: ends == "time over") and notice.state == "over"
    assert not notice.advance(lambda: False)
    notice.close()


def test_the_end_of_its_time_is_a_second_signal(before: Any) -> None:
    notice = Notice(0.05)
    heard: list[int] = []
    notice.listen()
    signal.raise_signal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    while not heard:
        time.sleep(0.01)
    notice.close()


def test_a_script_keeps_its_own_way_with_the_signal(before: Any) -> None:
    for own in (signal.SIG_IGN, lambda number, frame: None):
        signal.signal(signal.SIGTERM, own)
        notice = Notice(30.0)
        notice.listen()
        assert signal.getsignal(signal.SIGTERM) is own
        notice.close()
        assert signal.getsignal(signal.SIGTERM) is own
