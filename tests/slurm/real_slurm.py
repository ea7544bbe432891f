"""A real Slurm on this machine for tests: its controller, and several `slurmd`, each of which is a node to it.

All of it, with a munged of its own, is in one folder and on ports of its own, so that a Slurm of the machine is left
alone. It has no cgroups: which cores a job may use is not enforced, and GPUs are device files that compute nothing.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import psutil

from tests.contracts.processes import until

_CONF = """\
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={dir}/munge.socket,cred_expire=30
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
MinJobAge=86400
SlurmdParameters=config_overrides
GresTypes=gpu
MpiDefault=none
{nodes}
PartitionName=p Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL State=UP PriorityTier=9
"""


def missing() -> str | None:
    """Why there can be no Slurm here; None: there can."""
    if any(shutil.which(name) is None for name in ("munged", "slurmctld", "slurmd", "sbatch")):
        return "no Slurm: apt-get install slurmctld slurmd slurm-client munge"
    return None if os.getuid() == 0 else "only root can start a Slurm"


class Slurm:
    """A Slurm with nodes n1, n2 and n3, each with two made-up GPUs. End it by `stop`.

    ``cores``: of each node as Slurm sees it, whatever the machine has; each comes with 2 GiB.
    """

    def __init__(self, folder: Path, cores: tuple[int, int, int] = (2, 2, 2)) -> None:
        self.folder = folder
        folder.chmod(0o755)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        with ExitStack() as links:
            free = [links.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
            port, *ports = [link.getsockname()[1] for link in free]
        host = socket.gethostname()
        node = f"NodeName=n{{}} NodeHostname={host} NodeAddr=127.0.0.1 Port={{}} CPUs={{}} RealMemory={{}} Gres=gpu:2"
        has = enumerate(zip(ports, cores, strict=True), 1)
        nodes = "\n".join(node.format(n, each, count, 2048 * count) for n, (each, count) in has)
        (folder / "slurm.conf").write_text(_CONF.format(host=host, port=port, dir=folder, nodes=nodes))
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        self.variables = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        files = [f"--{each}-file={folder}/munge.{each}" for each in ("key", "log", "pid", "seed")]
        self.ask("munged", "--force", f"--socket={folder}/munge.socket", *files)
        for name in ("state", "spool-n1", "spool-n2", "spool-n3"):
            (folder / name).mkdir()
        self.ask("slurmctld")
        for n in (1, 2, 3):
            self.ask("slurmd", "-N", f"n{n}")
        until(lambda: set(self.ask("sinfo", "-h", "-o", "%T").split()) == {"idle"}, 20)

    def ask(self, *command: str) -> str:
        """What a command prints."""
        done = subprocess.run(command, env=self.variables, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    def fact(self, job: str, name: str = "JobState") -> str:
        """What `scontrol show job` says of a job."""
        words = self.ask("scontrol", "show", "job", "--oneliner", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def stop(self) -> None:
        """End all jobs and all processes of it."""
        for user in ("root", "nobody"):
            self.ask("scancel", f"--user={user}")
        until(lambda: not self.ask("squeue", "-h"), 120)
        own = [psutil.Process(int(path.read_text())) for path in self.folder.glob("*.pid")]
        for process in own:
            process.terminate()
        until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in own), 20)
