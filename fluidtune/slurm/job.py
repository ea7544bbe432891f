"""A search in a Slurm job, where its script runs: what `course` says is carried out.

The head's Ray is a child of this process, and srun starts the others on the job's other nodes. Each ends when this
process lets go of the pipe by which it has its `Order`, however that happens.
"""

from __future__ import annotations

import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fluidtune.errors import FluidTuneError
from fluidtune.slurm.allocation import Allocation, check_place, checked, memory, srun_variables
from fluidtune.slurm.course import (
    JOIN_S,
    AllEnded,
    Course,
    DriverEnded,
    EndAll,
    Event,
    Exit,
    Instruction,
    Late,
    Lost,
    Noticed,
    Ready,
    Requeue,
    Say,
    StartDriver,
    StartMembers,
    TellDriver,
)
from fluidtune.slurm.descendants import adopt, await_end, end_all, ended, heed
from fluidtune.slurm.node_host import PREFIX, Order, lines_of

#: Seconds that nodes have to end before they are killed.
_PATIENCE_S = 20.0
#: The states of a job (squeue(1)) in which nobody but its time limit has ended it. A cancelled job stays cancelled, and
#: a preempted one is requeued by Slurm.
_OURS = ("RUNNING", "TIMEOUT", "COMPLETING")


def run_in(found: Allocation, words: Sequence[str]) -> int:
    """Run `fluidtune run` with these words on all nodes of the job, and return its exit status.

    Raises:
        FluidTuneError: Slurm cannot be asked, or the step has several tasks.
    """
    checked(found)
    if not found.here:  # salloc has left us where it was typed
        command = ["srun", f"--jobid={found.job}", "--overlap", "--nodes=1", "--ntasks=1"]
        own = [sys.executable, "-m", "fluidtune", "run", *words]
        return subprocess.call([_program("srun"), *command[1:], *own], env=srun_variables(os.environ))
    nodes = _asked("scontrol", "show", "hostnames", found.hosts).split()
    return _Job(found, [node for node in nodes if node != found.here], words).run()


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise FluidTuneError(f"there is no {name} here, by which Slurm is asked; type: module load slurm, or set PATH")
    return path


def _asked(program: str, *words: str) -> str:
    """What a program of Slurm's prints. FluidTuneError: what it complains of."""
    done = subprocess.run([_program(program), *words], capture_output=True, text=True)
    if done.returncode:
        raise FluidTuneError(f"{program} {' '.join(words)}: {' '.join(done.stderr.split())}")
    return done.stdout


def submit(script: str) -> str:
    """Submit the job script. Returns the job's id.

    Raises:
        FluidTuneError: there is no sbatch, or what it complains of.
    """
    if shutil.which("sbatch") is None:
        raise FluidTuneError("there is no sbatch here; run this on a login node, or --print the script and submit that")
    done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True)
    if done.returncode:
        said = " ".join(done.stderr.replace("sbatch: error: ", "").split())
        raise FluidTuneError(f"sbatch submits no job: {said}. `sinfo` lists partitions, nodes and limits")
    return done.stdout.strip().partition(";")[0]


