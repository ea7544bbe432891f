"""`make soak`: four tenants and a service share a cluster for an hour while everything is killed.

``python -m tests.faults.soak --minutes 60 [--seed N] [--out FILE]``. Eight emulated devices belong to an arbiter. Four
tuning jobs lease them; one of them lasts for the whole time, each of the others is followed by a new one when it has
ended. A service answers requests. Leases are short, so that trials are resized every few seconds. Every few seconds one
process is killed: a worker, a driver (the job is then restored), the arbiter, the front or a model process, and once
the driver that has started the service.

What is looked at:

- Results. Each result of each job must be there, with the value of a run without faults, and again only where its trial
  goes on from a checkpoint. In the jobs of one tenant ASHA decides, and trials run one at a time: each must end where
  it ends without faults. A trial whose worker died must go on from the newest checkpoint that Tune had: each iteration
  before that which runs again is ``past_commit``. A job whose driver died goes on from Tune's last snapshot, which may
  be older.
- Requests. Each has one response, and the right one; only those on their way when a front died may get none.
- Leaks. When all jobs have ended and service and arbiter are stopped, no placement group, actor or reservation is left,
  and when the cluster has ended, no process that was started in the soak, and no temporary file of ours but those of
  killed drivers that the next job removes.
- Curves: the memory and the file descriptors of the lasting driver, the arbiter and the front; all processes,
  actors' processes and placement groups of the cluster. Memory is a process's share of what is in no file (``Pss_Anon``
  and ``Pss_Shmem`` of the kernel): how much of a library counts for a process depends on how many others use it. In
  the second half the arbiter and the front are left alone, so that one process of each has a curve. A curve begins when
  its process has lived for ten minutes (in a shorter soak: for a sixth of it). It is *flat* if the line through it
  (Theil and Sen: the median of the slopes between any two points) grows by at most 5 % of its median within an hour, or
  by at most 1 (MiB, descriptor, process) over the curve. A curve of less than ten minutes is not judged.

Prints a table on stderr, and on stdout one JSON object. The file of ``--out`` has all samples of the curves, too. Exit
status 0: nothing was lost, twice, wrong, past a commit or left, and every curve is flat.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import free_ports
from benchmarks.head import Head
from fluidtune.report.log_tail import LogTail
from tests.conftest import RAYS_OWN
from tests.faults import serving
from tests.faults.sharing import Job, Watch, check_nothing_is_left, inside
from tests.faults.test_kills import GOES_ON_AFTER, busy_workers, reported, undisturbed
from tests.leftovers import PATIENCE_S, PREFIXES, processes_of
from tests.serving import runs

DEVICES = 8
#: Of jobs that are followed by others: trials, iterations, and seconds of an iteration on one device.
SIZE = (3, 90, 0.5)
#: Of the job that lasts: as many trials as it runs at a time, which do not end before it.
LASTING = (3, 10**6, 1.0)
TENANTS = ("lasting", "anna", "bert", "carla")
#: How often each kind is killed, relative to the others. Judgement: what a cluster loses often comes often.
KILLS = {"worker": 6, "driver": 2, "model process": 2, "arbiter": 1, "front": 1, "service's driver": 1}
#: Those that are left alone in the second half.
LEFT_ALONE = {"arbiter", "front"}
#: Of the arbiter, besides the length of a lease. A notice is a third of it.
SETTINGS = {"patience_s": 15.0, "pace_s": 1.0}
#: Seconds between two samples.
SAMPLE_S = 10.0
#: Seconds in which each job must train another iteration, and each service answer again. Judgement: a loaded machine.
STUCK_S = 300.0
#: Seconds that all jobs may take to end when no process is killed any more.
END_S = 900.0
#: When a curve begins: seconds of a process's life. Issue 43.
SETTLED_S = 600.0
#: Seconds that are left of a curve that is judged. Judgement: trials and jobs come and go within minutes.
JUDGED_S = 600.0
#: What names begin with of files that the next job removes where a driver was killed.
SWEPT = ("fluidtune-emulated-",)
#: What must not become of iterations.
SUMS = ("lost", "twice", "wrong", "past_commit")
#: The most that a flat curve grows within an hour, of its median; and over the whole curve, in its own unit. Judgement.
FLAT, LEAST = 0.05, 1.0


def own_memory(pid: int) -> int:
    """Bytes of a process that are in no file. Raises OSError: it has ended."""
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    sizes = {name: int(kib) * 1024 for name, kib, _ in lines}
    return sizes["Pss_Anon:"] + sizes["Pss_Shmem:"]


class Asking(serving.Clients):
    """Few requests: the soak is no measurement of the service."""

    pause_s = 0.5


class Samples:
    """What the soak has at a moment, and the curves of it: name -> (seconds since its begin, value)."""

    def __init__(self, began: float) -> None:
        self._began = began
        self.curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._pids: dict[str, int] = {}

    def take(self, pids: dict[str, int]) -> None:
        """``pids``: of the processes that are followed. A new process begins its curves anew."""
        from tests.conftest import placement_groups

        now = time.monotonic() - self._began
        for name, pid in pids.items():
            if self._pids.get(name) != pid:
                self._pids[name] = pid
                self.curves.pop(f"{name}: memory, MiB", None)
                self.curves.pop(f"{name}: descriptors", None)
            try:
                process = psutil.Process(pid)
                self.curves[f"{name}: memory, MiB"].append((now, own_memory(pid) / 2**20))
                self.curves[f"{name}: descriptors"].append((now, process.num_fds()))
            except (psutil.Error, OSError):
                continue
        commands = processes_of(Path(os.environ["TMPDIR"])).values()
        self.curves["processes"].append((now, len(commands)))
        actors = [one for one in commands if one.startswith("ray::") and not one.startswith(RAYS_OWN)]
        self.curves["actors' processes"].append((now, len(actors)))
        self.curves["placement groups"].append((now, len(placement_groups())))


def shape(curve: Sequence[tuple[float, float]], settled: float) -> dict[str, Any]:
    """A curve in figures, without its first ``settled`` seconds. "flat" is None if too little is left to judge."""
    kept = [each for each in curve if each[0] - curve[0][0] >= settled]
    if len(kept) < 2:
        return {"samples": len(kept), "flat": None}
    thin = kept[:: 1 + len(kept) // 300]
    slope = statistics.median((b - a) / (at - since) for (since, a), (at, b) in combinations(thin, 2) if at > since)
    middle, hour = statistics.median(value for _, value in kept), 3600 * slope
    span = kept[-1][0] - kept[0][0]
    found = {"samples": len(kept), "first": kept[0][1], "last": kept[-1][1], "median": middle, "an_hour": hour}
    flat = hour <= FLAT * middle or slope * span <= LEAST
    return {**found, "flat": flat if span >= JUDGED_S else None}


def faults_of(rows: Sequence[dict[str, Any]], expected: Sequence[float], ended: bool) -> Counter[str]:
    """What is wrong with a trial's results. ``expected``: the values without faults. ``ended``: the trial has ended."""
    numbers = [row["training_iteration"] for row in rows]
    end = len(expected) if ended else max(numbers, default=0)
    again = [(last, next_) for last, next_ in pairwise([0, *numbers]) if next_ <= last]
    return Counter(
        lost=len(set(range(1, end + 1)) - set(numbers)),
        twice=sum(last - next_ + 1 for last, next_ in again if not GOES_ON_AFTER["checkpointing"](next_ - 1, last)),
        wrong=sum(
            1
            for row in rows
            if not row["training_iteration"] <= len(expected)
            or abs(row["value"] - expected[row["training_iteration"] - 1]) > 1e-6 * abs(row["value"])
        ),
    )


