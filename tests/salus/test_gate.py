"""The gate between real processes: one iteration at a time in a lane, in the policy's order, whichever process dies."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import threading
import time

import pytest

from salus_share import SalusError, StaleToken
from salus_share import gate as gate_module
from salus_share.packing import SEATS
from salus_share.seat_table import SeatTable
from salus_share.turns import INSIDE, READY
from tests.contracts.processes import until
from tests.salus.processes import Child, die_with_the_lock, exclude, hold, home, iterate, iterate_unhurried, seat


@pytest.fixture
def directory():
    with home() as made:
        SeatTable.create(made, 1 << 30, "FAIR")
        yield made


def test_a_trial_alone_passes_and_is_counted(directory) -> None:
    table = SeatTable(directory)
    gate = seat(table, "a", token=1, remaining=5.0)
    for _ in range(3):
        with gate.iteration():
            time.sleep(0.01)
    found = table.seat(0)
    assert 0.03 <= found.service < 5
    assert found.remaining == pytest.approx(5.0 - found.service)
    assert found.last_turn == 3


def test_an_iteration_that_raises_gives_the_lane_back(directory) -> None:
    table = SeatTable(directory)
    one, other = seat(table, "a", token=1), seat(table, "b", token=2)
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
            stack.enter_context(Child(exclude, directory, name, token, lane, 100, 2))
            for name, token, lane in (("a", 1, 0), ("b", 3, 0), ("c", 5, 1))
        ]
        for child in children:
            assert child.told() == "ready"
        for child in children:
            child.tell("go")
        assert [child.told() for child in children] == [0, 0, 0]


@pytest.mark.parametrize("waiters", [1, 3])
def test_killed_inside_the_lane_is_free_at_once(directory, waiters) -> None:
    with contextlib.ExitStack() as stack:
        holder, *others = [stack.enter_context(Child(hold, directory, f"t{i}", i + 1)) for i in range(waiters + 1)]
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
    with Child(hold, directory, "a", 1) as holder:
        assert holder.told() == "ready"
        holder.tell("go")
        assert holder.told() == "in"
        threading.Timer(0.2, holder.kill).start()
        with seat(SeatTable(directory), "b", token=2).iteration():
            pass


def test_one_that_has_no_room_for_another_file_waits_for_its_turn_and_notices_deaths(directory, monkeypatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with Child(hold, directory, "a", 1) as holder:
        assert holder.told() == "ready"
        holder.tell("go")
        assert holder.told() == "in"
        gate, third = seat(SeatTable(directory), "b", token=2), seat(SeatTable(directory), "c", token=3)
        monkeypatch.setattr(gate_module.socket, "socket", no_room)
        monkeypatch.setattr(gate_module.os, "pidfd_open", no_room)
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
            with seat(SeatTable(directory), "a", token=1).iteration():
                pass
        finally:
            os.kill(loader, signal.SIGKILL)


def test_a_preferred_trial_keeps_the_lane_while_it_fetches_its_next_batch() -> None:
    with home() as directory:
        table = SeatTable.create(directory, 1 << 30, "SRTF")
        with (
            Child(iterate_unhurried, directory, "short", 1, 0.002, 0.001, {"remaining": 100.0}) as short,
            Child(iterate, directory, "long", 2, 0.002, 0.0, {"remaining": 1e6}) as long,
        ):
            for child in (long, short):
                assert child.told() == "ready"
                child.tell("go")

            def service() -> tuple[float, float]:
                found = {seat.name: seat.service for seat in table.seats()}
                return found["short"], found["long"]

            # From the end of its first iteration on the lane is the short one's, in its iterations and between them,
            # unless the machine keeps it away for longer than the lane waits.
            until(lambda: service()[0] > 0)
            before = service()
            until(lambda: service()[0] > before[0] + 0.2)
            after = service()
            assert after[1] - before[1] < (after[0] - before[0]) / 2, "the long one has had the time in between"


def test_a_trial_that_was_told_to_leave_is_refused_with_its_old_token(directory) -> None:
    table = SeatTable(directory)
    gate = seat(table, "a", token=1)
    with gate.iteration(), table.lock():
        # The word to leave comes within an iteration, which it ends.
        assert gate._turns.pause(0, time.monotonic()) == []
    with pytest.raises(StaleToken, match="token 1"), gate.iteration():
        pytest.fail("passed")
    gate.withdraw()
    assert [found.name for found in table.seats()] == ["a"]
    seat(table, "a", token=2)
    with pytest.raises(StaleToken), gate.iteration():
        pytest.fail("passed")


def test_a_trial_that_waits_is_told_too(directory) -> None:
    table = SeatTable(directory)
    first, second = seat(table, "a", token=1), seat(table, "b", token=2)
    refused = []

    def wait() -> None:
        try:
            with second.iteration():
                pass
        except StaleToken as error:
            refused.append(error)

    thread = threading.Thread(target=wait)
    with first.iteration():
        thread.start()
        until(lambda: table.seat(1).state == READY)
        with table.lock():
            woken = first._turns.pause(1, time.monotonic())
        for found in woken:
            first._waker.wake(table, found)
        thread.join(60)
    assert len(refused) == 1


def test_whoever_gives_up_waiting_holds_nobody_up(directory) -> None:
    table = SeatTable(directory)
    first, second = seat(table, "a", token=1), seat(table, "b", token=2)

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
    (tmp_path / "board").write_bytes(b"\0" * 4096)
    with pytest.raises(SalusError, match="not a seat table"):
        SeatTable(tmp_path)


def test_seats_run_out_and_names_are_short(directory) -> None:
    table = SeatTable(directory)
    with table.lock():
        with pytest.raises(SalusError, match="shorter"):
            table.take_seat("x" * 65, os.getpid())
        for index in range(SEATS):
            table.take_seat(str(index), os.getpid())
        with pytest.raises(SalusError, match="another one"):
            table.take_seat("one more", os.getpid())


@pytest.mark.faults
def test_kills_at_random_moments(directory) -> None:
    """Twenty trials of a lane are killed at random moments. The one that is left goes on."""
    random.seed(1)
    gate = seat(SeatTable(directory), "mine", token=1)
    for turn in range(10):
        with (
            Child(iterate, directory, f"a{turn}", 2 * turn + 2, 0.001, 0.0, {}) as a,
            Child(iterate, directory, f"b{turn}", 2 * turn + 3, 0.002, 0.0, {}) as b,
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
