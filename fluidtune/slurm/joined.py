"""One search in all jobs of an array: which of them is its head, and what the others do.

``python -m fluidtune.slurm.joined`` with the words after `fluidtune run` is each job's program.

- The *head* is the job that has run longest, as Slurm tells it. It has the head's Ray and the driver (`job`). No lock
  and no file says who it is: a job that begins later cannot come before it, and while one is ending nobody becomes it.
- The others lend it their nodes, on which the head starts Ray by srun. Before such a job's limit, and when it is
  preempted, its nodes are left, and it is requeued.
- When the head ends, for its limit or by a fault, the next one restores the search. When the search is over, all end,
  if Slurm still takes the one whose driver has ended for the head.

The boundary: a head that is cut off from Slurm's controller, which then ends its job for it, may run on until its node
hears of that.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fluidtune.errors import FluidTuneError
from fluidtune.slurm.allocation import allocation
from fluidtune.slurm.course import Came
from fluidtune.slurm.job import POLL_S, TRIES, Job, again, asked, names, say
from fluidtune.slurm.node_host import LEAVE_S
from fluidtune.slurm.submission import LATE_S, seconds_of


@dataclass(frozen=True)
class Sibling:
    """A job of the array by squeue(1). ``start``: epoch seconds, if it has nodes, the ``hosts``, by now."""

    job: str
    name: str
    state: str
    start: str
    left: str
    hosts: str


def head(found: Sequence[Sibling]) -> str:
    """The id of the job that has run longest; "": none, or one is ending. When that began, Slurm may have forgotten."""
    begun = [(int(each.start), int(each.job)) for each in found if each.hosts]
    return str(min(begun)[1]) if begun and not any(each.state == "COMPLETING" for each in found) else ""


def others(found: Iterable[Sibling], own: str) -> list[str] | None:
    """The names of the jobs that end with this one, when its search is over; None: one of them is the head."""
    left = [each for each in found if each.state != "COMPLETING"]
    ended = {each.job: each.name for each in left if each.name != own}
    return None if head(left) in ended else [*ended.values()]


def look(own: str, tries: int = 1) -> list[Sibling]:
    """The jobs of this job's array. FluidTuneError: Slurm does not answer."""
    told = asked("squeue", "-h", "-r", "-j", own.partition("_")[0], "-o", "%A|%i|%T|%S|%L|%N", tries=tries)
    return [Sibling(*line.split("|")) for line in told.splitlines()]


def came(own: str) -> list[Came]:
    """The other jobs that run. FluidTuneError: Slurm does not answer."""
    running = [each for each in look(own) if each.state == "RUNNING" and each.name != own]
    return [Came(each.name, each.job, names(each.hosts), int(each.start)) for each in running]


def leave(own: str) -> None:
    """Have the head leave this job's nodes, and wait until it has, but not longer than that should take."""
    until = time.monotonic() + LEAVE_S + 10.0  # and Ray ends there
    while time.monotonic() < until:
        with suppress(FluidTuneError):  # Slurm's controller may be away
            steps = asked("squeue", "-h", "-s", "-j", own, "-o", "%i").split()
            if not any(step.rpartition(".")[2].isdigit() for step in steps):  # the node hosts; not the batch step
                return
            asked("scancel", "--signal=URG", own)  # whoever is told again takes no notice
        time.sleep(2.0)


def main(words: Sequence[str]) -> int:
    """The exit status of this job. FluidTuneError: it is no job of an array, or Slurm does not answer."""
    if "SLURM_ARRAY_JOB_ID" not in os.environ:
        raise FluidTuneError("this is no job of an array; `fluidtune slurm SCRIPT --elastic 3` submits one")
    ending = {signal.SIGUSR1, signal.SIGTERM}  # before the limit; when the job is preempted or cancelled
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)  # a `Job` hears of those that have come in between
    found = allocation(os.environ)
    own = found.name
    time.sleep(1.0)  # Slurm tells starts in seconds: jobs that have begun in the same one have begun by now
    now = look(own, TRIES)
    while head(now) != found.job:
        if signal.sigtimedwait(ending, POLL_S):
            leave(own)
            return again(own)
        with suppress(FluidTuneError):  # Slurm's controller may be away
            now = look(own)
    left = seconds_of(next(each.left for each in now if each.name == own))
    if left is not None and left < LATE_S:
        say(f"job {own} has {left} s left, too few for the head of the search; it is requeued")
        return again(own)
    job = Job(found, words, lambda: came(own))
    status = job.run()
    ends = others(look(own, TRIES), own) if job.over else []
    if ends is None:
        return again(own)  # and the search is the head's
    if ends:
        asked("scancel", *ends, tries=TRIES)
    return status


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except FluidTuneError as error:
        sys.exit(f"fluidtune: {error}")
