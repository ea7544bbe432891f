"""A search in a Slurm job, where its script runs: what `course` says is carried out.

The head's Ray is a child of this process, and srun starts the others, on the job's other nodes and on those of the
array's other jobs (`joined`). Each ends when this process lets go of the pipe by which it has its `Order`, however that
happens.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace

from fluidtune.errors import FluidTuneError
from fluidtune.slurm import course
from fluidtune.slurm.allocation import Allocation, allocation, srun_variables
from fluidtune.slurm.descendants import adopt, end_all, ended
from fluidtune.slurm.node_host import PREFIX, Order

#: Seconds that nodes have to end before they are killed.
_PATIENCE_S = 20.0
#: The states of a job (squeue(1)) in which nobody but its time limit has ended it. A cancelled job stays cancelled, and
#: a preempted one is requeued by Slurm.
_OURS = ("RUNNING", "TIMEOUT")
#: The array's jobs are looked at this often, seconds. Judgement: Slurm's controller answers many.
POLL_S = 10.0
#: How often a job asks Slurm for what it cannot do without, and seconds in between. Judgement: as long as `KillWait`.
TRIES, RETRY_S = 15, 2.0
_RUN = [sys.executable, "-m", "fluidtune", "run"]


def run_here(words: Sequence[str]) -> int:
    """The exit status of `fluidtune run` with these words, on all nodes of this process' job.

    FluidTuneError: Slurm cannot be asked, or the step has several tasks.
    """
    found = allocation(os.environ)
    if found.tasks > 1:
        raise FluidTuneError(f"job {found.job}: srun starts this search {found.tasks} times; start it once (-n 1)")
    if not found.here:  # salloc has left us where it was typed
        srun = ["srun", f"--jobid={found.job}", "--overlap", "--nodes=1", "--ntasks=1", *_RUN, *words]
        os.execvpe("srun", srun, srun_variables(os.environ, found.job))
    return Job(found, words).run()


def asked(program: str, *words: str, script: str = "", tries: int = 1) -> str:
    """What a program of Slurm's prints; times are epoch seconds. FluidTuneError: what it complains of at last."""
    if shutil.which(program) is None:
        raise FluidTuneError(f"there is no {program} here; run this where Slurm's commands are, as on a login node")
    told = {**os.environ, "SLURM_TIME_FORMAT": "%s"} if program == "squeue" else None  # a job has sbatch's variables
    done = subprocess.run([program, *words], input=script, capture_output=True, text=True, env=told)
    if done.returncode and tries > 1:  # Slurm's controller may be away
        time.sleep(RETRY_S)
        return asked(program, *words, script=script, tries=tries - 1)
    if done.returncode:
        said = " ".join(done.stderr.replace(f"{program}: error: ", "").split())
        raise FluidTuneError(f"{program} refuses: {said}. `sinfo` lists partitions, nodes and limits")
    return done.stdout


def say(line: str) -> None:
    print(f"fluidtune: {line}", file=sys.stderr, flush=True)


def again(name: str) -> int:
    """Requeue this job, unless somebody has ended it: a line says so. Returns its exit status, `course.AGAIN`."""
    try:
        state = asked("squeue", "-h", "-j", name, "-o", "%T", tries=TRIES).strip()
        if state in _OURS:
            asked("scontrol", "requeue", name, tries=TRIES)
        else:
            say(f"job {name} is not requeued from here: its state is {state or 'unknown'}")
    except FluidTuneError as error:
        say(f"job {name} is not requeued: {error}; submit it again, and the search goes on from its state")
    return course.AGAIN


def names(hosts: str) -> tuple[str, ...]:
    """Slurm's names of the nodes in its expression for them."""
    return tuple(asked("scontrol", "show", "hostnames", hosts).split()) if "[" in hosts or "," in hosts else (hosts,)


