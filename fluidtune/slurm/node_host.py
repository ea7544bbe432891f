"""The processes of Ray on one node of a Slurm job: they are started, watched, and end with this process.

``python -m fluidtune.slurm.node_host`` reads one line of its standard input, an `Order`. It prints a line of JSON when
Ray runs, when Ray has ended, and when Slurm sends SIGTERM. It ends when its standard input does, which whoever has
started it holds open. Then no process of this node is left, nor the job's folder on it.

The folder has a random name, so that no other job has it, and mode 0700. What a job left that was killed with SIGKILL
goes when the next job of this user begins on the node (`held_folders`).
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import psutil

from fluidtune.cluster.held_folders import hold, open_in, sweep
from fluidtune.errors import FluidTuneError
from fluidtune.slurm.allocation import Memory, check_place, head_options, member_options, share
from fluidtune.slurm.descendants import adopt, end_all, ended, heed

#: What the names of the folders begin with, and the file in each that its holders lock.
PREFIX, LOCK = "ft-slurm-", "lock"
#: The processes without which a node of Ray is none.
_NEEDED = ("raylet", "gcs_server")
#: Seconds for which Ray may end in its own way.
_PATIENCE_S = 5.0
#: Free bytes without which Ray is not started: its logs and sockets need some. Judgement.
_LEAST_DISK = 100 << 20


@dataclass(frozen=True)
class Order:
    """What a node is to do. ``place``: where its folder is made, by ``name``. ``address``: that of the head; "": this
    is the head. ``token``: what Ray asks of whoever connects, from 2.52 on. ``memory``: that of the job.
    """

    place: str
    name: str
    address: str
    token: str
    memory: Memory

    @property
    def folder(self) -> str:
        """The job's folder on each node."""
        return os.path.join(self.place, self.name)

    def line(self) -> str:
        """As one line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    def variables(self, others: Mapping[str, str]) -> dict[str, str]:
        """The environment of Ray's processes and the driver. ``others``: what else is in it.

        Ray asks whoever connects for the token ("Token authentication" in Ray's docs). Temporary files are made in the
        job's folder, unless the site has named another one than ``place``.
        """
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}
        if others.get("TMPDIR", self.place) == self.place:
            own["TMPDIR"] = self.folder
        return {**others, **own}


def order_of(line: str) -> Order:
    """The order that a line of `Order.line` is."""
    read = json.loads(line)
    return Order(**{**read, "memory": Memory(**read["memory"])})


def main() -> None:
    """Host Ray on this node until the standard input ends."""
    line = sys.stdin.buffer.raw.readline()  # type: ignore[attr-defined]
    if not line:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt()
    heard = heed(signal.SIGTERM)
    order = order_of(line.decode())
    lock: IO[str] | None = None
    try:
        check_place(order.place, order.name)
        sweep(PREFIX, LOCK, order.place)
        lock = _folder(order)
        _watch(order, _start(order), heard)
    except (OSError, FluidTuneError) as error:
        _say("lost", _remedied(error, order.place))
    finally:
        end_all(_PATIENCE_S)
        if lock is not None:
            lock.close()
            sweep(order.name, LOCK, order.place)


def _folder(order: Order) -> IO[str]:
    """The job's folder on this node, held until the file is closed. Several nodes of a job may be one machine."""
    while True:
        os.makedirs(order.folder, mode=0o700, exist_ok=True)
        lock = hold(order.folder, LOCK, shared=True)
        path = Path(order.folder, LOCK)
        if path.exists() and os.path.samestat(path.stat(), os.fstat(lock.fileno())):
            break
        lock.close()  # another node has removed it in between
    free = psutil.disk_usage(order.folder).free
    if free < _LEAST_DISK:
        lock.close()
        sweep(order.name, LOCK, order.place)
        raise FluidTuneError(
            f"cannot start: {order.place} has {free >> 20} MiB free of {_LEAST_DISK >> 20} that it needs"
        )
    return lock


def _remedied(error: Exception, place: str) -> str:
    """The error in a line; where the disk is at fault, with what to do."""
    said = " ".join(str(error).split())
    return f"{said}. Free some of {place}, or name another folder by RAY_TMPDIR" if place in said else said


def _start(order: Order) -> int:
    """Begin to start Ray here; what it prints is in a file of the folder. Returns the id of the process."""
    has = share(os.environ, len(os.sched_getaffinity(0)), order.memory)
    if order.address:
        options = member_options(order.address, _own_address(order.address))
    else:
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        options = head_options(order.folder, port)
    command = [sys.executable, "-m", "fluidtune", "node", "start", *options, *has.options()]
    with open_in(order.folder, _said_by_ray()) as said:
        own = order.variables(os.environ)
        return subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, stdout=said, stderr=said).pid


def _said_by_ray() -> str:
    return f"start-{_here()}.log"


def _here() -> str:
    return os.environ.get("SLURMD_NODENAME", "")


def _own_address(head: str) -> str | None:
    """The address by which this node reaches the head, which may have several networks; None: within the machine."""
    host, _, port = head.rpartition(":")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.connect((host.strip("[]"), int(port)))
        own = str(link.getsockname()[0])
    return None if own in (host, "127.0.0.1") else own


def _watch(order: Order, starting: int, heard: int) -> None:
    """Return when the standard input has ended, or Ray here has. ``starting``: the process that starts it.

    Raises:
        FluidTuneError: Ray does not start, or has ended.
    """
    needed = {}
    while True:
        ready, _, _ = select.select([sys.stdin, heard], [], [])
        if heard in ready and signal.SIGTERM in os.read(heard, 4096):
            _say("told", "")
        for pid, status in ended().items():
            if pid == starting and status:
                said = Path(order.folder, _said_by_ray()).read_text(errors="replace").splitlines()
                last = " / ".join([line.strip() for line in said if line.strip()][-3:])
                raise FluidTuneError(f"does not start (status {status}): {last}")
            if pid == starting:
                needed = {child.pid: child.name() for child in psutil.Process().children() if child.name() in _NEEDED}
                _say("ready", order.address or Path(order.folder, "ray_current_cluster").read_text().strip())
            elif pid in needed:
                raise FluidTuneError(f"has ended ({needed[pid]})")
        if sys.stdin in ready and not os.read(sys.stdin.fileno(), 4096):
            return


def _say(what: str, text: str) -> None:
    print(json.dumps({"node": _here(), "what": what, "text": text}), flush=True)


def lines_of(pipe: IO[bytes], heard: Callable[[str, str, str], None]) -> Callable[[], bool]:
    """A function that hands on what nodes have said: node, what, text. It returns False when they say no more."""
    left = b""

    def read() -> bool:
        nonlocal left
        found = os.read(pipe.fileno(), 65536)
        *lines, left = (left + found).split(b"\n")
        for line in lines:
            if line.startswith(b'{"node": '):
                said = json.loads(line)
                heard(said["node"], said["what"], said["text"])
            else:
                sys.stderr.write(line.decode(errors="replace") + "\n")
        return bool(found)

    return read


if __name__ == "__main__":
    main()
