"""A service and other jobs that share a real Ray cluster of two CPUs through the real arbiter, or one CPU by turns."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time

import pytest
from ray import tune

import fluidtune
from benchmarks.common import free_ports
from fluidtune.cluster.sharing.beside import LANE, Turn
from salus_share.seat_table import SeatTable, home
from salus_share.turns import INSIDE
from tests.faults.serving import Clients, until
from tests.serving import runs
from tests.serving.asking import ask
from tests.serving.runs import load, logged
from tests.tune.running import forks_ready
from themis_bridge import JobInfo
from themis_bridge.fairness import kinds_of
from themis_bridge.messages import Report
from themis_bridge.shell import control
from themis_bridge.shell.tenant import Tenant

pytestmark = [pytest.mark.ray, pytest.mark.serve]

#: Seconds: of the SLO; and after which the arbiter forgets an app that is silent, so that a front comes back soon.
SLO_S, FORGETS_S = 200.0, 4.0
APP = "factors-served"


@pytest.fixture(scope="module")
def served(finished):
    """A service with one of two CPUs, under leases that are long beside the tests."""
    control.start("CPU", lease_s=300.0, notice_s=4.0, pace_s=0.5, patience_s=FORGETS_S)
    try:
        with fluidtune.serve(finished, load, SLO_S, arbiter="auto", port=free_ports(1)[0]) as served:
            yield served
        until(lambda: APP not in control.status()["apps"], "a service that has left the arbiter")
        assert [event["event"] for event in logged(finished)][-1] == "serving_ended"
    finally:
        control.stop()


@pytest.fixture
def clients(served):
    asking = Clients(int(served.url.rsplit(":", 1)[1].strip("/")))
    yield asking
    asking.end()


def held(app):
    """How many leases an app holds by the arbiter's word."""
    return len(control.status()["apps"].get(app, {"leases": ()})["leases"])


@pytest.fixture
def lane():
    """The usual lane; its files are removed."""
    yield home(LANE)
    shutil.rmtree(home(LANE))


def inside(name):
    """Whether a process of that name has its turn now."""
    table = SeatTable(home(LANE))
    with table.lock():
        return any(seat.state == INSIDE and seat.name.startswith(name) for seat in table.seats())


def train_beside(config):
    for _ in range(2):
        tune.report({"turn": inside(tune.get_context().get_trial_id()), "service": inside("service")})


def test_each_iteration_of_a_search_beside_a_service_is_a_turn_in_the_lane_of_the_service(one_ray, lane, tmp_path):
    one_ray.use(num_cpus=1)
    forks_ready()
    service = Turn("service", served=True)
    with service.taken():
        pass
    tuner = fluidtune.Tuner(
        train_beside,
        param_space={"number": tune.grid_search([1, 2])},
        run_config=tune.RunConfig(storage_path=str(tmp_path)),
        executor=fluidtune.FluidExecutor(devices="cpu:1", beside=True),
    )
    results = tuner.fit()
    service.leave()
    assert [(one.metrics["turn"], one.metrics["service"]) for one in results] == [(True, False)] * 2


def load_slow(directory, config):
    """Each input takes half a second."""
    multiply = load(directory, config)

    def slow(numbers):
        time.sleep(0.5 * len(numbers))
        return multiply(numbers)

    slow.samples = [1]
    return slow


@pytest.mark.newest
def test_a_load_beyond_one_device_gets_another_one(finished):
    """`Clients` are four, and one device answers three of them within the SLO at most. The service has both CPUs."""
    control.start("CPU", notice_s=4.0, pace_s=0.5)
    port = free_ports(1)[0]
    try:
        with fluidtune.serve(finished, load_slow, 1.8, max_batch=1, arbiter="auto", port=port) as served:
            asking = Clients(port)
            try:
                until(lambda: served.status()["devices"] == 2, "a second device")
            finally:
                became = asking.end()
    finally:
        control.stop()
    assert set(became) == {"answered", "refused"}
    assert max(event["wanted"] for event in logged(finished) if event["event"] == "devices_wanted") > 1


