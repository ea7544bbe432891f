"""A notice goes from SIGTERM to the end of the run, or of its time; a second one, and a script's own way, hold."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from fluidtune.tune.notice import COMMITS_PART, Notice


@pytest.fixture(autouse=True)
def default() -> Iterator[None]:
    found = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, found)


@pytest.mark.parametrize("in_time", [True, False])
def test_trials_are_saved_first_and_then_the_run_ends(in_time: bool) -> None:
    now = [5.0]
    notice = Notice(30.0, lambda: now[0])
    notice.listen()
    assert not notice.advance(lambda: False) and not notice.given
    signal.raise_signal(signal.SIGTERM)
    assert notice.advance(lambda: False) and notice.state == "leaving"
    assert not notice.advance(lambda: True)
    now[0] += 0.0 if in_time else COMMITS_PART * 30.0
    assert notice.advance(lambda: not in_time) and notice.state == "over"
    assert not notice.advance(lambda: False)
    notice.close()


def test_a_second_signal_and_the_end_of_the_time_do_what_the_script_had() -> None:
    notice = Notice(0.05)
    notice.listen()
    signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    while not heard:
        time.sleep(0.01)
    own = signal.getsignal(signal.SIGTERM)
    for other in (notice, Notice(30.0)):
        other.listen()
        assert signal.getsignal(signal.SIGTERM) is own
        other.close()
