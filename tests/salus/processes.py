"""What the tests run in processes of their own, and how they talk to them. It imports little: it is spawned often."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.salus_jobs import service_status
from salus_share import Need, StaleToken, turns
from salus_share.client import LaneClient
from salus_share.gate import Gate
from salus_share.seat_table import SeatTable
from salus_share.turns import IDLE
from tests.contracts.processes import until

#: How long a test waits for what must happen, seconds. A failure takes this long, a success some milliseconds.
PATIENCE_S = 60.0
_spawn = multiprocessing.get_context("spawn")


@contextlib.contextmanager
def mps_server(folder: Path) -> Iterator[int]:
    """The pid of a process that is called as an MPS server is, and only sleeps."""
    program = folder / "nvidia-cuda-mps-server"
    shutil.copy(shutil.which("sleep") or "", program)
    with subprocess.Popen([program, "600"]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


@contextlib.contextmanager
def home() -> Iterator[Path]:
    """A short path for a device (a socket's has at most 107 letters). Its service is killed after the test."""
    directory = Path(tempfile.mkdtemp(prefix="salus-"))
    try:
        yield directory
    finally:
        remove(directory)


def remove(directory: Path) -> None:
    """Kill the service of a device, wait until it is gone, and remove its files, which a killed service leaves.

    A service that ends by itself removes its files, and leaves the empty directory to the next one.
    """
    with contextlib.suppress(OSError):
        kill_service(directory)
    for pid in _services(directory):
        # It was about to start, and would make the directory again.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: not _lives(pid))
    if directory.exists():
        shutil.rmtree(directory)


def kill_service(directory: Path) -> None:
    """SIGKILL the device's service, and wait until it is gone."""
    pid = service_status(directory)["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: not _lives(pid))


def _services(directory: Path) -> list[int]:
    """The process ids of the device's services, whether they answer or not."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes().split(b"\0")
            if b"salus_share.service" in command and os.fsencode(directory) in command:
                found.append(int(process.name))
    return found


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    return False


def seat(table: SeatTable, name: str, *, lane: int = 0, token: int, **fields: Any) -> Gate:
    """A gate of an admitted trial in this process, without a service."""
    with table.lock():
        made = table.take_seat(name, os.getpid())
        made.lane, made.token, made.arrival, made.state = lane, token, token, IDLE
        for key, value in fields.items():
            setattr(made, key, value)
        table.write(made)
    return Gate(table, made.index, token)


class Child:
    """A process that runs ``work(pipe, *args)``."""

    def __init__(self, work: Callable[..., None], *args: Any) -> None:
        self._pipe, theirs = _spawn.Pipe()
        self.process = _spawn.Process(target=work, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def told(self) -> Any:
        """What the process sends next."""
        if not self._pipe.poll(PATIENCE_S):
            raise AssertionError(f"process {self.process.pid} is silent")
        return self._pipe.recv()

    def silent(self, seconds: float = 0.3) -> bool:
        """Whether it sends nothing for a while."""
        return not self._pipe.poll(seconds)

    def tell(self, what: Any) -> None:
        self._pipe.send(what)

    def kill(self, how: int = signal.SIGKILL) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, how)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()


# Work


def hold(pipe: Connection, directory: Path, name: str, token: int) -> None:
    """Run iterations that last until a message comes. Sends "in" at the beginning of each and "out" after it."""
    gate = seat(SeatTable(directory), name, token=token)
    pipe.send("ready")
    while pipe.recv() == "go":
        with gate.iteration():
            pipe.send("in")
            pipe.recv()
        pipe.send("out")


def die_with_the_lock(pipe: Connection, directory: Path) -> None:
    """Take the table's lock and die; a forked child, such as a data loader's worker, lives on."""
    table = SeatTable(directory)
    with table.lock():
        child = os.fork()
        if child == 0:
            time.sleep(PATIENCE_S)
            os._exit(0)
        pipe.send(child)
        os.kill(os.getpid(), signal.SIGKILL)


def exclude(pipe: Connection, directory: Path, name: str, token: int, lane: int, iterations: int, threads: int) -> None:
    """Run iterations that look whether another trial is in the lane. Sends how often one was."""
    inside = directory / f"inside-{lane}"
    table = SeatTable(directory)
    gates = [seat(table, f"{name}-{i}", lane=lane, token=token + i) for i in range(threads)]
    met = []

    def work(gate: Gate) -> None:
        for _ in range(iterations):
            with gate.iteration():
                try:
                    fd = os.open(inside, os.O_CREAT | os.O_EXCL)
                except FileExistsError:
                    met.append(gate)
                    continue
                if gate.token % 2:
                    time.sleep(0.0005)
                os.unlink(inside)
                os.close(fd)

    pipe.send("ready")
    pipe.recv()
    running = [threading.Thread(target=work, args=(gate,)) for gate in gates]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    pipe.send(len(met))


def iterate(
    pipe: Connection, directory: Path, name: str, token: int, seconds: float, gap: float, fields: dict[str, Any]
) -> None:
    """Run iterations of ``seconds`` with gaps of ``gap`` seconds until a message comes. Sends how many it ran."""
    gate = seat(SeatTable(directory), name, token=token, **fields)
    pipe.send("ready")
    pipe.recv()
    done = 0
    while not pipe.poll():
        with gate.iteration():
            time.sleep(seconds)
        done += 1
        time.sleep(gap)
    pipe.send(done)


def iterate_unhurried(pipe: Connection, *args: Any) -> None:
    """As `iterate`, but the lane is kept for a minute between two iterations, so that a slow machine is in time."""
    turns.LINGER_PART, turns.LINGER_S = 1e6, 60.0
    iterate(pipe, *args)


def trial(
    pipe: Connection, directory: Path, name: str, need: tuple[int, int] | None, more: dict[str, Any] | None = None
) -> None:
    """A trial that does what each message says: "iterate", "need P E", "come again", "leave", "old". It answers all."""
    options = {"capacity": 100, "policy": "FAIR", "remaining": None, "rung": 0, **(more or {})}
    admission = {key: options.pop(key) for key in ("remaining", "rung")}
    client = LaneClient("device", name, directory=directory, **options)
    try:
        client.admit(None if need is None else Need(*need), **admission)
    except ValueError as error:
        pipe.send(repr(error))
        return
    pipe.send("admitted")
    old = client._gate
    while True:
        try:
            match pipe.recv().split():
                case ["iterate"]:
                    with client.iteration():
                        pass
                    pipe.send("done")
                case ["need", p, e]:
                    client.need(Need(int(p), int(e)))
                    pipe.send("room")
                case ["come", "again"]:
                    client.leave()
                    client.admit(Need(*need), **admission)
                    pipe.send("admitted")
                case ["old"]:
                    assert old is not None
                    with old.iteration():
                        pass
                    pipe.send("passed with an old token")
                case ["leave"]:
                    client.leave()
                    pipe.send("left")
        except StaleToken:
            pipe.send("stale")
        except ValueError as error:
            pipe.send(repr(error))
