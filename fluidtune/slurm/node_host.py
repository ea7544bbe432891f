"""The processes of Ray on one node of a Slurm job: they are started, watched, and end with this process.

``python -m fluidtune.slurm.node_host`` reads one line of its standard input, an `Order`. It prints a line of JSON when
Ray runs, when Ray does not start or has ended, and when Slurm sends SIGTERM. It ends when its standard input does,
which whoever has started it holds open. Then no process of this node is left, nor the job's folder on it.

A node that ``leaves`` is drained at SIGURG, so that trials go elsewhere, and ends when none is left, `LEAVE_S` later at
the latest. Slurm sends a signal to all processes of a step, and Ray's do not end at this one.

The folder has a random name, so that no other job has it, and mode 0700. What a job left that was killed with SIGKILL
goes when the next job of this user begins on the node (`held_folders`).
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from fluidtune.errors import FluidTuneError
from fluidtune.slurm.allocation import share_options
from fluidtune.slurm.descendants import adopt, end_all, ended
from salus_share.held_folders import open_in, sweep

#: What the names of the folders begin with, and the file in each that its holders lock.
PREFIX, LOCK = "ft-slurm-", "lock"
#: Ports that are the same for all Rays of a machine by default, and so collide. 0: the kernel chooses a free one.
_FREE_PORTS = ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
#: Seconds for which Ray may end in its own way.
_PATIENCE_S = 3.0
#: Ray gives a node's agents 15 s to start (node_manager.cc), and its raylet 30 s (node.py), too few on a busy node. A
#: start that failed after longer than this is tried again, as often in all. Judgement: two minutes.
RAYS_START_S, STARTS = 15.0, 4
#: Seconds for which a node that leaves waits for its trials: as a driver that has its notice does by default.
LEAVE_S = 20.0


@dataclass(frozen=True)
class Order:
    """What a node is to do. ``folder``: the job's, on each node. ``address``: that of the head; "": this is the head.

    ``token``: what Ray, from 2.52 on, asks of whoever connects. ``memory``: that of the job (`Allocation`).
    ``leaves``: the node's job may end before the head's.
    """

    folder: str
    token: str
    memory: Sequence[int]
    address: str = ""
    leaves: bool = False

    def variables(self, others: Mapping[str, str]) -> dict[str, str]:
        """The environment of Ray's processes and the driver. ``others``: what else is in it.

        Temporary files are made in the job's folder, unless the site has named another place than that of it.
        """
        own, place = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}, os.path.dirname(self.folder)
        own["RAY_TMPDIR"] = self.folder  # where Tune has its locks of files
        if others.get("TMPDIR", place) == place:
            own["TMPDIR"] = self.folder
        return {**others, **own}


def main() -> None:
    """Host Ray on this node until the standard input ends."""
    line = sys.stdin.buffer.raw.readline()  # type: ignore[union-attr]
    heard, order = adopt(signal.SIGTERM, signal.SIGURG), Order(**json.loads(line))
    place, name = os.path.split(order.folder)
    with ExitStack() as last:
        last.callback(sweep, name, LOCK, place)
        try:
            sweep(PREFIX, LOCK, place)
            last.enter_context(_folder(order))
            _watch(order, heard)
        except OSError as error:
            _say("lost", f"cannot start: {error}: name another folder than {place} by RAY_TMPDIR")
        except FluidTuneError as error:
            _say("lost", " ".join(str(error).split()))
        finally:
            end_all(_PATIENCE_S)


def _folder(order: Order) -> IO[str]:
    """The job's folder on this node, held until the file is closed. Several nodes of a job may be one machine."""
    while True:
        os.makedirs(order.folder, mode=0o700, exist_ok=True)
        lock = open_in(order.folder, LOCK)
        fcntl.flock(lock, fcntl.LOCK_SH)
        path = Path(order.folder, LOCK)
        if path.exists() and os.path.samestat(path.stat(), os.fstat(lock.fileno())):
            return lock
        lock.close()  # another node has removed it in between


