"""Turns on a core between trials and a service, with a real seat table and without Ray."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
from typing import ClassVar

import pytest
from ray.tune import Trainable

from fluidtune.cluster.hosting import leader_host
from fluidtune.cluster.hosting.messages import LoadSpec
from fluidtune.cluster.hosting.worker import Worker
from fluidtune.cluster.sharing import beside
from fluidtune.cluster.sharing.beside import Turn
from fluidtune.group_facts import GroupFacts
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


class Told(Trainable):
    """Reports whether its iteration is within a turn."""

    turns: ClassVar[list[str]] = []

    def step(self):
        return {"within": self.turns.count("begin") - self.turns.count("end")}


@pytest.mark.parametrize("beside", [True, False])
def test_each_iteration_of_a_trial_but_the_first_is_a_turn(monkeypatch, tmp_path, beside):
    class Recorded:
        def __init__(self, trial, served):
            assert (trial, served) == ("t", False)

        def leave(self):
            Told.turns.append("left")

        @contextlib.contextmanager
        def taken(self):
            Told.turns.append("begin")
            yield 0.0
            Told.turns.append("end")

    Told.turns.clear()
    monkeypatch.setattr(leader_host, "Turn", Recorded)
    monkeypatch.setattr(leader_host, "storage_of", lambda spec: None)
    worker = Worker("w", {})
    assert isinstance(worker.load(Told, LoadSpec("t", {"config": {}}, beside=beside)), GroupFacts)
    within = [worker.train().result["within"] for _ in range(3)]
    during = list(Told.turns)
    assert not worker.unload()
    # Of the first one nobody knows how long it takes: it imports libraries and reads data.
    assert within == [0, int(beside), int(beside)]
    assert during == ["begin", "end"] * (2 if beside else 0)
    assert set(Told.turns[len(during) :]) == ({"left"} if beside else set())