class Job:
    """One job. ``words``: those after `fluidtune run`.

    ``came``: the job is the head of an array, of which this returns the other jobs that run, or raises FluidTuneError.
    ``over``: the search is over, and the array's other jobs are to end, too.
    """

    def __init__(
        self, found: Allocation, words: Sequence[str], came: Callable[[], Sequence[course.Came]] | None = None
    ) -> None:
        self._job, self._name, self._words, self._came = found.job, found.name, words, came
        members = tuple(node for node in names(found.hosts) if node != found.here)
        self._course = course.Course(found.name, found.here, members, came is not None)
        folder = os.path.join(os.environ.get("RAY_TMPDIR", "/tmp"), PREFIX + secrets.token_hex(4))
        self._order = Order(folder, secrets.token_hex(32), found.memory)
        self._hosts: list[subprocess.Popen[bytes]] = []
        self._driver: subprocess.Popen[bytes] | None = None
        self._selector = selectors.DefaultSelector()
        self._status: int | None = None
        self.over = False

    def run(self) -> int:
        heard = adopt(signal.SIGUSR1, signal.SIGTERM, signal.SIGALRM, signal.SIGINT)  # Ctrl-C is the driver's
        self._selector.register(heard, selectors.EVENT_READ, lambda: self._signals(heard))
        self._host([], self._course.head, self._order, dict(os.environ))
        looks = 0.0  # when the array's jobs are looked at again (monotonic clock)
        while self._status is None:
            for key, _ in self._selector.select(None if self._came is None else POLL_S):
                key.data()
            if self._came is not None and time.monotonic() > looks:
                looks = time.monotonic() + POLL_S
                with suppress(FluidTuneError):  # Slurm's controller may be away
                    for each in self._came():
                        self._take(each)
        return self._status

    def _signals(self, heard: int) -> None:
        came = os.read(heard, 4096)
        if {*came} & {signal.SIGUSR1, signal.SIGTERM}:
            self._take(course.Noticed())
        if signal.SIGINT in came and self._driver is None:
            self._take(course.DriverEnded(-signal.SIGINT))
        if signal.SIGALRM in came:
            self._take(course.Late())
        for pid, status in ended().items():
            if self._driver is not None and pid == self._driver.pid:
                self._take(course.DriverEnded(status))

    def _take(self, event: course.Event) -> None:
        for instruction in self._course.take(event):
            match instruction:
                case course.Say(line):
                    say(line)
                case course.Join(node, address, of) as join:
                    # A step of its own, as a node that is down ends the whole step that is to start on it.
                    job = of.job if of else self._job
                    srun = ["srun", f"--jobid={job}", "--overlap", "--no-kill", f"--nodelist={node}", "--nodes=1"]
                    srun += ["--ntasks=1", "--cpu-bind=none", "--mem=0"]
                    if of is None:
                        signal.alarm(course.JOIN_S)
                    order = replace(self._order, address=address, leaves=of is not None)
                    self._host(srun, join.name, order, srun_variables(os.environ, job))
                case course.Drive(address, counted):
                    own = {**self._order.variables(os.environ), "RAY_ADDRESS": address}
                    own |= {} if counted else {"SLURM_RESTART_COUNT": "0"}
                    self._driver = subprocess.Popen([*_RUN, *self._words], env=own)
                case course.TellDriver() if self._driver is not None:
                    os.kill(self._driver.pid, signal.SIGTERM)
                case course.End(status, others):
                    self.over = others
                    self._end(status)

    def _host(self, srun: list[str], node: str, order: Order, variables: dict[str, str]) -> None:
        """Start Ray on this node: by srun, or here."""
        command, pipe = [*srun, sys.executable, "-m", "fluidtune.slurm.node_host"], subprocess.PIPE
        host = subprocess.Popen(command, 0, env=variables, stdin=pipe, stdout=pipe, start_new_session=True)
        stdout = host.stdout
        assert host.stdin is not None and stdout is not None
        host.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
        self._hosts.append(host)

        def read() -> None:
            what, text = json.loads(stdout.readline() or '["lost", "has ended"]')
            if what in ("lost", "left"):  # which is the last that it says
                self._selector.unregister(stdout)
                self._take(course.Lost(node, text, what == "left"))
            else:
                self._take(course.Ready(node, text) if what == "ready" else course.Noticed())

        self._selector.register(stdout, selectors.EVENT_READ, read)

    def _end(self, status: int) -> None:
        """End all processes, ask Slurm to run the job again if it is to be, which ends this one, and end."""
        end_all(0.0, but=[host.pid for host in self._hosts])  # which may write into the folder that the hosts remove
        for host in self._hosts:
            host.stdin.close()  # type: ignore[union-attr]
        for host in self._hosts:
            with suppress(subprocess.TimeoutExpired):
                host.wait(_PATIENCE_S)
        end_all(0.0)
        self._status = again(self._name) if status == course.AGAIN else status