def past_commit(ran: Sequence[tuple[int, int]], restored: Iterable[int] = (), every: int = 3) -> tuple[int, int]:
    """Iterations that ran again, and those of them that a checkpoint held. ``ran``: (number, process), as they ran.

    A checkpoint is written at each iteration that ``every`` divides. It is there when the next iteration begins.
    ``restored``: how many had run when the driver was killed. Its process goes on for a moment, which does not count.
    Where the next process begins is Tune's snapshot.
    """
    again = held = highest = 0
    kills = sorted(set(restored))
    dead: set[int] = set()
    for place, (number, process) in enumerate(ran):
        killed = [kill for kill in kills if kill <= place]
        if killed:
            dead |= {each for _, each in ran[: killed[-1]]}
        if process in dead:
            continue
        if killed:
            kills = kills[len(killed) :]
            again, highest = again + max(0, highest - number + 1), number
            continue
        again += number <= highest
        held += number <= (highest - 1) // every * every
        highest = max(highest, number)
    return again, held


class Soak:
    """The jobs, the service and the faults of one soak. ``found``: its report."""

    def __init__(self, minutes: float, seed: int, root: Path, cluster: Head) -> None:
        #: By job and trial, how many iterations had run when drivers were killed.
        self._restored: dict[tuple[str, str], list[int]] = defaultdict(list)
        self._seconds, self._root, self._cluster = 60 * minutes, root, cluster
        self._random = random.Random(seed)
        self.began = time.monotonic()
        self.samples = Samples(self.began)
        self.everyone: list[Job] = []
        self._current: dict[str, Job] = {}
        #: By job: its log as it is read, its events so far, and its iterations when it was last seen to go on.
        self._tails: dict[str, LogTail] = {}
        self._events: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._seen: dict[str, tuple[int, float]] = {}
        #: By job, its iterations when its driver was started last.
        self._began: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()
        #: When fronts were killed, on `time.monotonic`.
        self.fronts: list[float] = []
        self.wrong: list[str] = []

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    # --- jobs

    def keep_busy(self) -> None:
        for tenant in TENANTS:
            job = self._current.get(tenant)
            if job is not None and job.over and (job.process.returncode or tenant == "lasting"):
                self.wrong.append(f"{job.name} ended with {job.process.returncode}: {job.said}")
            if job is None or job.over:
                size = LASTING if tenant == "lasting" else SIZE
                budget = self._seconds if tenant == "lasting" else 0
                name = f"{tenant}-{len(self.everyone)}"
                kind = "halving" if tenant == "carla" else "checkpointing"
                job = Job(name, kind, self._root, self._cluster, *size, f"emulated:{DEVICES}", budget)
                self._current[tenant] = job
                self.everyone.append(job)

    def events(self, job: Job) -> list[dict[str, Any]]:
        """A job's events so far."""
        log = job.storage / job.name / "fluid_events.jsonl"
        tail = self._tails.get(job.name)
        if tail is None or tail.left is None:  # a job that began anew has another log
            if not log.exists():
                return []
            tail = self._tails[job.name] = LogTail(log)
            tail.anew()
            self._events[job.name] = []
        self._events[job.name] += tail.new()
        return self._events[job.name]

    def check_going(self) -> None:
        """Note a job that stands still."""
        for job in self._current.values():
            before, since = self._seen.get(job.name, (-1, 0.0))
            if job.iterations != before:
                self._seen[job.name] = job.iterations, time.monotonic()
            elif not job.over and time.monotonic() - since > STUCK_S:
                self.wrong.append(f"{job.name} stands still: {job.said}")
                self._seen[job.name] = before, time.monotonic()

    # --- faults

    def victim(self, kind: str, service: dict[str, Any] | None, driver: Any) -> Callable[[], None] | None:
        """What kills a process of this kind; None: there is none that should be killed now."""
        from themis_bridge.shell import control

        pid: int | None = None
        if kind == "worker":
            job = self._random.choice(list(self._current.values()))
            pid = next(iter(self._random.sample(pids, 1)), None) if (pids := busy_workers(self.events(job))) else None
        elif kind == "driver":
            jobs = [job for name, job in self._current.items() if name != "lasting" and not job.over]
            # A driver that has done nothing since it was started would never get further.
            went = [job for job in jobs if job.iterations > self._began[job.name] + 3]
            return (lambda: self._restart(self._random.choice(went))) if went else None
        elif kind == "arbiter":
            pid = control.status()["pid"]
        elif kind == "service's driver":
            return driver.kill if driver.poll() is None else None
        elif service is not None:
            pid = service["pid"] if kind == "front" else next(iter(service["device_pids"]), None)
        if pid is None:
            return None
        if kind == "front":
            self.fronts.append(time.monotonic())
        return lambda: os.kill(pid, signal.SIGKILL)

    def _restart(self, job: Job) -> None:
        job.process.kill()
        job.process.wait()
        for notes in (job.storage / "notes").iterdir():
            self._restored[job.name, notes.name].append(notes.read_text().count("\n"))
        self._began[job.name] = job.iterations
        job.start("restore")

    def play(self, driver: Any, every: float, clients: Asking) -> None:
        """Kill, watch and sample until the time is over."""
        from themis_bridge.shell import control

        next_sample = next_kill = 0.0
        answered = 0
        while self.elapsed() < self._seconds and len(self.wrong) < 20:
            self.keep_busy()
            self.check_going()
            service = self._service()
            if self.elapsed() >= next_sample:
                pids = {"driver": self._current["lasting"].process.pid, **self._arbiter(control)}
                self.samples.take({**pids, **({"front": service["pid"]} if service else {})})
                next_sample = self.elapsed() + SAMPLE_S
            if self.elapsed() >= next_kill:
                late = self.elapsed() > self._seconds / 2
                kinds = [kind for kind in KILLS if not (late and kind in LEFT_ALONE)]
                (kind,) = self._random.choices(kinds, [KILLS[kind] for kind in kinds])
                # Between two kills of the service it must have answered.
                if kind in ("front", "model process") and clients.became["answered"] <= answered:
                    service = None
                try:
                    kill = self.victim(kind, service, driver)
                    if kill is not None:
                        answered = clients.became["answered"] + serving.CLIENTS
                        kill()
                        self.kills[kind] += 1
                        next_kill = self.elapsed() + self._random.uniform(0.5 * every, 1.5 * every)
                except Exception as error:  # the arbiter or a process is not there at this moment
                    print(f"no {kind} was killed: {error!r}"[:200], file=sys.stderr)
            time.sleep(0.5)

    def _service(self) -> dict[str, Any] | None:
        from fluidtune.errors import FluidTuneError
        from fluidtune.serving.running_services import find

        try:
            found = find().status()
            return found if found["state"] == "serving" and found["device_pids"] else None
        except FluidTuneError:
            return None

    def _arbiter(self, control: Any) -> dict[str, int]:
        try:
            return {"arbiter": control.status()["pid"]}
        except Exception:  # Ray starts it anew
            return {}

    # --- the end

    def end(self) -> None:
        """Wait until all jobs have ended."""
        deadline = time.monotonic() + END_S
        for job in self.everyone:
            try:
                job.process.wait(max(1.0, deadline - time.monotonic()))
            except Exception:
                self.wrong.append(f"{job.name} did not end: {job.said}")

    def results(self) -> dict[str, Any]:
        """What became of all iterations."""
        sums: Counter[str] = Counter()
        for job in self.everyone:
            rows_of = reported(job.storage)
            ended = not job.name.startswith("lasting")
            for x, rows in rows_of.items():
                length = SIZE[1] if ended else max(row["training_iteration"] for row in rows)
                length //= 3 if job.kind == "halving" and x > 1 else 1
                expected = undisturbed("checkpointing", x, length, self._root / "undisturbed")
                sums += faults_of(rows, expected, ended)
                sums["iterations"] += len(rows)
                lines = (job.storage / "notes" / str(x)).read_text().splitlines()
                ran = [(int(number), int(process)) for number, process in map(str.split, lines)]
                again, held = past_commit(ran, self._restored[job.name, str(x)])
                sums["ran_again"] += again
                sums["past_commit"] += held
            if ended and len(rows_of) != SIZE[0]:
                self.wrong.append(f"{job.name} has {len(rows_of)} trials of {SIZE[0]}")
            done = job.storage / "done.json"
            if not done.exists() or json.loads(done.read_text())["errors"]:
                self.wrong.append(f"{job.name}: a trial failed: {job.said}")
            sums["resizes"] += sum(event["event"] == "resized" for event in self.events(job))
        return {name: sums[name] for name in (*SUMS, "ran_again", "iterations", "resizes")}


