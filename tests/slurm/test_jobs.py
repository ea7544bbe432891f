"""Searches as jobs of a real Slurm: where they run, whose Ray they have, how they end, and what is left of them."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluidtune.report import EVENT_LOG_NAME, read_events
from tests.contracts.processes import until
from tests.faults.test_kills import check_reports
from tests.leftovers import processes_of
from tests.slurm.real_slurm import Slurm

pytestmark = [pytest.mark.ray, pytest.mark.slurm, pytest.mark.newest]

#: Seconds in which a job of the tests is through on a busy machine.
PATIENCE_S = 400
ROOT = str(Path(__file__).parents[2])
#: It says which Ray it has, and searches; with "wait" it waits for its notice, and ends with status 75.
SEARCH = """
import os, signal, sys, time, ray
from ray import tune

ray.init(log_to_driver=False)
has = [int(ray.cluster_resources().get(kind, 0)) for kind in ("CPU", "GPU", "memory", "object_store_memory")]
print("HAS", len(ray.nodes()), *has, min(node["NodeID"] for node in ray.nodes()), sys.argv[1:], flush=True)
if "wait" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: (print("TOLD", flush=True), sys.exit(75)))
    print("WAITS", flush=True)
    time.sleep(600)
config = tune.RunConfig(storage_path=os.getcwd() + "/results-" + os.environ["SLURM_JOB_ID"], verbose=0)
found = tune.Tuner(lambda config: config, param_space={"x": tune.grid_search([1, 2])}, run_config=config).fit()
print("FOUND", [each.metrics["x"] for each in found], flush=True)
"""
#: A search of two trials of 400 iterations, which goes on from its state.
GOES_ON = """
import os
from ray import tune
from tests.faults.jobs import elastic

path = os.getcwd() + "/storage"
os.makedirs(path + "/notes", exist_ok=True)
space = {"x": tune.grid_search([1.0, 2.0]), "iterations": 400, "step": 0.3, "notes": path + "/notes"}
if tune.Tuner.can_restore(path + "/job"):
    tuner = tune.Tuner.restore(path + "/job", elastic, param_space=space)
else:
    config = tune.RunConfig(name="job", storage_path=path, verbose=0)
    tuner = tune.Tuner(elastic, param_space=space, run_config=config)
print("FOUND", len(tuner.fit().errors), flush=True)
"""
#: HyperBand over the network of an example, one trial at a time. It says what each trial has reported.
HYPERBAND = """
import os, sys
import fluidtune
from ray import tune
from ray.tune.schedulers import HyperBandScheduler
from examples.digits_hyperband import train

path, executor = os.getcwd() + "/" + sys.argv[1], fluidtune.FluidExecutor(devices="cpu:1")
if tune.Tuner.can_restore(path + "/job"):
    tuner = fluidtune.Tuner.restore(path + "/job", train, executor=executor)
else:
    fixed = {"seed": 1, "width": 8, "momentum": 0.9, "batch_size": 16, "epochs": 9}
    space = {"lr": tune.grid_search([0.001 * 1.3**number for number in range(12)]), **fixed}
    config = tune.RunConfig(name="job", storage_path=path, verbose=0)
    found = tune.TuneConfig(metric="accuracy", mode="max", scheduler=HyperBandScheduler(max_t=9, reduction_factor=3))
    tuner = fluidtune.Tuner(train, param_space=space, run_config=config, tune_config=found, executor=executor)
