"""Versions of a served model in a real Ray cluster: deployed, refused, promoted, rolled back, restarted."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import ray

import fluidtune
from benchmarks.common import free_ports
from fluidtune.errors import FluidTuneError
from fluidtune.report import read_events
from tests.conftest import assert_nothing_left
from tests.serve.driving import PATIENCE_S, until
from tests.serving.asking import ask, asked, command
from tests.serving.runs import kinds, load_kind

pytestmark = [pytest.mark.ray, pytest.mark.serve, pytest.mark.faults]

#: Seconds. A batch of the trial "slow" takes 6.
SLO_S = 4.0


@pytest.fixture(scope="module")
def run(one_ray, tmp_path_factory):
    one_ray.use(num_cpus=2)
    yield kinds(tmp_path_factory.mktemp("results"))
    assert_nothing_left()


@pytest.fixture(scope="module")
def started(run):
    ballast = os.urandom(200_000)  # More than the 100 KB that Ray keeps itself of an actor's arguments.

    def load(directory, config):
        assert ballast
        return load_kind(directory, config)

    with fluidtune.serve(run[0], load, SLO_S, port=free_ports(1)[0]) as served:
        yield served


@pytest.fixture
def served(started, run):
    """The service with one version, the trial "first", whatever its number is."""
    yield started
    while started.status()["phase"] != "one":
        started.rollback()
    if answer(started)[0] != "first":
        started.deploy(run[0], run[1]["first"])
        started.deploy(run[0], run[1]["second"])
        started.rollback()


def answer(served, number=None):
    """What a request is answered, and the version. number: the request's id."""
    headers = {"X-Request-ID": number} if number else {}
    status, value, said = until(lambda: (found := asked(served, 1, headers=headers))[0] != 503 and found)
    assert status == 200, value
    return value, said.get("Model-Version")


def states(served):
    return {one["version"]: one["state"] for one in served.status()["trials"]}


def test_a_deploy_moves_the_requests_and_a_rollback_brings_them_back(served, run):
    before = served.status()["trials"][0]
    deployed = served.deploy(run[0], run[1]["second"])
    number = str(deployed["version"])
    assert (deployed["state"], answer(served)) == ("serving", ("second", number))
    assert states(served)[before["version"]] == "kept"
    model = served.trials[0]
    assert ask(served, "", f"v2/models/{model}", "GET")[1]["versions"] == [str(before["version"]), number]
    body = {"inputs": [{"name": "input", "shape": [1], "datatype": "INT64", "data": [1]}]}
    old = f"v2/models/{model}/versions/{before['version']}"
    assert ask(served, body, f"{old}/infer")[1]["outputs"][0]["data"] == ["first"]
    assert ask(served, body, f"v2/models/{model}/infer")[1]["model_version"] == number
    assert ask(served, "", f"{old}/ready", "GET")[0] == 200
    assert len(served.status()["device_pids"]) == 2
    served.rollback()
    assert answer(served) == ("first", str(before["version"]))
    until(lambda: ask(served, "", f"v2/models/{model}/versions/{number}/ready", "GET")[0] == 404)
    until(lambda: len(served.status()["device_pids"]) == 1)
    found = {one["version"]: one for one in served.status()["trials"]}[deployed["version"]]
    assert (found["state"], found["requests"]["answered"]) == ("ended", 2)
    changes = [
        event["state"]
        for event in read_events(run[0] / "serving" / "fluid_events.jsonl")
        if event["event"] == "version_changed" and str(event["version"]) == number
    ]
    assert changes == ["loading", "measuring", "serving", "ended"]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("broken", "the checkpoint of trial .* does not load: FileNotFoundError"),
        ("slow", "has an SLO of 4.0 s, but a batch of 1 takes"),
        ("other form", "its inputs have another form than those of version"),
    ],
)
def test_a_deploy_that_cannot_serve_is_refused_in_one_line_and_nobody_is_harmed(served, run, kind, said):
    with pytest.raises(FluidTuneError, match=said) as refused:
        served.deploy(run[0], run[1][kind])
    assert "\n" not in str(refused.value)
    assert answer(served)[0] == "first"
    assert (served.status()["phase"], list(states(served).values())[-1]) == ("one", "refused")
    until(lambda: len(served.status()["device_pids"]) == 1)


@pytest.fixture
def refused(served, run):
    """A deploy that loads for ever and is refused in the end, and the processes of models before it."""
    pool, before = ThreadPoolExecutor(1), _model_processes()
    told = pool.submit(served.deploy, run[0], run[1]["hangs"])
    until(lambda: "loading" in states(served).values())
    yield told, before
    pool.shutdown(wait=False)


def test_a_second_deploy_is_refused_and_a_process_that_is_killed_while_it_loads_ends_the_first(served, run, refused):
    told, before = refused
    with pytest.raises(FluidTuneError, match=r"version \d+ \(trial .*\) is being deployed; wait for it"):
        served.deploy(run[0], run[1]["second"])
    (killed,) = until(lambda: _model_processes() - before)
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(FluidTuneError, match=r"^[^\n]*has ended before it had loaded the model \([^\n]*$"):
        told.result(PATIENCE_S)
    assert answer(served)[0] == "first"


def test_a_deploy_that_loads_can_be_given_up(served, refused):
    served.rollback()
    assert isinstance(refused[0].exception(PATIENCE_S), FluidTuneError) and served.status()["phase"] == "one"
    assert answer(served)[0] == "first"


def test_a_canary_whose_process_is_killed_harms_nobody_and_comes_back(served, run):
    served.deploy(run[0], run[1]["second"], canary=0.9)
    first, second = served.status()["device_pids"]
    os.kill(second, signal.SIGKILL)
    until(lambda: served.status()["device_pids"] not in ([first, second], [first]))
    until(lambda: answer(served)[0] == "second")
    assert served.status()["device_pids"][0] == first


def test_a_front_that_restarts_comes_back_with_its_versions(served, run):
    served.deploy(run[0], run[1]["second"])
    deployed = served.deploy(run[0], run[1]["first"], canary=0.4)
    drawn = {str(one): answer(served, number=str(one)) for one in range(20)}
    assert {version for _, version in drawn.values()} == {str(deployed["version"] - 1), str(deployed["version"])}
    pid = served.status()["pid"]
    os.kill(pid, signal.SIGKILL)

    def back():
        try:
            found = served.status()
        except FluidTuneError:
            return False
        return found["pid"] != pid and found["phase"] == "canary"

    until(back)
    assert {number: answer(served, number=number) for number in drawn} == drawn
    served.promote()
    assert answer(served) == ("first", str(deployed["version"]))


def test_the_commands(served, run):
    trial = run[1]["second"]
    code, said = command("deploy", str(run[0]), "--trial", trial, "--canary", "10%")
    assert code == 0 and said.strip().endswith(
        f"; back with: fluidtune serve --address {ray.get_runtime_context().gcs_address} rollback --name {served.name}"
    ), said
    assert command("promote")[0] == 0
    assert "answers all requests" in command("rollback")[1]
    assert command("rollback")[0] == 2
    assert command("deploy", str(run[0]), "--canary", "10")[0] == 2
    assert "fluidtune: no trial 'nobody' in" in command("deploy", str(run[0]), "--trial", "nobody")[1]


def _model_processes():
    """The ids of the processes of models, those that load included."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        if "ray::ModelProcess" in " ".join(process.info["cmdline"] or []):
            found.add(process.pid)
    return found
