"""Two tuning jobs share a cluster of three cores while somebody kills: ``python -m tests.faults.sharing --rounds 20``.

A round is one fault, in turn: SIGKILL of the arbiter, of a driver (which is started again), of a worker, and a driver
with its agent that stands still for longer than the arbiter's patience. All the while a GPU (here a core) has one
reservation, and tokens only grow. In the end every job has reported every iteration once, with the values that it
has when nothing happens, and nothing is left. A job that ends early is followed by another one.
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
SETTINGS = {"lease_s": 8.0, "notice_s": 3.0, "patience_s": 8.0, "pace_s": 1.0}
TRIALS, ITERATIONS, STEP_S = 3, 40, 0.15
#: Seconds in which every job must have done another iteration after a fault; a loaded machine is slow.
RECOVER_S = 150.0


class Job:
    """A driver process, started again after it was killed."""

    def __init__(self, name: str, kind: str, root: Path, cluster: Head):
        self.name, self.kind, self.storage, self._cluster = name, kind, root / name, cluster
        (self.storage / "notes").mkdir(parents=True)
        self.start("new")

    def start(self, mode: str) -> None:
        if not list((self.storage / self.name).glob("experiment_state-*")):
            # Killed before Tune's first snapshot: there is nothing to restore, the job begins anew.
            shutil.rmtree(self.storage / self.name, ignore_errors=True)
        size = [str(TRIALS), str(ITERATIONS), str(STEP_S)]
        command = [sys.executable, jobs.__file__, mode, self.kind, str(self.storage), *size]
        with open(self.storage / "log", "a") as log:
            self.process = subprocess.Popen(
                [*command, self.name, self._cluster.address],
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
        """How many were really trained."""
        return sum(path.read_text().count("\n") for path in (self.storage / "notes").iterdir())

    @property
    def events(self) -> list[dict[str, Any]]:
        log = self.storage / self.name / EVENT_LOG_NAME
        return read_events(log) if log.exists() else []

    def check(self, tmp: Path) -> None:
        assert self.process.returncode == 0, f"job {self.name}: {self.said}"
        check_reports(self.kind, self.storage, TRIALS, ITERATIONS, tmp)


class Watch(threading.Thread):
    """Looks at the reservations all the time; ``wrong`` is what must not be."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.wrong: list[str] = []
        self.looks = 0
        self.over = False
        self._newest: dict[str, int] = {}

    def run(self) -> None:
        from themis_bridge.shell import reservations

        while not self.over:
            holder: dict[str, tuple[str, int]] = {}
            for app, gpu, token in reservations.states():
                if gpu in holder:
                    self.wrong.append(f"{gpu} is held by {holder[gpu]} and {(app, token)}")
                holder[gpu] = (app, token)
                if token < self._newest.get(gpu, 0):
                    self.wrong.append(f"{gpu}: token {token} after {self._newest[gpu]}")
                self._newest[gpu] = max(token, self._newest.get(gpu, 0))
            self.looks += 1
            time.sleep(0.1)


def run(rounds: int, seed: int, root: Path, cluster: Head) -> dict[str, int]:
    """Returns what happened. AssertionError for what must not."""
    import ray

    from themis_bridge.shell import control, reservations

    ray.init(address=cluster.address, log_to_driver=False)
    control.start("CPU", **SETTINGS)
    rng = random.Random(seed)
    watch = Watch()
    watch.start()
    everyone: list[Job] = []
    current: dict[str, Job] = {}

    def keep_busy() -> None:
        for kind in ("elastic", "checkpointing"):
            if kind not in current or current[kind].over:
                current[kind] = Job(f"{kind}-{len(everyone)}", kind, root, cluster)
                everyone.append(current[kind])

    def wait_for_progress() -> None:
        before = {job.name: job.iterations for job in current.values()}
        deadline = time.monotonic() + RECOVER_S
        for job in current.values():
            while not job.over and job.iterations <= before[job.name]:
                assert time.monotonic() < deadline, f"{job.name} stands still: {job.said}"
                time.sleep(0.1)

    done = dict.fromkeys(KINDS, 0)
    try:
        for number in range(rounds):
            keep_busy()
            wait_for_progress()
            time.sleep(rng.uniform(0, 3))
            kind = KINDS[number % len(KINDS)]
            victim = rng.choice(list(current.values()))
            if kind == "arbiter":
                os.kill(control.status()["pid"], signal.SIGKILL)
            elif kind == "driver":
                victim.process.kill()
                victim.process.wait()
                victim.start("restore")
            elif kind == "worker":
                deadline = time.monotonic() + RECOVER_S
                while not (pids := [pid for job in current.values() for pid in busy_workers(job.events)]):
                    assert time.monotonic() < deadline, "no worker is busy"
                    keep_busy()
                    time.sleep(0.1)
                os.kill(rng.choice(pids), signal.SIGKILL)
            elif not victim.over:
                victim.process.send_signal(signal.SIGSTOP)
                time.sleep(SETTINGS["patience_s"] + 3)
                victim.process.send_signal(signal.SIGCONT)
            done[kind] += 1
            print(f"round {number + 1}: {kind}", file=sys.stderr, flush=True)
            assert not watch.wrong, watch.wrong
        for job in everyone:
            job.process.wait(RECOVER_S)
        for job in everyone:
            job.check(root)
        deadline = time.monotonic() + 30
        while True:
            processes = actor_processes(psutil.Process(cluster.pid))
            left = [*reservations.states(), *(title for title in processes if "Arbiter" not in title)]
            if not left:
                break
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.2)
        assert control.stop()
        assert not reservations.states()
        assert not watch.wrong, watch.wrong
    finally:
        watch.over = True
        for job in everyone:
            job.process.kill()
    return {**done, "jobs": len(everyone), "looks": watch.looks}


def main() -> None:
    parser = argparse.ArgumentParser(description="Kills among jobs that share a cluster.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--inside", nargs=2, metavar=("ADDRESS", "PID"), help="of a cluster that runs")
    options = parser.parse_args()
    if options.inside is None:
        # Ray reads the token when it is imported.
        with head(num_cpus=3) as cluster:
            command = [sys.executable, "-m", "tests.faults.sharing", "--inside", cluster.address, str(cluster.pid)]
            command += ["--rounds", str(options.rounds), "--seed", str(options.seed)]
            sys.exit(subprocess.run(command, env=dict(cluster.environment)).returncode)
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