def train(config):
    for _ in range(5):
        time.sleep(0.2)
        tune.report({"score": config["number"]})


def test_a_search_and_a_service_get_devices_and_requests_are_answered(served, clients, tmp_path):
    seen = []

    class Look(tune.Callback):
        def on_trial_result(self, *given, **more):
            seen.append((held(APP), held("search")))

    results = fluidtune.Tuner(
        train,
        param_space={"number": tune.grid_search([1, 2, 3, 4])},
        run_config=tune.RunConfig(name="search", storage_path=str(tmp_path), callbacks=[Look()], verbose=0),
        executor=fluidtune.FluidExecutor(arbiter="auto"),
    ).fit()
    assert sorted(one.metrics["score"] for one in results) == [1, 2, 3, 4]
    assert set(seen) == {(1, 1)}
    became = clients.end()
    assert became["answered"] > 0 and set(became) == {"answered"}
    found = served.status()
    assert (found["app"], found["devices"], found["devices_wanted"], len(found["device_pids"])) == (APP, 1, 1, 1)


class Greedy:
    """A job that wants both CPUs, and has hours of work."""

    def report(self):
        return Report((kinds_of([JobInfo(1, 1e4)] * 2),), peak=2)


@contextlib.contextmanager
def other_job():
    """Another job has both CPUs meanwhile, which are its reserve."""
    control.change(None, {"reserves": {"other": 2}})
    other = Tenant("other", Greedy(), {"CPU": 1.0}, "CPU")
    try:
        until(lambda: held("other") == 2, "a job that has its reserve")
        yield
    finally:
        other.close()


def test_a_lease_is_recalled_under_load_and_each_request_is_answered_or_refused(served, clients, finished):
    until(lambda: clients.became["answered"] > 0, "an answer")
    with other_job():
        until(lambda: clients.became["refused"] > 0, "a request that is refused")
        status, said = ask(served, 5)
        assert (status, said["reason"]) == (503, "the service has no device now: waiting for a lease of a CPU")
        assert served.status()["state"] == "waiting for a lease of a CPU"
    before = clients.became["answered"]
    until(lambda: clients.became["answered"] > before, "an answer from the next lease")
    became = clients.end()
    assert set(became) == {"answered", "refused"}
    leases = [event["event"] for event in logged(finished) if event["event"].startswith("device_")]
    assert leases[-3:] == ["device_gained", "device_returned", "device_gained"]


def test_a_version_stands_on_the_same_leases_and_comes_along_to_the_next_one(served, finished):
    other = next(trial for trial, factor in runs.factors(finished).items() if factor == 2)
    until(lambda: held(APP) and served.status()["device_pids"], "a device")
    deployed = served.deploy(finished, other)
    assert (deployed["state"], ask(served, 5), held(APP)) == ("serving", (200, 10), 1)
    pids = served.status()["device_pids"]
    with other_job():
        pass
    until(lambda: len(served.status()["device_pids"]) == 2, "both versions on the next lease")
    assert not set(pids) & set(served.status()["device_pids"])
    until(lambda: ask(served, 5) == (200, 10), "an answer of the version that serves")
    served.rollback()
    assert ask(served, 5) == (200, 15)


def test_a_killed_front_comes_back_under_its_name(served, clients):
    until(lambda: clients.became["answered"] > 0, "an answer")
    pid = served.status()["pid"]
    os.kill(pid, signal.SIGKILL)

    def again():
        try:
            return served.status()["pid"] != pid
        except fluidtune.FluidTuneError:  # the front is starting anew
            return False

    until(again, "another front")
    before = clients.became["answered"]
    until(lambda: clients.became["answered"] > before, "an answer of the new front")
    assert held(APP) == 1
    became = clients.end()
    assert set(became) <= {"answered", "refused", "error"}
