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
#: It says which Ray it has, searches, and waits for its notice where it is told to.
SEARCH = """
import os, signal, sys, time
import ray
from ray import tune

ray.init(log_to_driver=False)
has = ray.cluster_resources()
kinds = [int(has.get(kind, 0)) for kind in ("CPU", "GPU", "memory", "object_store_memory")]
print("HAS", len(ray.nodes()), *kinds, os.environ["RAY_ADDRESS"], sys.argv[1:], flush=True)
def leave(*_):
    print("TOLD", flush=True)
    sys.exit(75)
def train(config):
    for x in range(3):
        tune.report({"loss": config["x"] * x})
if "wait" in sys.argv:
    signal.signal(signal.SIGTERM, leave)
    print("WAITS", flush=True)
    time.sleep(600)
config = tune.RunConfig(storage_path=os.getcwd() + "/results", verbose=0)
found = tune.Tuner(train, param_space={"x": tune.grid_search([1, 2])}, run_config=config).fit()
print("FOUND", [each.metrics["loss"] for each in found], flush=True)
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    running = Slurm(folder, nodes=3)
    yield running
    running.stop()
    shutil.rmtree(folder)


@pytest.fixture
def place() -> Iterator[Path]:
    """RAY_TMPDIR of the jobs, in which nothing may be left, nor a process that was told of it."""
    folder = Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))
    folder.chmod(0o777)
    yield folder
    until(lambda: not processes_of(folder), 60)
    assert list(folder.iterdir()) == []
    folder.rmdir()


class Jobs:
    """Jobs of the tests: scripts and outputs are in ``folder``."""

    def __init__(self, slurm: Slurm, place: Path) -> None:
        self.slurm = slurm
        self.folder = Path(tempfile.mkdtemp(prefix="jobs-", dir=slurm.folder))
        self.folder.chmod(0o777)
        (self.folder / "search.py").write_text(SEARCH)
        own = {"PYTHONPATH": ROOT, "RAY_TMPDIR": str(place), "TMPDIR": str(place), "HOME": str(self.folder)}
        self.variables = {**slurm.variables, **own}

    def call(self, *words: str, python: str = sys.executable, **others: str) -> subprocess.CompletedProcess[str]:
        command = [python, "-m", "fluidtune", *words]
        told = {**self.variables, **others}
        return subprocess.run(command, cwd=self.folder, env=told, capture_output=True, text=True, timeout=PATIENCE_S)

    def submit(self, *words: str, **others: str) -> str:
        done = self.call("slurm", *words, **others)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[1]

    def output(self, job: str) -> str:
        path = self.folder / f"slurm-{job}.out"
        return path.read_text() if path.exists() else ""

    def until_said(self, job: str, word: str) -> str:
        until(lambda: word in self.output(job), PATIENCE_S)
        return self.output(job)

    def until_ended(self, job: str) -> str:
        until(lambda: self.slurm.state(job) not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), PATIENCE_S)
        return self.output(job)


@pytest.fixture
def jobs(slurm: Slurm, place: Path, no_ray: None) -> Jobs:
    return Jobs(slurm, place)


def has(output: str) -> list[str]:
    """What a search has said of its Ray: nodes, cores, GPUs, memory, memory of objects, address."""
    return next(line for line in output.splitlines() if line.startswith("HAS")).split()[1:7]


@pytest.mark.core
def test_a_search_has_what_the_job_has_and_leaves_nothing(jobs: Jobs) -> None:
    options = ["--nodes", "2", "-c", "2", "--gpus-per-node", "1", "--mem", "2048"]
    job = jobs.submit("search.py", *options, "--time", "9", "--", "a b")
    output = jobs.until_ended(job)
    assert "FOUND [2, 4]" in output and "['a b']" in output and jobs.slurm.state(job) == "COMPLETED", output
    nodes, cores, gpus, memory, objects, _ = has(output)
    assert (nodes, cores, gpus) == ("2", "4", "2") and int(memory) + int(objects) == 2 * 2048 << 20


def test_two_users_jobs_on_the_same_nodes_have_a_ray_each(jobs: Jobs) -> None:
    text = jobs.call("slurm", "search.py", "--nodes", "2", "--print").stdout
    can = subprocess.run(
        ["su", "nobody", "-s", "/bin/sh", "-c", f"test -x {sys.executable} && test -r {ROOT}/fluidtune"]
    )
    users = ["root", "nobody" if can.returncode == 0 else "root"]
    ids = []
    for user in users:
        (jobs.folder / user).mkdir(exist_ok=True)
        shutil.chown(jobs.folder / user, user)
        shutil.copy(jobs.folder / "search.py", jobs.folder / user)
        told = {**jobs.variables, "HOME": str(jobs.folder / user)}
        command = ["sbatch", "--parsable", f"--uid={user}", "--output", f"{jobs.folder}/{user}/slurm-%j.out"]
        done = subprocess.run(
            command, input=text, cwd=jobs.folder / user, env=told, capture_output=True, text=True, check=True
        )
        ids.append(f"{done.stdout.strip()}")
    outputs = []
    for user, job in zip(users, ids, strict=True):
        jobs.until_ended(job)
        outputs.append((jobs.folder / user / f"slurm-{job}.out").read_text())
    assert all("FOUND [2, 4]" in output and has(output)[:2] == ["2", "2"] for output in outputs), outputs
    assert has(outputs[0])[5] != has(outputs[1])[5]


def test_before_its_limit_a_search_is_told_and_requeued_and_a_cancelled_one_is_not(jobs: Jobs) -> None:
    job = jobs.submit("search.py", "--nodes", "2", "--time", "9", "--", "wait")
    jobs.until_said(job, "WAITS")
    jobs.slurm.ask("scancel", "--batch", "--signal=USR1", job)  # as --signal=B:USR1@60 does
    until(lambda: jobs.slurm.state(job) == "PENDING", 60)
    assert "TOLD" in jobs.output(job) and jobs.slurm.fact(job, "Restarts") == "1"
    jobs.slurm.ask("scancel", job)
    other = jobs.submit("search.py", "--time", "9", "--", "wait")
    jobs.until_said(other, "WAITS")
    jobs.slurm.ask("scancel", other)
    jobs.until_ended(other)
    assert jobs.slurm.fact(other, "Restarts") == "0" and jobs.slurm.state(other) == "CANCELLED"


@pytest.mark.parametrize("program, said", [("raylet", "n2 has ended (raylet)"), ("gcs_server", "n1 has ended (gcs")])
def test_a_node_and_a_head_that_die_are_named(program: str, said: str, jobs: Jobs, place: Path) -> None:
    job = jobs.submit("search.py", "--nodes", "2", "--time", "9", "--", "wait")
    jobs.until_said(job, "WAITS")
    found = {pid: told for pid, told in processes_of(place).items() if told.partition(" ")[0].endswith(f"/{program}")}
    members = [pid for pid in found if program == "gcs_server" or _node_of(pid) == "n2"]
    os.kill(members[0], 9)
    output = jobs.until_said(job, said)
    assert f"job {job}: Ray on node {said}" in output
    if program == "raylet":
        jobs.slurm.ask("scancel", job)
    jobs.until_ended(job)
    assert jobs.slurm.state(job) == ("CANCELLED" if program == "raylet" else "FAILED")


def _node_of(pid: int) -> str:
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(word for word in words if word.startswith(b"SLURMD_NODENAME=")).partition(b"=")[2].decode()


def test_in_an_allocation_of_ones_own(jobs: Jobs) -> None:
    command = ["salloc", "--nodes=2", sys.executable, "-m", "fluidtune", "run", "search.py"]
    done = subprocess.run(
        command, cwd=jobs.folder, env=jobs.variables, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0 and has(done.stdout)[:2] == ["2", "2"] and "FOUND [2, 4]" in done.stdout, done.stderr


def test_what_slurm_refuses_is_one_line(jobs: Jobs) -> None:
    refused = jobs.call("slurm", "search.py", "--partition", "none")
    assert refused.returncode == 2 and "sbatch submits no job: " in refused.stderr and "sinfo" in refused.stderr
    assert "invalid partition" in refused.stderr and len(refused.stderr.splitlines()) == 1
    absent = jobs.call("slurm", "search.py", PATH="/none")
    assert absent.returncode == 2 and "there is no sbatch here" in absent.stderr
    missing = jobs.call("slurm", "none.py", "--nodes", "2")
    assert missing.returncode == 2 and "there is no script 'none.py'" in missing.stderr
    full = jobs.slurm.ask(
        "sbatch",
        "--parsable",
        "--time=9",
        f"--output={jobs.folder}/slurm-%j.out",
        "--wrap",
        f"RAY_TMPDIR=/proc PYTHONPATH={ROOT} {sys.executable} -m fluidtune run {jobs.folder}/search.py",
    ).strip()
    output = jobs.until_ended(full)
    assert f"job {full}: Ray on node n1" in output and "name another folder by RAY_TMPDIR" in output