class _Job:
    """One job. ``members``: its nodes but this one. ``words``: those after `fluidtune run`."""

    def __init__(self, found: Allocation, members: Sequence[str], words: Sequence[str]) -> None:
        self._found, self._words = found, words
        self._course = Course(found.job, found.here, tuple(members))
        place = os.environ.get("RAY_TMPDIR", "/tmp")
        name = PREFIX + secrets.token_hex(4)
        check_place(place, name)
        self._order = Order(place, name, "", secrets.token_hex(32), memory(os.environ))
        self._hosts: list[subprocess.Popen[bytes]] = []
        self._driver: subprocess.Popen[bytes] | None = None
        self._late_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._status: int | None = None

    def run(self) -> int:
        adopt()
        heard = heed(signal.SIGUSR1, signal.SIGTERM)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver hears Ctrl-C itself
        self._selector.register(heard, selectors.EVENT_READ, lambda: self._signals(heard))
        self._host([], self._order)
        while self._status is None:
            wait_s = None if self._late_at is None else max(0.0, self._late_at - time.monotonic())
            for key, _ in self._selector.select(wait_s):
                key.data()
            if self._late_at is not None and time.monotonic() >= self._late_at:
                self._late_at = None
                self._take(Late())
        return self._status

    def _signals(self, heard: int) -> None:
        came = os.read(heard, 4096)
        if signal.SIGUSR1 in came:
            self._take(Noticed(all_told=False))
        if signal.SIGTERM in came:
            self._take(Noticed(all_told=True))
        for pid, status in ended().items():
            if self._driver is not None and pid == self._driver.pid:
                self._take(DriverEnded(status))

    def _take(self, event: Event) -> None:
        for instruction in self._course.take(event):
            self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case StartMembers(address):
                members = self._course.members
                srun = [
                    _program("srun"),
                    f"--jobid={self._found.job}",
                    "--overlap",
                    "--no-kill",
                    "--kill-on-bad-exit=0",
                ]
                srun += [f"--nodelist={','.join(members)}", f"--nodes={len(members)}", f"--ntasks={len(members)}"]
                srun += ["--ntasks-per-node=1", "--cpu-bind=none", "--mem=0"]
                self._host(srun, replace(self._order, address=address))
                self._late_at = time.monotonic() + JOIN_S
            case StartDriver(address):
                self._late_at = None
                own = {**self._order.variables(os.environ), "RAY_ADDRESS": address}
                command = [sys.executable, "-m", "fluidtune", "run", *self._words]
                self._driver = subprocess.Popen(command, env=own)
            case TellDriver():
                if self._driver is not None:
                    os.kill(self._driver.pid, signal.SIGTERM)
            case EndAll():
                for host in self._hosts:
                    assert host.stdin is not None
                    host.stdin.close()
                await_end(lambda: not any(Path(f"/proc/{host.pid}").exists() for host in self._hosts), _PATIENCE_S)
                end_all(0.0)
                self._take(AllEnded())
            case Requeue():
                self._requeue()
            case Say(line):
                print(f"fluidtune: {line}", file=sys.stderr, flush=True)
            case Exit(status):
                self._status = status

    def _requeue(self) -> None:
        """Ask Slurm to run the job again, which ends it here."""
        job = self._found.job
        try:
            state = _asked("squeue", "--noheader", "--jobs", job, "--format=%T").strip()
            if state in _OURS:
                _asked("scontrol", "requeue", job)
        except FluidTuneError as error:
            again = "submit it again; the search goes on from its state"
            print(f"fluidtune: job {job} is not requeued: {error}: {again}", file=sys.stderr, flush=True)

    def _host(self, prefix: list[str], order: Order) -> None:
        """Start Ray on this node, or by srun on the others."""
        variables: dict[str, Any] = srun_variables(os.environ) if prefix else dict(os.environ)
        command = [*prefix, sys.executable, "-m", "fluidtune.slurm.node_host"]
        pipe = subprocess.PIPE
        host = subprocess.Popen(command, env=variables, stdin=pipe, stdout=pipe, start_new_session=True)
        assert host.stdin is not None and host.stdout is not None
        host.stdin.write(order.line().encode())
        host.stdin.flush()
        self._hosts.append(host)
        nodes = self._course.members if prefix else (self._course.head,)
        said: Callable[[], bool] = lines_of(host.stdout, self._heard)
        stdout = host.stdout

        def read() -> None:
            if not said():
                self._selector.unregister(stdout)
                for node in nodes:
                    self._take(Lost(node, "has ended"))

        self._selector.register(stdout, selectors.EVENT_READ, read)

    def _heard(self, node: str, what: str, text: str) -> None:
        if what == "told":
            self._take(Noticed(all_told=node == self._course.head))
        else:
            self._take(Ready(node, text) if what == "ready" else Lost(node, text))
