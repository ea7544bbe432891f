"""Two tuning jobs share a cluster of three cores while processes are killed.

``python -m tests.faults.sharing --rounds 20``. Each round makes one fault, in this order: SIGKILL of the arbiter,
SIGKILL of a driver (which is started again), SIGKILL of a worker, and SIGSTOP of a driver for longer than the arbiter's
patience. All the time each GPU (here a core) may have one reservation only, and tokens may only grow. In the end every
job must have reported every iteration once, with the values of an undisturbed run, and no reservation or process may be
left. A job that ends early is followed by another.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.head import Head, head
from fluidtune.report import EVENT_LOG_NAME, read_events
from tests.conftest import actor_processes
from tests.faults import jobs
from tests.faults.test_kills import busy_workers, check_reports

KINDS = ("arbiter", "driver", "worker", "pause")
#: Short enough that several leases end in a job.
SETTINGS = {"lease_s": 8.0, "notice_s": 3.0, "patience_s": 8.0, "pace_s": 1.0}
TRIALS, ITERATIONS, STEP_S = 3, 40, 0.15
#: Seconds within which every job must do another iteration after a fault. Judgement: a loaded machine is slow.
RECOVER_S = 150.0
#: Seconds within which reservations and processes of jobs that have ended must be gone. Judgement.
CLEAN_S = 60.0


class Job:
    """A tuning job: its driver process, which can be started again after it was killed.

    ``size``: trials, iterations and seconds of an iteration; then, if the job has other devices than two cores, these,
    and the seconds after which it stops its trials.
    """

    def __init__(self, name: str, kind: str, root: Path, cluster: Head, *size: object):
        self.name, self.kind, self.storage, self._cluster = name, kind, root / name, cluster
        self._size = [str(each) for each in size or (TRIALS, ITERATIONS, STEP_S)]
        (self.storage / "notes").mkdir(parents=True)
        self.start("new")

    def start(self, mode: str) -> None:
        if not list((self.storage / self.name).glob("experiment_state-*")):
            # Killed before Tune's first snapshot: there is nothing to restore, the job begins anew.
            shutil.rmtree(self.storage / self.name, ignore_errors=True)
        command = [sys.executable, jobs.__file__, mode, self.kind, str(self.storage), *self._size[:3]]
        with open(self.storage / "log", "a") as log:
            self.process = subprocess.Popen(
                [*command, self.name, self._cluster.address, *self._size[3:]],
                env=dict(self._cluster.environment),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    @property
    def said(self) -> str:
        return (self.storage / "log").read_text()[-3000:]

    @property
    def iterations(self) -> int:
        """How many iterations were trained, including those that were lost."""
        return sum(path.read_text().count("\n") for path in (self.storage / "notes").iterdir())

    @property
    def events(self) -> list[dict[str, Any]]:
        log = self.storage / self.name / EVENT_LOG_NAME
        return read_events(log) if log.exists() else []

    def check(self, tmp: Path) -> None:
        assert self.process.returncode == 0, f"job {self.name}: {self.said}"
        check_reports(self.kind, self.storage, TRIALS, ITERATIONS, tmp)


class Watch(threading.Thread):
    """Looks at the reservations every ``pause`` seconds; ``wrong`` lists what it saw and must not be."""

    def __init__(self, pause: float = 0.1) -> None:
        super().__init__(daemon=True)
        self._pause = pause
        self.wrong: list[str] = []
        self.looks = 0
        self.over = False
        self._newest: dict[str, int] = {}

    def run(self) -> None:
        from themis_bridge.shell import reservations

        while not self.over:
            holder: dict[str, tuple[str, int]] = {}
            for app, gpu, token in reservations.found()[0]:
                if gpu in holder:
                    self.wrong.append(f"{gpu} is held by {holder[gpu]} and {(app, token)}")
                holder[gpu] = (app, token)
                if token < self._newest.get(gpu, 0):
                    self.wrong.append(f"{gpu}: token {token} after {self._newest[gpu]}")
                self._newest[gpu] = max(token, self._newest.get(gpu, 0))
            self.looks += 1
            time.sleep(self._pause)


class Crowd:
    """The jobs of a run: two at a time, one of each kind."""

    def __init__(self, root: Path, cluster: Head):
        self._root, self._cluster = root, cluster
        self.everyone: list[Job] = []
        #: Kind -> the job that runs now.
        self.current: dict[str, Job] = {}

    def keep_busy(self) -> None:
        """Start a new job of each kind of which none runs."""
        for kind in ("elastic", "checkpointing"):
            if kind not in self.current or self.current[kind].over:
                self.current[kind] = Job(f"{kind}-{len(self.everyone)}", kind, self._root, self._cluster)
                self.everyone.append(self.current[kind])

    def wait_for_progress(self) -> None:
        """Wait until every running job has trained another iteration or has ended."""
        before = {job.name: job.iterations for job in self.current.values()}
        deadline = time.monotonic() + RECOVER_S
        for job in self.current.values():
            while not job.over and job.iterations <= before[job.name]:
                assert time.monotonic() < deadline, f"{job.name} stands still: {job.said}"
                time.sleep(0.1)

    def wait_for_a_busy_worker(self) -> list[int]:
        """The process ids of workers that train now."""
        deadline = time.monotonic() + RECOVER_S
        while not (pids := [pid for job in self.current.values() for pid in busy_workers(job.events)]):
            assert time.monotonic() < deadline, "no worker is busy"
            self.keep_busy()
            time.sleep(0.1)
        return pids


def make_fault(kind: str, crowd: Crowd, rng: random.Random) -> None:
    """Kill or pause one process; see the module."""
    from themis_bridge.shell import control

    victim = rng.choice(list(crowd.current.values()))
    if kind == "arbiter":
        os.kill(control.status()["pid"], signal.SIGKILL)
    elif kind == "driver":
        victim.process.kill()
        victim.process.wait()
        victim.start("restore")
    elif kind == "worker":
        os.kill(rng.choice(crowd.wait_for_a_busy_worker()), signal.SIGKILL)
    elif not victim.over:
        victim.process.send_signal(signal.SIGSTOP)
        time.sleep(SETTINGS["patience_s"] + 3)
        victim.process.send_signal(signal.SIGCONT)


def check_nothing_is_left(cluster: Head) -> None:
    """Assert that no reservation and no process but the arbiter's is left."""
    from themis_bridge.shell import reservations

    deadline = time.monotonic() + CLEAN_S
    while True:
        processes = actor_processes(psutil.Process(cluster.pid))
        left = [*reservations.found()[0], *(title for title in processes if "Arbiter" not in title)]
        if not left:
            return
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.2)