def _own(order: Order) -> str:
    """Ray's folder. Several nodes may be one machine, and Ray opens its folder, but not ours, to all users."""
    return f"{order.folder}/{os.getpid():x}"


def _start(order: Order) -> subprocess.Popen[bytes]:
    """Begin to start Ray here, in turn: after who locks the folders' directory, if it can be read, 120 s at most."""
    share = share_options(os.environ, len(os.sched_getaffinity(0)), order.memory)
    options = [f"--temp-dir={_own(order)}", *_FREE_PORTS, *share]
    if order.address:
        options += [f"--address={order.address}"]
    else:
        with socket.create_server(("", 0)) as free:  # for Ray's client server, which takes no 0, and nobody needs
            port = free.getsockname()[1]
        options += ["--head", "--port=0", f"--ray-client-server-port={port}", "--include-dashboard=false"]
    turn = ["sh", "-c", 'command exec 9< "$0"; flock --wait 120 9; "$@" 9<&-', os.path.dirname(order.folder)]
    command = [*turn, sys.executable, "-m", "fluidtune", "node", "start", *options]
    with open_in(order.folder, f"start-{os.getpid()}") as said:
        return subprocess.Popen(command, 0, None, subprocess.DEVNULL, said, said, env=order.variables(os.environ))


def _watch(order: Order, heard: int) -> None:
    """Return when the standard input has ended, or the node has left. FluidTuneError: Ray does not start, or ended."""
    starting, begun, tries, ends, needed = _start(order), time.monotonic(), 1, 0.0, dict[int, str]()
    while True:
        ready, _, _ = select.select([sys.stdin, heard], [], [], max(0.0, ends - time.monotonic()) if ends else None)
        told = heard in ready and {*os.read(heard, 4096)} & {signal.SIGTERM, signal.SIGURG}
        if told and not order.leaves:
            _say("told", "")
        elif told and not ends:
            ends = time.monotonic() + LEAVE_S
            _drain(order, needed)
        for pid, status in ended().items():
            if pid == starting.pid and status and tries < STARTS and time.monotonic() - begun > RAYS_START_S:
                end_all(_PATIENCE_S)
                starting, begun, tries = _start(order), time.monotonic(), tries + 1
            elif pid == starting.pid and status:
                said = Path(order.folder, f"start-{os.getpid()}").read_text(errors="replace").splitlines()
                last = " / ".join([line.strip() for line in said if line.strip()][-3:])
                raise FluidTuneError(f"does not start (RAY_TMPDIR names its folder): {last}")
            elif pid == starting.pid:
                below = psutil.Process().children()
                needed = {each.pid: each.name() for each in below if each.name() in ("raylet", "gcs_server")}
                _say("ready", order.address or Path(_own(order), "ray_current_cluster").read_text().strip())
            elif pid in needed and not ends:
                raise FluidTuneError(f"has ended ({needed[pid]})")
            elif pid in needed:
                ends = time.monotonic()
        if ends and time.monotonic() >= ends:
            _say("left", "leaves, as its job ends")
            return
        if sys.stdin in ready and not os.read(sys.stdin.fileno(), 4096):
            return


def _drain(order: Order, needed: Mapping[int, str]) -> None:
    """Tell Ray that this node is about to end. Then nothing starts here, and Ray ends when nothing is left."""
    for pid in needed:
        told = Path(f"/proc/{pid}/cmdline").read_text().split("\0")  # empty: it has ended
        found = "".join(word.partition("=")[2] for word in told if word.startswith("--node_id="))
        words = [f"--address={order.address}", f"--node-id={found}", "--reason=DRAIN_NODE_REASON_PREEMPTION"]
        command = [str(Path(sys.executable).with_name("ray")), "drain-node", *words, "--reason-message=its job ends"]
        subprocess.Popen(command, env=order.variables(os.environ), stdin=subprocess.DEVNULL)


def _say(what: str, text: str) -> None:
    print(json.dumps([what, text]), flush=True)


if __name__ == "__main__":
    main()