def unanswered(responses: Sequence[serving.Response], fronts: Sequence[float]) -> int:
    """Requests without an answer or a refusal that were not on their way while a front was dead."""
    dead = [
        (at, min((one.came for one in responses if one.what == "answered" and one.sent >= at), default=float("inf")))
        for at in fronts
    ]
    errors = [one for one in responses if one.what == "error"]
    return sum(1 for one in errors if not any(one.came >= at and one.sent <= back for at, back in dead))


def run(options: argparse.Namespace, root: Path, cluster: Head) -> dict[str, Any]:
    """The report of a soak, and the samples of its curves."""
    import ray

    from fluidtune.serving.running_services import known
    from tests.conftest import placement_groups
    from themis_bridge.shell import control

    ray.init(address=cluster.address, log_to_driver=False)
    (port,) = free_ports(1)
    served = runs.run(root)
    control.start("GPU", lease_s=options.lease, notice_s=options.lease / 3, **SETTINGS)
    watch = Watch(1.0)
    watch.start()
    soak = Soak(options.minutes, options.seed, root, cluster)
    clients = None
    try:
        with serving.served(served, port) as driver:
            clients = Asking(port)
            soak.play(driver, options.every, clients)
            became = clients.end()
        seconds = soak.elapsed()
        soak.end()
        stopped = [one.stop() for one in known()]
        leaks = []
        try:
            check_nothing_is_left(cluster)
        except AssertionError as error:
            leaks.append(str(error))
        watch.over = True
        leaks += [] if stopped and control.stop() else ["service or arbiter were not there at the end"]
        leaks += placement_groups()
        leaks += [f"the actor {each}" for each in ray.util.list_named_actors(all_namespaces=True)]
    finally:
        watch.over = True
        if clients is not None:
            clients.end()
        for job in soak.everyone:
            job.process.kill()
    settled = min(SETTLED_S, 60 * options.minutes / 6)
    curves = {name: shape(curve, settled) for name, curve in sorted(soak.samples.curves.items())}
    bad = [what for what in became if what not in ("answered", "refused", "error")]
    return {
        "minutes": options.minutes,
        "seed": options.seed,
        "lease_s": options.lease,
        "kills": dict(soak.kills),
        "jobs": len(soak.everyone),
        **(results := soak.results()),
        "resizes_a_minute": 60 * results["resizes"] / seconds,
        "requests": {name: count for name, count in became.items() if name not in bad},
        "requests_wrong": bad,
        "requests_without_a_reason": unanswered(clients.responses, soak.fronts),
        "leaks": leaks,
        "trouble": [*soak.wrong, *watch.wrong],
        "settled_s": settled,
        "curves": curves,
        "samples": soak.samples.curves,
    }


