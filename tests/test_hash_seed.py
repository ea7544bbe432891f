"""All workers of a job hash strings alike."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import psutil
import pytest

from fluidtune import hash_seed


class Child:
    """A process that this one has started."""

    def __init__(self, name, variable):
        self._name, self._variable = name, variable

    def name(self):
        return self._name

    def environ(self):
        return {} if self._variable is None else {hash_seed.VARIABLE: self._variable}


#: What workers need whose node, or cluster, does not inherit the variable from this process, where it is 7.
OURS = {"env_vars": {hash_seed.VARIABLE: "7"}}
V1 = {"RAY_TRAIN_V2_ENABLED": "0"}


@pytest.mark.parametrize(
    ("children", "nodes", "given", "also", "needed"),
    [
        ([("gcs_server", "7"), ("raylet", "7")], 1, {}, {}, None),
        *((others, 1, {}, {}, OURS) for others in ([], [("raylet", None)], [("raylet", "8")], [("python", "7")])),
        ([("raylet", "7")], 2, {"env_vars": {"OTHER": "1"}}, {}, OURS),  # somebody else has started a node
        ([], 1, {"env_vars": {hash_seed.VARIABLE: "3"}}, {}, None),  # the user's value holds
        ([], 1, {"env_vars": {hash_seed.VARIABLE: "3"}}, V1, {"env_vars": V1}),
        ([("raylet", "7")], 1, {}, V1, {"env_vars": {**V1, **OURS["env_vars"]}}),  # set after the node's start
    ],
    ids=str,
)
def test_workers_get_the_variables_unless_they_inherit_them(monkeypatch, children, nodes, given, also, needed):
    monkeypatch.setenv(hash_seed.VARIABLE, "7")
    monkeypatch.setattr(psutil.Process, "children", lambda self: [Child(*child) for child in children])
    assert hash_seed.runtime_env(nodes, given, also) == needed


@pytest.mark.parametrize(
    ("given", "kept"), [({}, False), ({"PYTHONHASHSEED": "5"}, True), ({"RAY_RAYLET_PID": "1"}, True)]
)
def test_an_import_sets_it_where_a_cluster_may_be_started(given, kept):
    environment = {k: v for k, v in os.environ.items() if k != hash_seed.VARIABLE} | given
    code = "import os, fluidtune; print(os.environ.get('PYTHONHASHSEED'))"
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert (answer.stdout.strip() == str(given.get(hash_seed.VARIABLE))) == kept


SEARCH = """
import os, sys
from inspect import getsourcefile
import ray
ray.init(num_cpus=2, include_dashboard=False)  # somebody else's cluster: FluidTune was not there when it started
os.environ["RAY_TRAIN_V2_ENABLED"] = "0"
import fluidtune
from ray import tune

def train(config):
    tune.report({"hash": hash("word"), "pid": os.getpid(), "same": getsourcefile(ray.train.report) == config["file"]})
    if not os.path.exists(os.path.join(config["storage"], "repaired")):
        raise ValueError("the run goes on in another process")
    tune.report({"hash": hash("word"), "pid": os.getpid(), "same": getsourcefile(ray.train.report) == config["file"]})

if sys.argv[2] == "fails":
    tuner = fluidtune.Tuner(
        train,
        param_space={"x": tune.grid_search([1, 2]), "storage": sys.argv[1], "file": getsourcefile(ray.train.report)},
        run_config=tune.RunConfig(name="run", storage_path=sys.argv[1]),
        executor=fluidtune.FluidExecutor(devices="cpu:2"),
    )
else:
    tuner = fluidtune.Tuner.restore(os.path.join(sys.argv[1], "run"), train, resume_errored=True)
print("found", [[result.metrics[key] for key in ("pid", "hash", "same")] for result in tuner.fit()])
"""


def found(storage, how):
    environment = {k: v for k, v in os.environ.items() if k != hash_seed.VARIABLE}
    given = [sys.executable, "-c", SEARCH, str(storage), how]
    answer = subprocess.run(given, env=environment, capture_output=True, text=True, timeout=300)
    line = next((line for line in answer.stdout.splitlines() if line.startswith("found ")), None)
    assert line is not None, answer.stdout + answer.stderr
    return ast.literal_eval(line.removeprefix("found "))


@pytest.mark.ray
def test_all_worker_processes_of_a_run_hash_a_word_alike(no_ray, tmp_path):
    """Also those of drivers that go on with it. Seen: a vocabulary of `set(words)` met an embedding of other ids.

    Seen: it did when the run was restored a second time. Seen: on a cluster that is joined, `ray.train` of a script
    that chose its old version was the new one in the trials.
    """
    pairs = found(tmp_path, "fails") + found(tmp_path, "goes on")
    (tmp_path / "repaired").touch()
    pairs += found(tmp_path, "goes on")
    assert len({pid for pid, _, _ in pairs}) == 6
    assert {same for _, _, same in pairs} == {True} and len({word for _, word, _ in pairs}) == 1


def test_a_restored_run_has_the_value_of_its_run_and_the_users_holds(monkeypatch):
    monkeypatch.delenv(hash_seed.VARIABLE, raising=False)
    monkeypatch.delenv(hash_seed.OURS, raising=False)
    drawn = hash_seed.of_workers({})
    for of_run in ("7", "22"):  # this process restores one run after another
        hash_seed.go_on_with(of_run)
        assert hash_seed.of_workers({}) == of_run != drawn
    for odd in ("None", str(2**32), "-1", "7\0"):  # a state that is damaged
        hash_seed.go_on_with(odd)
    assert hash_seed.of_workers({}) == "22"
    assert hash_seed.of_workers({"env_vars": {hash_seed.VARIABLE: "3"}}) == "3"
    monkeypatch.setenv(hash_seed.VARIABLE, "7")  # the user's
    hash_seed.go_on_with("8")
    assert hash_seed.of_workers({}) == "7"


def test_a_value_that_a_parent_process_has_drawn_is_not_the_users(monkeypatch):
    monkeypatch.delenv(hash_seed.VARIABLE, raising=False)
    hash_seed.of_workers({})
    code = "import os; from fluidtune import hash_seed; hash_seed.go_on_with('9'); print(hash_seed.of_workers({}))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "9"
