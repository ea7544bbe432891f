"""The lane service and trials in processes of their own: admission, waiting, leaving, and deaths of either."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.salus_jobs import service_status
from salus_share import Need, Refused, SalusError, StaleToken, policy, service
from salus_share.client import LaneClient
from salus_share.seat_table import FILE, FREE, OFFERED, RESIDENT, Seat, SeatTable
from tests.contracts.processes import until, without_descriptors
from tests.salus.processes import PATIENCE_S, Child, home, kill_service, remove, seat, trial


def client(directory, name: str, **options) -> LaneClient:
    return LaneClient("device", name, directory=directory, **{"capacity": 100, "policy": "FAIR", **options})


def lanes(directory):
    return {lane: set(found["jobs"]) for lane, found in service_status(directory)["lanes"].items()}


def test_an_unknown_need_runs_alone_until_it_is_known(directory) -> None:
    with client(directory, "a") as a, Child(trial, directory, "b", (10, 10)) as b:
        assert b.told() == "admitted"
        with pytest.raises(TimeoutError):
            a.admit(timeout=0.3)
        assert service_status(directory)["waiting"] == []
        b.tell("leave")
        assert b.told() == "left"
        a.admit()
        assert service_status(directory)["reserved"] == 100
        with Child(trial, directory, "c", (10, 10)) as c:
            assert c.silent()
            a.need(Need(20, 30))
            assert c.told() == "admitted"
            assert service_status(directory)["reserved"] == 70


@pytest.mark.parametrize(
    ("need", "error"),
    [(Need(-1, 5), "bytes"), (Need(5, -1), "bytes"), (Need(60, 41), "smaller batch"), (Need(5, float("nan")), "bytes")],
)
def test_wrong_needs_are_refused_and_leave_no_seat(directory, need, error) -> None:
    with client(directory, "a") as a:
        with pytest.raises(SalusError, match=error):
            a.admit(need)
        assert SeatTable(directory).seats() == []
        a.admit(Need(1, 1))
        with pytest.raises(SalusError, match="already"):
            client(directory, "a").admit(Need(1, 1))
        with pytest.raises(SalusError, match="already"):
            a.admit(Need(1, 1))


def test_making_room_and_the_old_token(directory) -> None:
    srtf = {"policy": "SRTF"}
    with Child(trial, directory, "long", (50, 20), {**srtf, "remaining": 100.0}) as long:
        assert long.told() == "admitted"
        long.tell("iterate")
        assert long.told() == "done"
        with Child(trial, directory, "shorter", (60, 20), {**srtf, "remaining": 1.0}) as shorter:
            # Its process is stopped meanwhile. What it does next with its token is refused.
            long.kill(signal.SIGSTOP)
            until(lambda: service_status(directory)["waiting"] == ["shorter"])
            long.kill(signal.SIGCONT)
            for _ in range(2):
                long.tell("iterate")
                assert long.told() == "stale"
            # Its memory is free only when it says so.
            assert shorter.silent(0.1)
            long.tell("come again")
            assert shorter.told() == "admitted"
            assert long.silent(0.1)
            shorter.tell("leave")
            assert shorter.told() == "left"
        assert long.told() == "admitted"
        long.tell("old")
        assert long.told() == "stale"
        long.tell("iterate")
        assert long.told() == "done"


def test_a_need_that_is_told_within_an_iteration_is_refused(directory) -> None:
    with client(directory, "a") as a, client(directory, "b") as b:
        a.admit(Need(10, 10))
        b.admit(Need(10, 20))
        with a.iteration(), pytest.raises(SalusError, match="within an iteration"):
            # There is room for it in the lane of b, where another iteration may be under way.
            a.need(Need(60, 20))
        assert lanes(directory) == {"0": {"a"}, "1": {"b"}}
        a.need(Need(60, 20))
        assert lanes(directory) == {"1": {"a", "b"}}


def test_the_trial_that_was_served_most_makes_room(directory) -> None:
    more = {"policy": "HPT"}
    with Child(trial, directory, "a", (40, 10), more) as a, Child(trial, directory, "b", (40, 10), more) as b:
        assert [a.told(), b.told()] == ["admitted", "admitted"]
        table = SeatTable(directory)
        with table.lock():
            one = next(found for found in table.seats() if found.name == "a")
            one.service = 5.0
            table.write(one)
        with Child(trial, directory, "c", (40, 10), {**more, "rung": 1}):
            until(lambda: service_status(directory)["waiting"] == ["c"])
            b.tell("iterate")
            assert b.told() == "done"
            a.tell("iterate")
            assert a.told() == "stale"


# The service dies


def test_trials_go_on_without_the_service_and_it_comes_back_with_the_same_lanes(directory) -> None:
    with (
        Child(trial, directory, "a", (10, 30)) as a,
        Child(trial, directory, "b", (10, 30)) as b,
    ):
        assert [a.told(), b.told()] == ["admitted", "admitted"]
        with Child(trial, directory, "c", (10, 25)) as c, Child(trial, directory, "waits", (60, 30)) as waits:
            assert c.told() == "admitted"
            until(lambda: service_status(directory)["waiting"] == ["waits"])
            before, reserved = lanes(directory), service_status(directory)["reserved"]
            kill_service(directory)
            for child in (a, b, c):
                child.tell("iterate")
                assert child.told() == "done"
            # The one that waits has lost its service, and brings it back.
            until(lambda: _there(directory) and service_status(directory)["waiting"] == ["waits"])
            assert lanes(directory) == before
            assert service_status(directory)["reserved"] == reserved
            a.tell("need 10 31")
            assert a.told() == "room"
            # One leaves while there is none, one dies.
            kill_service(directory)
            a.tell("leave")
            assert a.told() == "left"
            b.kill()
            c.tell("need 10 20")
            assert c.told() == "room"
            assert waits.told() == "admitted"
            assert {job for jobs in lanes(directory).values() for job in jobs} == {"c", "waits"}


def test_the_seat_table_never_says_more_than_fits_wherever_the_service_is_killed(directory, monkeypatch) -> None:
    made = service.LaneService(directory, 100, "FAIR")
    sums, write = [], SeatTable.write

    def watched(table: SeatTable, seat: Seat) -> None:
        write(table, seat)
        there = [other for other in table.seats() if other.state in (*RESIDENT, OFFERED)]
        lanes = {other.lane: max(one.ephemeral for one in there if one.lane == other.lane) for other in there}
        sums.append(sum(other.persistent for other in there) + sum(lanes.values()))

    monkeypatch.setattr(SeatTable, "write", watched)
    visitors = {}
    for name, need in (("a", (None, None)), ("b", (20, 20)), ("c", (10, 20)), ("d", (10, 10))):
        visitors[name] = service._Visitor(ends()[0])
        asked = {"persistent": need[0], "ephemeral": need[1], "remaining": None, "rung": 0}
        made._answer(visitors[name], {"do": "announce", "name": name, "pid": os.getpid(), **asked})
    # Others are let in to what it gives back; then d needs more, and moves to its lane.
    made._answer(visitors["a"], {"do": "need", "persistent": 10, "ephemeral": 30})
    assert [seat.lane for seat in SeatTable(directory).seats()] == [0, 1, 1, 1]
    made._answer(visitors["d"], {"do": "need", "persistent": 10, "ephemeral": 25})
    assert [seat.lane for seat in SeatTable(directory).seats()] == [0, 1, 1, 0]
    assert max(sums) == 100
    made._listener.close()


def test_one_that_does_not_fit_when_it_is_found_again_is_told_to_leave(directory) -> None:
    table = SeatTable.create(directory, 100, "FAIR")
    unknown = seat(table, "a", token=1, ephemeral=100)
    small = seat(table, "b", token=2, lane=1, persistent=10, ephemeral=10)
    with client(directory, "c") as c:
        service.start(directory, 100, "FAIR").close()
        assert lanes(directory) == {"0": {"a"}, "1": {"b"}}
        assert service_status(directory)["reserved"] == 100
        with small.iteration():
            pass
        with pytest.raises(StaleToken), unknown.iteration():
            pass
        unknown.withdraw()
        with pytest.raises(TimeoutError):
            c.admit(Need(70, 30), timeout=0.5)
    small.withdraw()


def test_what_is_no_number_does_not_end_the_service(directory) -> None:
    with client(directory, "a") as a:
        a.admit(Need(10, 10), remaining=5.0)
        pid = service_status(directory)["pid"]
        for bad in (float("inf"), -1.0):
            with pytest.raises(SalusError, match="remaining"):
                a.progress(bad)
        time.sleep(3 * service.TICK_S)
        assert service_status(directory)["pid"] == pid
        assert SeatTable(directory).seats()[0].remaining == 5.0


@pytest.mark.parametrize(
    "odd",
    [{"rung": 2**31}, {"rung": math.inf}, {"rung": -1}, {"remaining": 10**400}, {"remaining": "x"}, {"pid": math.inf}],
    ids=["large", "infinite", "negative", "no float", "text", "pid"],
)
def test_an_odd_number_is_its_senders_error_and_takes_no_seat(directory, odd) -> None:
    with service.start(directory, 100, "FAIR") as link, client(directory, "a") as a:
        a.admit(Need(10, 10), remaining=5.0)
        pid = service_status(directory)["pid"]
        values = {"pid": os.getpid(), "persistent": 10, "ephemeral": 10, "remaining": 5.0, "rung": 0, **odd}
        link.send(json.dumps({"do": "announce", "name": "b", **values}).encode())
        assert next(iter(odd)) in json.loads(link.recv(service.PACKET))["text"]
        if "pid" not in odd:
            with pytest.raises(SalusError, match=next(iter(odd))):
                a.progress(**{"remaining": 1.0, **odd})
        (only,) = SeatTable(directory).seats()
        assert (only.name, only.remaining, only.rung) == ("a", 5.0, 0)
        assert service_status(directory)["pid"] == pid


def test_more_memory_than_a_number_can_say_is_refused(directory) -> None:
    with client(directory, "a") as a:
        with pytest.raises(Refused, match="larger device"):
            a.admit(Need(10**400, 0))
        a.admit(Need(10, 10))
        pid = service_status(directory)["pid"]
        with pytest.raises(StaleToken):
            a.need(Need(10, 10**400))
        assert service_status(directory)["pid"] == pid


@pytest.mark.parametrize("message", ["[" * 5000, "[]", "{}", '{"do": {}}', '{"do": "announce"}', "1e999", "\x00"])
def test_what_is_no_request_is_answered(directory, message) -> None:
    with service.start(directory, 100, "FAIR") as link:
        pid = service_status(directory)["pid"]
        link.send(message.encode())
        assert json.loads(link.recv(service.PACKET))["is"] == "error"
        assert service_status(directory)["pid"] == pid


def test_an_error_of_another_kind_is_its_senders_too(directory, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError("no room for it")

    with standing_still(directory) as made, service.connect(directory) as link:
        monkeypatch.setattr(made, "_status", full)
        link.send(b'{"do": "status"}')
        go_on(made)
        assert json.loads(link.recv(service.PACKET)) == {"is": "error", "text": "no room for it"}


def test_a_service_without_descriptors_sleeps_and_answers_later(directory) -> None:
    with client(directory, "a") as a:
        a.admit(Need(10, 10))
        pid = service_status(directory)["pid"]
        with without_descriptors(pid, lambda: service.connect(directory)):
            assert service_status(directory)["pid"] == pid
        with a.iteration():
            pass


def test_a_service_without_descriptors_for_a_trials_process_goes_on_and_finds_its_death(directory, monkeypatch) -> None:
    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with (
        standing_still(directory) as made,
        subprocess.Popen(["sleep", "600"]) as process,
        service.connect(directory) as link,
    ):
        monkeypatch.setattr(service.os, "pidfd_open", none_left)
        asked = {"do": "announce", "name": "a", "pid": process.pid, "persistent": 10, "ephemeral": 50}
        link.send(json.dumps({**asked, "remaining": None, "rung": 0}).encode())
        go_on(made)
        assert json.loads(link.recv(service.PACKET))["is"] == "admitted"
        with monkeypatch.context() as patched:
            # It cannot even look whether the process lives.
            patched.setattr(Path, "read_bytes", none_left)
            go_on(made)
            assert made._status()["reserved"] == 60
        process.kill()
        process.wait()
        go_on(made)
        assert made._status()["reserved"] == 0


def _there(directory) -> bool:
    with contextlib.suppress(OSError):
        return bool(service_status(directory))
    return False


def ends() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def test_a_service_that_dies_while_a_trial_comes_back_is_asked_again(directory, monkeypatch) -> None:
    with client(directory, "a") as a:
        a.admit(Need(10, 10))
        dead, closed = ends()
        closed.close()
        dying, other = ends()

        def read_and_die() -> None:
            other.recv(service.PACKET)
            other.close()

        threading.Thread(target=read_and_die).start()
        start, links = service.start, [dead, dying]
        monkeypatch.setattr(service, "start", lambda *settings: links.pop(0) if links else start(*settings))
        a._hang_up()
        a.need(Need(10, 20))
        assert links == []
        with a.iteration():
            pass


@contextlib.contextmanager
def standing_still(directory: Path) -> Iterator[service.LaneService]:
    """A service that has done nothing yet, and does nothing until `go_on`."""
    made = service.LaneService(directory, 100, "FAIR")
    yield made
    made._listener.close()


def go_on(made: service.LaneService) -> None:
    """It does all that has come."""
    while ready := made._selector.select(0):
        for key, _ in ready:
            key.data()
    made._look()


def test_one_that_gave_up_waiting_for_a_service_that_stood_still_holds_no_room(directory) -> None:
    with standing_still(directory) as made:
        with pytest.raises(TimeoutError):
            client(directory, "a").admit(Need(10, 50), timeout=0.1)
        go_on(made)
        assert made._status()["reserved"] == 0
        assert SeatTable(directory).seats() == []


def test_one_that_died_before_its_service_read_what_it_asked_for_holds_no_room(directory) -> None:
    with standing_still(directory) as made:
        with subprocess.Popen(["sleep", "600"]) as process, service.connect(directory) as link:
            asked = {"do": "announce", "name": "a", "pid": process.pid, "persistent": 10, "ephemeral": 50}
            link.send(json.dumps({**asked, "remaining": None, "rung": 0}).encode())
            process.kill()
            process.wait()
            go_on(made)
            assert "has ended" in json.loads(link.recv(service.PACKET))["text"]
        assert made._status()["reserved"] == 0


@pytest.mark.parametrize("how", ["the service has ended", "it is told to leave"])
def test_room_that_is_offered_and_withdrawn_is_asked_for_anew(directory, how, monkeypatch) -> None:
    claim, offers = SeatTable.claim, []

    def late(table: SeatTable, index: int, token: int) -> bool:
        """What happens between the offer and the claim."""
        offers.append(table.seat(index).state)
        if len(offers) == 1:
            if how == "the service has ended":
                table.set_state(index, FREE)
            else:
                table.set_leaving(index)
        return claim(table, index, token)

    monkeypatch.setattr(SeatTable, "claim", late)
    with client(directory, "a") as a:
        a.admit(Need(10, 50))
        assert offers == [OFFERED, OFFERED]
        assert service_status(directory)["reserved"] == 60
        with a.iteration():
            pass


def test_settings_must_agree(directory) -> None:
    with client(directory, "a") as a:
        a.admit(Need(1, 1))
        with pytest.raises(SalusError, match="same settings"):
            client(directory, "b", capacity=101).admit(Need(1, 1))
        with pytest.raises(SalusError, match="same settings"):
            client(directory, "b", policy="PACK").admit(Need(1, 1))


def test_a_service_that_cannot_start_says_why(directory) -> None:
    with pytest.raises(SalusError, match="nosuch"):
        client(directory, "a", policy="nosuch").admit(Need(1, 1))


def test_a_users_policy(directory) -> None:
    name = "tests.salus.test_policies:Last"
    assert policy(name).name == "last"
    with client(directory, "a", policy=name) as a:
        a.admit(Need(1, 1))
        with a.iteration():
            pass


def test_there_is_only_one_service_and_it_ends_by_itself(directory) -> None:
    command = [sys.executable, "-m", "salus_share.service", "--home", str(directory), "--capacity", "100"]
    first = subprocess.Popen([*command, "--idle", "0.3"])
    until(lambda: _there(directory))
    with client(directory, "a") as a:
        a.admit(Need(1, 1))
        assert subprocess.run(command, timeout=60).returncode == 0
        assert service_status(directory)["pid"] == first.pid
        time.sleep(0.8)
        assert first.poll() is None
    assert first.wait(60) == 0
    assert not {"board", "service"} & set(os.listdir(directory))


def test_the_files_of_a_killed_service_are_removed_by_the_test_that_killed_it():
    with home() as directory:
        client = LaneClient("d", "t", capacity=1, directory=directory)
        client.admit(Need(0, 0), timeout=PATIENCE_S)
        client.leave()
        kill_service(directory)
        assert (directory / FILE).exists()
        remove(directory)
        assert not directory.exists()
        remove(directory)


def test_a_service_whose_directory_was_removed_while_it_began_ends_and_leaves_nothing(tmp_path):
    removed = tmp_path / "device"
    command = [sys.executable, "-m", "salus_share.service", "--home", str(removed), "--capacity", "1"]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    assert not removed.exists()
