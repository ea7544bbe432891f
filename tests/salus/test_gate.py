"""The gate between real processes: one iteration at a time in a lane, in the policy's order, whichever process dies."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import signal
import socket
import struct
import threading
import time

import pytest

from salus_share import SalusError, seat_table
from salus_share import gate as gate_module
from salus_share.gate import Gate
from salus_share.seat_table import FILE, SeatTable
from salus_share.turns import INSIDE, READY
from tests.contracts.processes import until
from tests.salus.processes import (
    Child,
    at_most,
    die_with_the_lock,
    exclude,
    hold,
    home,
    iterate,
    iterate_unhurried,
)


def seat(directory, name, **more) -> Gate:
    return Gate(directory, name, "FAIR", **more)


def test_an_iteration_that_raises_gives_the_lane_back(directory) -> None:
    one, other = seat(directory, "a"), seat(directory, "b")
    with pytest.raises(RuntimeError), one.iteration():
        raise RuntimeError
    with other.iteration(), pytest.raises(SalusError, match="already"), other.iteration():
        pass
    with one.iteration():
        pass


def test_one_at_a_time_in_a_lane_between_processes_and_threads(directory) -> None:
    # Two processes with two trials each share lane 0. One process has lane 1.
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(Child(exclude, directory, name, lane, 100, 2))
            for name, lane in (("a", 0), ("b", 0), ("c", 1))
        ]
        for child in children:
            assert child.told() == "ready"
        for child in children:
            child.tell("go")
        assert [child.told() for child in children] == [0, 0, 0]


@pytest.mark.parametrize("waiters", [1, 3])
def test_killed_inside_the_lane_is_free_at_once(directory, waiters) -> None:
    with contextlib.ExitStack() as stack:
        holder, *others = [stack.enter_context(Child(hold, directory, f"t{i}")) for i in range(waiters + 1)]
        for child in (holder, *others):
            assert child.told() == "ready"
            child.tell("go")
            if child is holder:
                assert child.told() == "in"
        assert all(child.silent(0.1) for child in others)
        holder.kill()
        for _ in others:
            until(lambda: any(not child.silent(0) for child in others))
            inside = next(child for child in others if not child.silent(0))
            assert inside.told() == "in"
            others.remove(inside)
            assert all(child.silent(0.05) for child in others)
            inside.tell("enough")
            assert inside.told() == "out"


def test_the_dead_are_noticed_without_looking_around(directory, monkeypatch) -> None:
    """The wake-up comes from the kernel, and not from the look that a waiting trial takes now and then."""
    monkeypatch.setattr(gate_module, "LOOK_S", 1000.0)
    with Child(hold, directory, "a") as holder:
        assert holder.told() == "ready"
        holder.tell("go")
        assert holder.told() == "in"
        threading.Timer(0.2, holder.kill).start()
        with seat(directory, "b").iteration():
            pass


def test_an_iteration_is_charged_its_own_seconds_and_a_lane_is_kept_no_longer_than_that(directory, monkeypatch) -> None:
    monkeypatch.setattr(gate_module, "LOOK_S", 1000.0)
    short, long = (Gate(directory, name, "SRTF", remaining=seconds) for name, seconds in (("a", 9.0), ("b", 99.0)))

    def iterate() -> None:
        with long.iteration():
            pass

    thread, began = threading.Thread(target=iterate, daemon=True), time.monotonic()
    with short.iteration():
        thread.start()
        until(lambda: SeatTable(directory).seat(1).state == READY)
        time.sleep(0.2)
        over = time.monotonic()
    # The short one would be next, and does not come.
    thread.join(30)
    one, other = SeatTable(directory).seats()
    assert other.state != READY and 0.2 <= one.service <= time.monotonic() - began
    assert 0 < other.last_s <= time.monotonic() - over and one.remaining == 9.0 - one.service


def test_one_that_has_no_room_for_another_file_waits_for_its_turn_and_notices_deaths(directory, monkeypatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with Child(hold, directory, "a") as holder:
        assert holder.told() == "ready"
        holder.tell("go")
        assert holder.told() == "in"
        gate, third = seat(directory, "b"), seat(directory, "c")
        monkeypatch.setattr(socket, "socket", no_room)
        monkeypatch.setattr(os, "pidfd_open", no_room)
        threading.Timer(0.2, holder.kill).start()
        with gate.iteration():
            waits = threading.Thread(target=lambda: third.iteration().__enter__())
            waits.start()
            until(lambda: SeatTable(directory).seat(2).state == READY)
        waits.join(30)
        assert SeatTable(directory).seat(2).state == INSIDE


def test_killed_with_the_lock_while_a_data_loader_lives_on(directory) -> None:
    with Child(die_with_the_lock, directory) as child:
        loader = child.told()
        try:
            child.process.join()
            with seat(directory, "a").iteration():
                pass
        finally:
            os.kill(loader, signal.SIGKILL)


def test_a_preferred_trial_keeps_the_lane_while_it_fetches_its_next_batch() -> None:
    with (
        home() as directory,
        Child(iterate_unhurried, directory, "short", "SRTF", 0.002, 0.001, 100.0) as short,
        Child(iterate, directory, "long", "SRTF", 0.002, 0.0, 1e6) as long,
    ):
        for child in (long, short):
            assert child.told() == "ready"
            child.tell("go")

        def service() -> tuple[float, float]:
            found = {seat.name: seat.service for seat in SeatTable(directory).seats()}
            return found["short"], found["long"]

        # From the end of its first iteration on the lane is the short one's, in its iterations and between them,
        # unless the machine keeps it away for longer than the lane waits.
        until(lambda: service()[0] > 0)
        before = service()
        until(lambda: service()[0] > before[0] + 0.2)
        after = service()
        assert after[1] - before[1] < (after[0] - before[0]) / 2, "the long one has had the time in between"


def test_a_seat_ends_with_its_trial_and_the_table_with_the_last(directory) -> None:
    first, second = seat(directory, "a"), seat(directory, "b")
    first.leave()
    with pytest.raises(SalusError, match="left its device"), first.iteration():
        pytest.fail("passed")
    with second.iteration():
        third = seat(directory, "c")  # on the seat that was left
        first.leave()
    assert sorted(found.name for found in SeatTable(directory).seats()) == ["b", "c"]
    second.leave()
    third.leave()
    assert os.listdir(directory) == ["lock"]
    # The dead hold no seat, and none of their files is left.
    with Child(hold, directory, "killed") as child:
        assert child.told() == "ready"
        child.kill()
        child.process.join()
        seat(directory, "d").leave()
    assert os.listdir(directory) == ["lock"]


def test_a_trial_that_moves_to_another_lane_is_level_with_those_that_are_there(directory) -> None:
    gate, there = seat(directory, "a"), seat(directory, "b", lane=7)
    for _ in range(3):
        with there.iteration():
            time.sleep(0.01)
    with gate.iteration(), pytest.raises(SalusError, match="within an iteration"):
        gate.settle(7, None, 0)
    gate.settle(7, 5.0, 2)
    moved, other = SeatTable(directory).seats()
    assert (moved.lane, moved.remaining, moved.rung) == (7, 5.0, 2)
    assert moved.service == pytest.approx(other.service - other.last_s)
    with there.iteration():
        gate.settle(7, 4.0, 2)
        assert SeatTable(directory).seat(0).service == moved.service


def test_whoever_gives_up_waiting_holds_nobody_up(directory) -> None:
    first, second = seat(directory, "a"), seat(directory, "b")

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with first.iteration():
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt), second.iteration():
                pytest.fail("passed")
    finally:
        signal.signal(signal.SIGALRM, before)
    for gate in (first, second, first):
        with gate.iteration():
            pass


def test_what_is_no_seat_table(tmp_path) -> None:
    with pytest.raises(SalusError, match="no seat table"):
        SeatTable(tmp_path)
    (tmp_path / FILE).write_bytes(b"\0" * 4096)
    with pytest.raises(SalusError, match="not a seat table"):
        seat(tmp_path, "a")


def test_trials_of_another_container_are_not_taken_to_be_dead(directory) -> None:
    seat(directory, "a")
    with (directory / FILE).open("r+b") as table:
        table.seek(table.read().index(struct.pack("=Q", os.stat("/proc/self/ns/pid").st_ino)))
        table.write(struct.pack("=Q", 1))
    with pytest.raises(SalusError, match="another container"):
        seat(directory, "b")


def test_who_cannot_be_looked_at_is_taken_to_live(directory) -> None:
    """Seen: a trial without a free descriptor took its living neighbours for dead: others got their memory."""
    seat(directory, "a")
    table, free = SeatTable(directory), os.dup(0)
    os.close(free)
    with at_most(resource.RLIMIT_NOFILE, free), table.lock():
        seat_table.bury(table, table.seats())
    assert len(table.seats()) == 1


@pytest.mark.faults
def test_kills_at_random_moments(directory) -> None:
    """Twenty trials of a lane are killed at random moments. The one that is left goes on."""
    random.seed(1)
    gate = seat(directory, "mine")
    for turn in range(10):
        with (
            Child(iterate, directory, f"a{turn}", "FAIR", 0.001, 0.0) as a,
            Child(iterate, directory, f"b{turn}", "FAIR", 0.002, 0.0) as b,
        ):
            for child in (a, b):
                assert child.told() == "ready"
                child.tell("go")
            for child in (a, b):
                deadline = time.monotonic() + random.uniform(0, 0.2)
                while time.monotonic() < deadline:
                    with gate.iteration():
                        pass
                child.kill()
                for _ in range(20):
                    with gate.iteration():
                        pass