results = tuner.fit()
told = [[*zip(each.metrics_dataframe["training_iteration"], each.metrics_dataframe["accuracy"])] for each in results]
best = results.get_best_result().config["lr"]
print("FOUND", best, [(each.config["lr"], *rows) for each, rows in zip(results, told)])
"""


@pytest.fixture(scope="module")
def slurm(pytestconfig: pytest.Config) -> Iterator[Slurm]:
    folder, cores = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp")), pytestconfig.getoption("--at-once")
    running = Slurm(folder, (cores, cores, cores - 1))
    yield running
    running.stop()
    shutil.rmtree(folder)


class Jobs:
    """Jobs whose script and output are in ``folder``. ``place``: their RAY_TMPDIR, in which nothing may be left."""

    def __init__(self, slurm: Slurm, place: Path) -> None:
        self.slurm, self.place = slurm, place
        self.folder = Path(tempfile.mkdtemp(prefix="jobs-", dir=slurm.folder))
        self.folder.chmod(0o777)
        (self.folder / "search.py").write_text(SEARCH)
        (self.folder / "goes_on.py").write_text(GOES_ON)
        (self.folder / "hyperband.py").write_text(HYPERBAND)
        own = {"PYTHONPATH": ROOT, "RAY_TMPDIR": str(place), "TMPDIR": str(place), "HOME": str(self.folder)}
        self.variables = {**slurm.variables, **own}

    def call(self, *command: str, text: str = "", **others: str) -> subprocess.CompletedProcess[str]:
        told = {**self.variables, **others}
        ours = [sys.executable, "-m", *command] if command[0] == "fluidtune" else list(command)
        return subprocess.run(ours, input=text, cwd=self.folder, env=told, capture_output=True, text=True)

    def submit(self, *words: str, name: str = "search.py") -> str:
        done = self.call("fluidtune", "slurm", name, "--time=9", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[1]

    def until_said(self, job: str, word: str) -> str:
        path = self.folder / f"slurm-{job}.out"
        until(lambda: path.exists() and word in path.read_text(), PATIENCE_S)
        return path.read_text()

    def until_ended(self, job: str) -> str:
        until(lambda: self.slurm.fact(job) not in ("PENDING", "RUNNING", "COMPLETING"), PATIENCE_S)
        return self.until_said(job, "")


@pytest.fixture
def jobs(slurm: Slurm, no_ray: None) -> Iterator[Jobs]:
    place = Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))
    place.chmod(0o777)
    yield Jobs(slurm, place)
    until(lambda: not processes_of(place), 60)
    place.rmdir()  # which is empty


def has(output: str) -> list[str]:
    """What a search has said of its Ray: nodes, cores, GPUs, memory, memory of objects, a node's id."""
    return next(line for line in output.splitlines() if line.startswith("HAS")).split()[1:7]


@pytest.mark.core
def test_a_search_has_what_the_job_has_and_leaves_nothing(jobs: Jobs) -> None:
    job = jobs.submit("--nodes", "2", "-c", "2", "--gpus-per-node", "1", "--mem", "2048", "--", "a b")
    output = jobs.until_ended(job)
    assert "FOUND [1, 2]" in output and "['a b']" in output and jobs.slurm.fact(job) == "COMPLETED", output
    nodes, cores, gpus, memory, objects, _ = has(output)
    assert (nodes, cores, gpus) == ("2", "4", "2") and int(memory) + int(objects) == 2 * 2048 << 20


@pytest.mark.timeout(0)
def test_jobs_of_two_users_on_the_same_nodes_have_a_ray_each(jobs: Jobs, pytestconfig: pytest.Config) -> None:
    """Seen: two nodes of one machine, started at once, took one socket, and only one of them joined."""
    reads = f"test -x {sys.executable} && test -r {ROOT}/fluidtune"
    other = "nobody" if jobs.call("su", "nobody", "-s", "/bin/sh", "-c", reads).returncode == 0 else "root"
    sent = {}
    for start in range(pytestconfig.getoption("--starts")):
        words = ["search.py", f"--nodes={1 + (start + 1) % 3}", "--mem=512", "--print"]
        script = jobs.call("fluidtune", "slurm", *words).stdout
        user = ["root", other][start % 2]
        sent[jobs.call("sbatch", "--parsable", f"--uid={user}", text=script).stdout.strip()] = 1 + (start + 1) % 3
    outputs = {job: jobs.until_ended(job) for job in sent}
    # Where the machine is too busy, nodes join later, and a line says so.
    whole = [job for job in sent if "FOUND [1, 2]" in outputs[job]]
    late = [job for job in whole if has(outputs[job])[0] != str(sent[job])]
    unsaid = [job for job in late if "join later" not in outputs[job]]
    wrong = {job: said for job, said in outputs.items() if job in unsaid or job not in whole}
    print(len(sent), "starts;", len(late), "began without all nodes, and said so")
    assert not wrong and len({has(said)[5] for said in outputs.values()}) == len(sent), (other, wrong)


