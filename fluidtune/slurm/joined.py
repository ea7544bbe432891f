"""One search in all jobs of an array: which of them is its head, and what the others do.

``python -m fluidtune.slurm.joined`` with the words after `fluidtune run` is each job's program.

- The *head* is the job that has run longest, as Slurm tells it. It has the head's Ray and the driver (`job`). No lock
  and no file says who it is: a job that begins later cannot come before it, and one that is ending counts until Slurm
  says that it has ended.
- The others lend it their nodes, on which the head starts Ray by srun. Before such a job's limit its nodes are left,
  and it is requeued.
- When the head ends, for its limit or by a fault, the next one restores the search. When the search is over, all end.

The boundary: a head that is cut off from Slurm's controller, which then ends its job for it, may run on until its node
hears of that.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fluidtune.errors import FluidTuneError
from fluidtune.slurm.allocation import allocation
from fluidtune.slurm.course import Came
from fluidtune.slurm.descendants import adopt
from fluidtune.slurm.job import POLL_S, Job, asked, names, say
from fluidtune.slurm.node_host import LEAVE_S
from fluidtune.slurm.submission import LATE_S, seconds_of

#: squeue(1), --format: id, id with that of the array, state, start, time left, nodes. States in which a job has nodes.
_FORMAT, _HAS_NODES = "%A|%i|%T|%S|%L|%N", ("RUNNING", "COMPLETING", "SUSPENDED")


@dataclass(frozen=True)
class Sibling:
    """A job of the array. ``name``: its id with that of the array. ``start``, ``left`` of its time: as Slurm writes."""

    job: str
    name: str
    state: str
    start: str
    left: str
    hosts: str


def siblings(told: str) -> list[Sibling]:
    """The jobs that squeue tells of."""
    return [Sibling(*line.split("|")) for line in told.split("\n") if line]


def head(found: Iterable[Sibling]) -> str:
    """The id of the job that has run longest; "": none runs."""
    running = [(each.start, int(each.job)) for each in found if each.state in _HAS_NODES]
    return str(min(running)[1]) if running else ""


class _Array:
    """The array of this process' job. What it asks of Slurm may raise FluidTuneError."""

    def __init__(self, array: str, own: str) -> None:
        self._array, self._own = array, own
        self._known: set[tuple[str, str]] = set()

    def look(self) -> list[Sibling]:
        """Its jobs."""
        return siblings(asked("squeue", "-h", "-r", "-j", self._array, "-o", _FORMAT))

    def came(self) -> Sequence[Came]:
        """The jobs that have begun since this was asked last."""
        running = [each for each in self.look() if each.state == "RUNNING" and each.name != self._own]
        new = [each for each in running if (each.job, each.start) not in self._known]
        self._known.update((each.job, each.start) for each in new)
        return [Came(each.name, each.job, names(each.hosts)) for each in new]

    def end(self) -> None:
        """End the other jobs."""
        others = [each.name for each in self.look() if each.name != self._own]
        if others:
            asked("scancel", *others)


def main(words: Sequence[str]) -> int:
    """The exit status of this job. FluidTuneError: it is no job of an array, or Slurm does not answer at its start."""
    if "SLURM_ARRAY_JOB_ID" not in os.environ:
        raise FluidTuneError("this is no job of an array; `fluidtune slurm SCRIPT --elastic 3` submits one")
    found = allocation(os.environ)
    array, heard = _Array(os.environ["SLURM_ARRAY_JOB_ID"], found.name), adopt(signal.SIGUSR1, signal.SIGTERM)
    time.sleep(1.0)  # Slurm tells starts in seconds: jobs that have begun in the same one have begun by now
    now = array.look()
    while head(now) != found.job:
        came = os.read(heard, 4096) if select.select([heard], [], [], POLL_S)[0] else b""
        if signal.SIGTERM in came:
            return 128 + signal.SIGTERM
        if signal.SIGUSR1 in came:
            asked("scancel", "--signal=URG", found.name)  # its steps: the node hosts
            time.sleep(LEAVE_S + 10.0)  # and Ray ends there
            return _requeued(found.name)
        with suppress(FluidTuneError):  # Slurm's controller may be away
            now = array.look()
    left = seconds_of(next(each.left for each in now if each.name == found.name))
    if left is not None and left < LATE_S:
        say(f"job {found.name} has {left} s left, too few for the head of the search; it is requeued")
        return _requeued(found.name)
    job = Job(found, words, array.came)
    status = job.run()
    if job.over:
        array.end()
    return status


def _requeued(name: str) -> int:
    asked("scontrol", "requeue", name)
    return os.EX_TEMPFAIL


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except FluidTuneError as error:
        sys.exit(f"fluidtune: {error}")
