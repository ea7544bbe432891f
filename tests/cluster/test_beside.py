"""Turns on a core between trials and a service, with a real seat table and without Ray."""

from __future__ import annotations

import logging
import os
import shutil
import threading

import pytest

from fluidtune.cluster.sharing import beside
from fluidtune.cluster.sharing.beside import Turn
from salus_share.gate import Gate
from salus_share.seat_table import SeatTable, home
from salus_share.turns import READY
from tests.contracts.processes import until

#: Seconds until a test gives up.
PATIENCE_S = 120.0


@pytest.fixture
def lane():
    """The directory of a lane. It is where lanes are, in memory."""
    place = home(f"beside-test-{os.getpid()}")
    yield place
    shutil.rmtree(place)


def test_a_batch_goes_before_every_trial_that_waits(lane):
    trials = [Turn(f"t{number}", served=False, directory=lane) for number in range(2)]
    service = Turn("service", served=True, directory=lane)
    order, threads = [], []

    def run(name, turn):
        with turn.taken():
            order.append(name)

    def wait_in_line(name, turn):
        """Start a thread that waits for its turn, and return when it does."""
        threads.append(threading.Thread(target=run, args=(name, turn)))
        threads[-1].start()
        until(lambda: _is_ready(turn), PATIENCE_S)

    first = Turn("first", served=False, directory=lane)
    with first.taken():
        for number, turn in enumerate(trials):
            wait_in_line(f"trial {number}", turn)
        wait_in_line("batch", service)
        assert order == []
    for thread in threads:
        thread.join(PATIENCE_S)
    assert order[0] == "batch" and sorted(order[1:]) == ["trial 0", "trial 1"]
    for turn in (first, service, *trials):
        turn.leave()


def _is_ready(turn):
    return any(seat.name == turn._name and seat.state == READY for seat in SeatTable(turn._directory).seats())


def test_without_a_seat_everybody_goes_on_and_says_so(caplog, tmp_path):
    Gate(tmp_path, "other", "FAIR")
    turn = Turn("trials", served=False, directory=tmp_path)
    ran = []
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with turn.taken() as waited:
                ran.append(waited)
    assert len(ran) == 3
    assert [record.message.split(":")[1] for record in caplog.records] == [
        f" {turn._name} takes no turns with the others on its core"
    ]


def test_an_error_of_the_iteration_is_its_own(lane):
    turn = Turn("trials", served=False, directory=lane)
    with pytest.raises(beside.SalusError, match="of the trial's own"), turn.taken():
        raise beside.SalusError("of the trial's own")
    turn.leave()