def test_jobs_that_begin_at_once_start_ray_in_turn(jobs: Jobs) -> None:
    """Seen: of 78 jobs, ten at a time, 5 failed, as Ray's own limits for a start are too short on a busy node."""
    turn = os.open(jobs.place, os.O_RDONLY)
    fcntl.flock(turn, fcntl.LOCK_EX)
    job = jobs.submit()
    until(lambda: any("flock" in told.split()[:1] for told in processes_of(jobs.place).values()), PATIENCE_S)
    assert not any("gcs_server" in told for told in processes_of(jobs.place).values())
    os.close(turn)
    assert "FOUND" in jobs.until_ended(job)


def test_before_its_limit_a_search_is_told_and_requeued_and_a_cancelled_one_is_not(jobs: Jobs) -> None:
    job, other = jobs.submit("--nodes=2", "--", "wait"), jobs.submit("--", "wait")
    jobs.until_said(job, "WAITS")
    jobs.slurm.ask("scancel", "--batch", "--signal=USR1", job)  # as --signal=B:USR1@60 does
    until(lambda: jobs.slurm.fact(job) == "PENDING", 60)
    assert "TOLD" in jobs.until_said(job, "") and jobs.slurm.fact(job, "Restarts") == "1"
    jobs.until_said(other, "WAITS")
    jobs.slurm.ask("scancel", job, other)
    jobs.until_ended(other)
    assert jobs.slurm.fact(other, "Restarts") == "0" and jobs.slurm.fact(other) == "CANCELLED"


def test_a_preempted_search_is_told_and_slurm_requeues_it(jobs: Jobs) -> None:
    job = jobs.submit("--nodes=3", "--exclusive", "--", "wait")
    jobs.until_said(job, "WAITS")
    jobs.call("sbatch", "--partition=urgent", "--exclusive", "--output=/dev/null", text="#!/bin/bash\n")
    until(lambda: jobs.slurm.fact(job) == "PENDING", 60)
    output = jobs.until_said(job, "")
    assert "TOLD" in output and has(output)[:2] == ["3", "5"]  # nodes of other sizes
    jobs.slurm.ask("scancel", job)


@pytest.mark.parametrize("program, node", [("raylet", "n2"), ("gcs_server", "n1"), ("slurm.node_host", "n1")])
def test_a_node_or_a_head_that_dies_is_named(program: str, node: str, jobs: Jobs) -> None:
    nodes = ["--nodes=2", "--nodelist=n1,n2"] if node == "n2" else ["--nodelist=n1"]
    job = jobs.submit(*nodes, "--", "wait")
    jobs.until_said(job, "WAITS")
    here = f"SLURMD_NODENAME={node}\0".encode()
    found = processes_of(jobs.place).items()
    pids = [pid for pid, told in found if any(word.endswith(program) for word in told.split()[:3])]
    os.kill(next(pid for pid in pids if here in Path(f"/proc/{pid}/environ").read_bytes()), 9)
    jobs.until_said(job, f"job {job}: Ray on node {node} has ended")
    if program == "raylet":
        assert jobs.slurm.fact(job) == "RUNNING"
        jobs.slurm.ask("scancel", job)
    jobs.until_ended(job)
    if program == "slurm.node_host":  # which has left its folder to this user's next job
        assert list(jobs.place.iterdir()) and "FOUND" in jobs.until_ended(jobs.submit())