def run(rounds: int, seed: int, root: Path, cluster: Head) -> dict[str, int]:
    """Return how often each fault was made. Raises AssertionError for anything that must not happen."""
    import ray

    from themis_bridge.shell import control, reservations

    ray.init(address=cluster.address, log_to_driver=False)
    control.start("CPU", **SETTINGS)
    rng = random.Random(seed)
    watch = Watch()
    watch.start()
    crowd = Crowd(root, cluster)
    done = dict.fromkeys(KINDS, 0)
    try:
        for number in range(rounds):
            crowd.keep_busy()
            crowd.wait_for_progress()
            time.sleep(rng.uniform(0, 3))
            kind = KINDS[number % len(KINDS)]
            make_fault(kind, crowd, rng)
            done[kind] += 1
            print(f"round {number + 1}: {kind}", file=sys.stderr, flush=True)
            assert not watch.wrong, watch.wrong
        for job in crowd.everyone:
            job.process.wait(RECOVER_S)
        for job in crowd.everyone:
            job.check(root)
        check_nothing_is_left(cluster)
        assert control.stop()
        assert not reservations.found()[0]
        assert not watch.wrong, watch.wrong
    finally:
        watch.over = True
        for job in crowd.everyone:
            job.process.kill()
    return {**done, "jobs": len(crowd.everyone), "looks": watch.looks}


def inside(module: str, *words: object, cluster: dict[str, float]) -> int:
    """Run a module in a process of a new cluster, with ``--inside ADDRESS PID``. Returns its exit status."""
    # Ray reads the cluster's token when it is imported, hence the new process.
    with head(**cluster) as started:
        command = [sys.executable, "-m", module, "--inside", started.address, str(started.pid), *map(str, words)]
        return subprocess.run(command, env=dict(started.environment)).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description="Kills processes of jobs that share a cluster.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--inside", nargs=2, metavar=("ADDRESS", "PID"), help="of a running cluster, instead of a new one"
    )
    options = parser.parse_args()
    if options.inside is None:
        sys.exit(
            inside("tests.faults.sharing", "--rounds", options.rounds, "--seed", options.seed, cluster={"num_cpus": 3})
        )
    address, pid = options.inside
    root = Path(tempfile.mkdtemp(prefix="themis-kills-"))
    try:
        print(run(options.rounds, options.seed, root, Head(address, dict(os.environ), int(pid))))
    except BaseException:
        print(f"what the jobs left is in {root}", file=sys.stderr)
        raise
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