#: What must be 0 or empty.
NOTHING = (*SUMS, "requests_wrong", "requests_without_a_reason", "leaks", "trouble")


def failed(report: dict[str, Any]) -> list[str]:
    """The names of what is not as it must be. A curve that is too short to be judged is none of them."""
    return [name for name in NOTHING if report[name]] + [
        name for name, curve in report["curves"].items() if curve["flat"] is False
    ]


def table(report: dict[str, Any]) -> str:
    lines = [f"{name:28} {value}" for name, value in report.items() if name != "curves"]
    lines += ["", f"{'curve':28} {'first':>8} {'last':>8} {'an hour':>8}  flat"]
    for name, curve in report["curves"].items():
        numbers = "".join(f" {curve[key]:8.1f}" if key in curve else f" {'':8}" for key in ("first", "last", "an_hour"))
        lines.append(f"{name:28}{numbers}  {({True: 'yes', False: 'NO', None: 'too short'})[curve['flat']]}")
    return "\n".join([*lines, "", f"not as it must be: {', '.join(failed(report)) or 'nothing'}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="mean between two kills")
    parser.add_argument("--lease", type=float, default=15.0, metavar="SECONDS", help="more where a start takes long")
    parser.add_argument("--out", help="a file for the report with all samples")
    parser.add_argument("--inside", nargs=2, metavar=("ADDRESS", "PID"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        address, pid = options.inside
        root = Path(os.environ["TMPDIR"], "runs")
        root.mkdir()
        report = run(options, root, Head(address, dict(os.environ), int(pid)))
        Path(options.out).write_text(json.dumps(report))
        return
    # By it every process of the soak is found, wherever it was forked from. Paths of Ray's sockets must be short.
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    os.environ["TMPDIR"] = str(folder)
    out = Path(options.out or folder / "report.json").absolute()
    words = ["--minutes", options.minutes, "--seed", options.seed, "--every", options.every]
    words += ["--lease", options.lease, "--out", out]
    status = inside("tests.faults.soak", *words, cluster={"num_cpus": 4, "num_gpus": DEVICES})
    if status:
        sys.exit(f"exit status {status}; what the soak left is in {folder}")
    report = json.loads(out.read_text())
    deadline = time.monotonic() + PATIENCE_S
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.5)
    report["leaks"] += [f"process {pid}: {command}" for pid, command in left.items()]
    ours = [each for each in folder.iterdir() if each.name.startswith(PREFIXES) and not each.name.startswith(SWEPT)]
    report["leaks"] += [str(path) for each in ours for path in (each, *each.rglob("*")) if not path.is_dir()]
    out.write_text(json.dumps(report))
    del report["samples"]
    print(table(report), file=sys.stderr)
    print(json.dumps(report))
    if failed(report):
        sys.exit(f"what the soak left is in {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