def test_a_full_folder_for_temporary_files_is_named(jobs: Jobs) -> None:
    jobs.slurm.ask("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(jobs.place))
    job = jobs.submit()
    output = jobs.until_ended(job)
    left = list(jobs.place.iterdir())
    jobs.slurm.ask("umount", str(jobs.place))
    assert f"job {job}: Ray on node n" in output and "RAY_TMPDIR" in output and not left, output


@pytest.mark.timeout(900)
def test_jobs_of_an_array_join_one_search_and_leave_it(jobs: Jobs) -> None:
    """Seen: the signal that told a node of its end ended its Ray, as Slurm sends it to all processes of a step."""
    array = jobs.submit("-c1", "--mem=1024", "--time=30", "--elastic=3", "--array=1-3%1", name="goes_on.py")
    log = jobs.folder / "storage" / "job" / EVENT_LOG_NAME

    def seen(event: str) -> list[Any]:
        return [each for each in (read_events(log) if log.exists() else []) if each["event"] == event]

    until(lambda: seen("trial_result"), PATIENCE_S)
    jobs.slurm.ask("scontrol", "update", f"JobId={array}", "ArrayTaskThrottle=3")
    until(lambda: len(seen("device_gained")) >= 2 and seen("resized"), PATIENCE_S)
    jobs.slurm.ask("scancel", "--batch", "--signal=USR1", f"{array}_3")  # as --signal=B:USR1@60 does
    until(lambda: jobs.slurm.fact(f"{array}_3") == "PENDING", 60)
    assert "leaves, as its job ends" in jobs.until_said(f"{array}_1", "") and not seen("worker_lost")
    jobs.slurm.ask("scancel", "--batch", "--signal=USR1", f"{array}_1")  # the head
    assert "FOUND 0" in jobs.until_said(f"{array}_2", "FOUND") and len(seen("run_started")) == 2
    until(lambda: not jobs.slurm.ask("squeue", "-h", "-j", array), PATIENCE_S)
    check_reports("elastic", jobs.folder / "storage", 2, 400, jobs.folder)


@pytest.mark.timeout(900)
def test_hyperband_through_several_jobs_decides_as_in_one(jobs: Jobs) -> None:
    job = jobs.submit("-c1", "--mem=1024", "--", "several", name="hyperband.py")
    log = jobs.folder / "several" / "job" / EVENT_LOG_NAME
    for restarts in ("1", "2", "3"):
        seen = log.read_text().count('"trial_result"') if log.exists() else 0
        until(lambda: log.exists() and log.read_text().count('"trial_result"') > seen + 8, PATIENCE_S)  # noqa: B023
        jobs.slurm.ask("scancel", "--batch", "--signal=USR1", job)  # as --signal=B:USR1@60 does
        until(lambda: jobs.slurm.fact(job, "Restarts") == restarts, PATIENCE_S)  # noqa: B023
    one = jobs.submit("-c1", "--mem=1024", "--", "one", name="hyperband.py")
    found = [jobs.until_said(each, "FOUND").partition("FOUND")[2].splitlines()[0] for each in (job, one)]
    assert found[0] == found[1]


def test_in_an_allocation_of_ones_own(jobs: Jobs) -> None:
    done = jobs.call("salloc", "--nodes=2", sys.executable, "-m", "fluidtune", "run", "search.py")
    assert done.returncode == 0 and has(done.stdout)[:2] == ["2", "2"] and "FOUND [1, 2]" in done.stdout, done.stderr
    told = jobs.call("srun", "--nodelist=n1", "--mem=2048", sys.executable, "-m", "fluidtune", "doctor").stdout
    assert "on n1, which `fluidtune run` uses; Ray starts with --num-cpus=1 --num-gpus=0" in told


def test_what_cannot_be_is_one_line(jobs: Jobs) -> None:
    refused = jobs.call("fluidtune", "slurm", "search.py", "--partition", "none")
    assert "sbatch refuses: " in refused.stderr and "invalid partition" in refused.stderr
    absent = jobs.call("fluidtune", "slurm", "search.py", PATH="/none")
    assert "there is no sbatch here" in absent.stderr
    missing = jobs.call("fluidtune", "slurm", "none.py", "--nodes", "2")
    assert "there is no script 'none.py'" in missing.stderr
    for done in (refused, absent, missing):
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    several = jobs.call("srun", "--ntasks=2", sys.executable, "-m", "fluidtune", "run", "search.py")
    assert "srun starts this search 2 times; start it once" in several.stderr
    nowhere = jobs.call("srun", sys.executable, "-m", "fluidtune", "run", "search.py", RAY_TMPDIR="/proc")
    assert "Ray on node n" in nowhere.stderr and "name another folder than /proc by RAY_TMPDIR" in nowhere.stderr
