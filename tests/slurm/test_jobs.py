"""Searches as jobs of a real Slurm: where they run, whose Ray they have, how they end, and what is left of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.leftovers import processes_of
from tests.slurm.real_slurm import Slurm, until

pytestmark = [pytest.mark.ray, pytest.mark.slurm, pytest.mark.newest]

#: Seconds in which a job of the tests is through on a busy machine.
PATIENCE_S = 250
ROOT = str(Path(__file__).parents[2])
#: It says which Ray it has, and searches; with "wait" it waits for its notice, and ends with status 75.
SEARCH = """
import os, signal, sys, time, ray
from ray import tune

ray.init(log_to_driver=False)
has = [int(ray.cluster_resources().get(kind, 0)) for kind in ("CPU", "GPU", "memory", "object_store_memory")]
print("HAS", len(ray.nodes()), *has, os.environ["RAY_ADDRESS"], sys.argv[1:], flush=True)
if "wait" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: (print("TOLD", flush=True), sys.exit(75)))
    print("WAITS", flush=True)
    time.sleep(600)
config = tune.RunConfig(storage_path=os.getcwd() + "/results", verbose=0)
found = tune.Tuner(lambda config: config, param_space={"x": tune.grid_search([1, 2])}, run_config=config).fit()
print("FOUND", [each.metrics["x"] for each in found], flush=True)
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    running = Slurm(folder)
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
        own = {"PYTHONPATH": ROOT, "RAY_TMPDIR": str(place), "TMPDIR": str(place), "HOME": str(self.folder)}
        self.variables = {**slurm.variables, **own}

    def call(self, *command: str, text: str = "", **others: str) -> subprocess.CompletedProcess[str]:
        told = {**self.variables, **others}
        ours = [sys.executable, "-m", *command] if command[0] == "fluidtune" else list(command)
        return subprocess.run(ours, input=text, cwd=self.folder, env=told, capture_output=True, text=True)

    def submit(self, *words: str) -> str:
        done = self.call("fluidtune", "slurm", "search.py", "--time=9", *words)
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
    """What a search has said of its Ray: nodes, cores, GPUs, memory, memory of objects, address."""
    return next(line for line in output.splitlines() if line.startswith("HAS")).split()[1:7]


@pytest.mark.core
def test_a_search_has_what_the_job_has_and_leaves_nothing(jobs: Jobs) -> None:
    job = jobs.submit("--nodes", "2", "-c", "2", "--gpus-per-node", "1", "--mem", "2048", "--", "a b")
    output = jobs.until_ended(job)
    assert "FOUND [1, 2]" in output and "['a b']" in output and jobs.slurm.fact(job) == "COMPLETED", output
    nodes, cores, gpus, memory, objects, _ = has(output)
    assert (nodes, cores, gpus) == ("2", "4", "2") and int(memory) + int(objects) == 2 * 2048 << 20


def test_jobs_of_two_users_on_the_same_nodes_have_a_ray_each(jobs: Jobs) -> None:
    script = jobs.call("fluidtune", "slurm", "search.py", "--nodes=2", "--mem=2048", "--print").stdout
    reads = f"test -x {sys.executable} && test -r {ROOT}/fluidtune"
    other = "nobody" if jobs.call("su", "nobody", "-s", "/bin/sh", "-c", reads).returncode == 0 else "root"
    sent = [jobs.call("sbatch", "--parsable", f"--uid={user}", text=script) for user in ("root", other)]
    outputs = [jobs.until_ended(job.stdout.strip()) for job in sent]
    assert all("FOUND [1, 2]" in output and has(output)[:2] == ["2", "2"] for output in outputs), outputs
    assert has(outputs[0])[5] != has(outputs[1])[5]


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
    assert "TOLD" in jobs.until_said(job, "")
    jobs.slurm.ask("scancel", job)


@pytest.mark.parametrize("program, node", [("raylet", "n2"), ("gcs_server", "n1")])
def test_a_node_or_a_head_that_dies_is_named(program: str, node: str, jobs: Jobs) -> None:
    job = jobs.submit("--nodes=2", "--", "wait")
    jobs.until_said(job, "WAITS")
    here = f"SLURMD_NODENAME={node}\0".encode()
    pids = [pid for pid, told in processes_of(jobs.place).items() if told.split()[0].endswith(f"/{program}")]
    os.kill(next(pid for pid in pids if here in Path(f"/proc/{pid}/environ").read_bytes()), 9)
    jobs.until_said(job, f"job {job}: Ray on node {node} has ended ({program})")
    if program == "raylet":
        assert jobs.slurm.fact(job) == "RUNNING"
        jobs.slurm.ask("scancel", job)
    jobs.until_ended(job)


def test_in_an_allocation_of_ones_own(jobs: Jobs) -> None:
    done = jobs.call("salloc", "--nodes=2", sys.executable, "-m", "fluidtune", "run", "search.py")
    assert done.returncode == 0 and has(done.stdout)[:2] == ["2", "2"] and "FOUND [1, 2]" in done.stdout, done.stderr
    told = jobs.call("srun", "--mem=2048", sys.executable, "-m", "fluidtune", "doctor").stdout
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
    assert "Ray on node n1" in nowhere.stderr and "name another folder than /proc by RAY_TMPDIR" in nowhere.stderr
