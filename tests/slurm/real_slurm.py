"""A real Slurm on this machine for tests: its controller, and several `slurmd`, each of which is a node to it.

All of it, with a munged of its own, is in one folder and on ports of its own, so that a Slurm of the machine is left
alone. It has no cgroups: which cores a job may use is not enforced, and GPUs are device files that compute nothing.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
#: Device files that stand in for GPUs; nothing opens them.
GPUS = ("/dev/null", "/dev/zero")

_CONF = """\
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={dir}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool-%n
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd-%n.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdLogFile={dir}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
GresTypes=gpu
MpiDefault=none
KillWait=10
InactiveLimit=0
{nodes}
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9
"""


def missing() -> str | None:
    """Why there can be no Slurm here; None: there can."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"no {', '.join(lacking)}: apt-get install slurmctld slurmd slurm-client munge"
    return None if os.getuid() == 0 else "only root can start a Slurm"


class Slurm:
    """A Slurm with this many nodes n1, n2, ... of ``cores`` cores, two made-up GPUs and 4 GiB. End it by `stop`."""

    def __init__(self, folder: Path, nodes: int, cores: int = 2) -> None:
        self.folder = folder
        folder.chmod(0o755)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        port, *ports = _free_ports(nodes + 1)
        (folder / "state").mkdir()
        host = socket.gethostname()
        shape = f"CPUs={cores} RealMemory=4096 Gres=gpu:{len(GPUS)} State=UNKNOWN"
        lines = [
            f"NodeName=n{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={each} {shape}"
            for n, each in enumerate(ports, 1)
        ]
        conf = _CONF.format(host=host, port=port, dir=folder, nodes="\n".join(lines))
        (folder / "slurm.conf").write_text(conf)
        (folder / "gres.conf").write_text("".join(f"Name=gpu File={each}\n" for each in GPUS))
        self.variables = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        files = {name: folder / f"munge.{name}" for name in ("socket", "log", "pid", "seed")}
        own = [f"--{name if name == 'socket' else name + '-file'}={path}" for name, path in files.items()]
        self._do("munged", "--force", f"--key-file={folder}/munge.key", *own)
        self._do("slurmctld")
        for n in range(1, nodes + 1):
            (folder / f"spool-n{n}").mkdir()
            self._do("slurmd", "-N", f"n{n}")
        until(lambda: set(self.ask("sinfo", "-h", "-o", "%T").split()) == {"idle"}, 20)

    def _do(self, *command: str) -> None:
        subprocess.run(command, env=self.variables, check=True, capture_output=True, text=True)

    def ask(self, *command: str, **others: str) -> str:
        """What a command prints. ``others``: variables besides."""
        done = subprocess.run(command, env={**self.variables, **others}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def state(self, job: str) -> str:
        """The state of a job, such as RUNNING; "": Slurm knows it no more."""
        found = subprocess.run(["squeue", "-h", "-t", "all", "-j", job, "-o", "%T"], env=self.variables, **_TEXT)
        return found.stdout.strip()

    def fact(self, job: str, name: str) -> str:
        """What `scontrol show job` says of it."""
        words = self.ask("scontrol", "show", "job", "--oneliner", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def stop(self) -> None:
        """End all jobs and all processes of it."""
        subprocess.run(["scancel", "--full", "--signal=KILL", "--state=RUNNING"], env=self.variables, **_TEXT)
        pids = [int(path.read_text()) for path in sorted(self.folder.glob("*.pid")) if path.read_text().strip()]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20)


_TEXT = {"capture_output": True, "text": True}


def until(true: Callable[[], object], seconds: float) -> None:
    """Wait until this is true."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    links = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [link.getsockname()[1] for link in links]
    for link in links:
        link.close()
    return ports
