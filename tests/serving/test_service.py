"""A run's best trials over HTTP, in a real Ray cluster: answers, refusals, processes that die."""

from __future__ import annotations

import json
import os
import signal

import pytest

import fluidtune
from benchmarks.common import free_ports
from fluidtune.errors import FluidTuneError
from fluidtune.serving import capacity
from tests.serve.driving import until
from tests.serving.asking import ask, command
from tests.serving.runs import FAILS, KILLS, load, logged

pytestmark = [pytest.mark.ray, pytest.mark.core, pytest.mark.serve]

#: Seconds.
SLO_S = 200.0


@pytest.fixture(scope="module")
def served(finished):
    with fluidtune.serve(finished, load, SLO_S, top=2, starts="eager", port=free_ports(1)[0]) as served:
        yield served
    assert logged(finished)[-1]["event"] == "serving_ended"


def test_the_best_trial_answers_and_the_next_one_by_its_name(served):
    assert ask(served, 5) == (200, 15)
    assert [ask(served, 5, trial)[1] for trial in served.trials] == [15, 10]


@pytest.mark.parametrize(
    ("body", "path", "method", "status", "said"),
    [
        ("[1]", "", "POST", 400, "the input is a list, expected number"),
        (" " * (1 << 20) + "1", "", "POST", 413, "the body has more than 1048576 bytes; send less, or serve with"),
        (str(FAILS), "", "POST", 500, "the model failed: ValueError('a negative number')"),
    ],
)
def test_what_cannot_be_answered_harms_nobody(served, body, path, method, status, said):
    found = ask(served, body, path, method)
    assert found[0] == status
    assert said in found[1]["error"]
    assert ask(served, 1) == (200, 3)


def test_status_counts(served):
    before = served.status()["trials"][0]["requests"].get("answered", 0)
    assert ask(served, 7) == (200, 21)
    found = served.status()
    assert found["state"] == "serving"
    assert found["trials"][0]["requests"]["answered"] == before + 1
    assert ask(served, "", method="GET")[1]["trials"][0] == {"trial": served.trials[0], "value": 3.0, "versions": ["1"]}


def test_the_log_the_profiles_and_the_picture_of_a_service(served, finished, tmp_path):
    assert ask(served, 7) == (200, 21)
    assert served.status()["log"] == str(finished / "serving")
    events = logged(finished)
    expected = ["serving_started", *["worker_started"] * 2, *["model_measured"] * 2]
    assert [event["event"] for event in events[:5]] == expected
    assert [one["trial"] for one in events[0]["trials"]] == served.trials
    models = capacity.models_of(str(finished), SLO_S, "eager")
    assert [one.name for one in models] == served.trials
    assert served.picture(str(tmp_path / "minute.png")).read_bytes().startswith(b"\x89PNG")


def test_a_killed_device_is_replaced_and_its_requests_are_answered(served, finished):
    killed, other = until(lambda: served.status()["device_pids"])
    os.kill(killed, signal.SIGKILL)
    assert ask(served, 5) == (200, 15)
    replaced, stays = served.status()["device_pids"]
    assert (replaced != killed, stays) == (True, other)
    told = [(event["event"], event.get("pid")) for event in logged(finished) if event["event"].startswith("worker_")]
    assert told[-2:] == [("worker_lost", None), ("worker_started", replaced)]


def test_ready_follows_the_model_process_while_nobody_asks(served):
    assert ask(served, "", "readyz", "GET") == (200, {"ready": True, "state": "serving"})
    pid, other = served.status()["device_pids"]
    os.kill(pid, signal.SIGSTOP)
    try:
        found = until(lambda: (found := ask(served, "", "readyz", "GET"))[0] == 503 and found)
        assert found[1] == {"error": "refused", "code": "no_model_process", "reason": "no model process answers"}
        assert ask(served, "", "healthz", "GET")[0] == 200
        assert ask(served, "", method="GET")[1]["state"] == "waiting for a model process"
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: ask(served, "", "readyz", "GET")[0] == 200)
    assert (served.status()["device_pids"], ask(served, 5)) == ([pid, other], (200, 15))


def test_an_input_that_ends_processes_is_refused(served):
    status, said = ask(served, KILLS)
    refused = {"error": "refused", "code": "lost_twice", "reason": "two GPUs were lost while they ran it"}
    assert (status, said) == (503, refused)
    assert ask(served, 5) == (200, 15)


def test_two_users_have_a_service_each_of_the_same_run(served, finished):
    """Seen: there was one service a cluster, which anybody could stop."""

    def bert(*given):
        return command("--user", "bert", *given)[1]

    with pytest.raises(FluidTuneError, match=r"has a service 'factors' already, of user .*; give another name"):
        fluidtune.serve(finished, load, SLO_S, user="bert")
    with fluidtune.serve(finished, load, SLO_S, name="mine", user="bert", port=free_ports(1)[0]) as other:
        assert "service 'factors' is of user" in bert("stop", "--name", "factors")
        found = json.loads(bert("status", "--json"))
        assert (found["version"], found["name"], found["log"]) == (1, "mine", str(finished / "serving-mine"))
        with fluidtune.Client(name="mine") as mine, fluidtune.Client(name="factors") as first:
            assert (mine(5), mine.trials(), first.trials()) == (15, other.trials, served.trials)
        assert "1 of 1 processes" in bert("status")
        assert bert("stop") == "stopped\n"
    assert ask(served, 5) == (200, 15)
    assert served.status()["log"] == str(finished / "serving")
