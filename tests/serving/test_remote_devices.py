"""The front's side of a model process, with a Ray that the test holds in its hands."""

from __future__ import annotations

from asyncio import run
from types import SimpleNamespace

import pytest
from ray.exceptions import GetTimeoutError, RayActorError

from fluidtune.serving import remote_devices
from fluidtune.serving.model_process import Loading
from fluidtune.serving.remote_devices import RemoteDevice
from fluidtune.serving.served_devices import Measured
from symphony_serve.errors import DeviceLost, ServeError

SAMPLES = {"t": [1]}


class Cluster:
    """Stands for Ray. answers: what `get` gives for each method, in this order; an exception is raised."""

    def __init__(self, **answers):
        self.answers, self.started, self.killed = answers, 0, 0

    def remote(self, actor_class):
        return self

    def options(self, **given):
        def start(loading):
            self.started += 1
            names = ("ready", "run", "measure", "alive")
            return SimpleNamespace(**{name: SimpleNamespace(remote=lambda *given, name=name: name) for name in names})

        return SimpleNamespace(remote=start)

    async def fetched(self, method, wait_s):
        answer = self.answers[method].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self, actor):
        self.killed += 1


@pytest.fixture
def device(monkeypatch):
    """Makes a device in a cluster that gives these answers. Returns both, and what the device tells."""

    def make(**answers):
        cluster, told = Cluster(**answers), []
        monkeypatch.setattr(remote_devices, "ray", cluster)
        monkeypatch.setattr(remote_devices, "fetched", cluster.fetched)
        loading = Loading(b"", (), (SimpleNamespace(name="t"),))
        made = RemoteDevice(1, loading, {}, lambda event, **fields: told.append((event, fields.get("worker"))))
        return made, cluster, told

    return make


def test_a_load_that_never_ends_is_an_error_in_the_end(device, monkeypatch):
    monkeypatch.setattr(remote_devices, "LOAD_S", -1.0)
    made, _, told = device(ready=[GetTimeoutError()])
    with pytest.raises(
        ServeError, match=r"no process has loaded the models within .*; is there a free device, and does"
    ):
        run(made.look())
    assert told == []


def test_a_load_that_takes_its_time_is_waited_for(device):
    made, _, told = device(ready=[GetTimeoutError(), (7, SAMPLES)])
    assert run(made.look()) is None
    assert run(made.look()) == SAMPLES
    assert (made.pid, told) == (7, [("worker_started", "models-1-1")])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RayActorError(),
            r"a process has ended before it had loaded the models \(.*\); does load end it, or need more",
        ),
        (RayActorError(error_msg="Traceback ...\nServeError: check load\n"), "^check load$"),
    ],
)
def test_a_process_that_ends_while_it_loads_is_told(device, error, said):
    made, _, _ = device(ready=[error])
    with pytest.raises(ServeError, match=said):
        run(made.look())


def test_a_batch_says_how_long_it_has_waited_for_its_turn(device):
    made, _, _ = device(run=[([(200, "2")], 0.5)], measure=[([(200, "2")], 0.25)])
    assert run(made.run("t", [1])) == ([(200, "2")], 0.5)
    assert run(Measured(made).run("t", [1])) == ([(200, "2")], 0.25)


@pytest.mark.parametrize("error", [RayActorError(), GetTimeoutError()], ids=["dies", "hangs"])
def test_a_process_that_dies_or_hangs_is_told_and_replaced(device, error):
    made, cluster, told = device(ready=[(7, SAMPLES), (8, SAMPLES)], run=[error])
    assert run(made.look()) == SAMPLES
    with pytest.raises(DeviceLost) as lost:
        run(made.run("t", [1]))
    assert (made.pid, cluster.started, cluster.killed) == (None, 2, 1)
    assert run(lost.value.back())
    assert made.pid == 8
    assert told == [("worker_started", "models-1-1"), ("worker_lost", "models-1-1"), ("worker_started", "models-1-2")]


def test_a_device_that_was_stopped_while_it_came_back_gets_no_process_any_more(device, monkeypatch):
    monkeypatch.setattr(remote_devices, "PAUSE_S", 0.0)
    made, cluster, told = device(ready=[RayActorError()], run=[RayActorError()])
    with pytest.raises(DeviceLost) as lost:
        run(made.run("t", [1]))
    made.stop()
    assert not run(lost.value.back())
    assert (made.pid, cluster.started) == (None, 2)
    assert told == [("worker_lost", "models-1-1")]


def test_an_idle_process_that_does_not_answer_is_waited_for(device):
    made, cluster, told = device(ready=[(7, SAMPLES)], alive=[None, GetTimeoutError(), GetTimeoutError(), None])
    run(made.look())
    run(made.check())
    with pytest.raises(DeviceLost, match="it is idle and does not answer") as lost:
        run(made.check())
    assert [run(lost.value.back()), run(lost.value.back())] == [False, True]
    assert (made.pid, cluster.started, told) == (7, 1, [("worker_started", "models-1-1")])


@pytest.mark.parametrize("error", [RayActorError(), GetTimeoutError()], ids=["dies", "hangs"])
def test_an_idle_process_that_dies_or_hangs_is_replaced(device, monkeypatch, error):
    monkeypatch.setattr(remote_devices, "HUNG_S", -1.0)
    made, cluster, told = device(ready=[(7, SAMPLES), (8, SAMPLES)], alive=[error])
    run(made.look())
    with pytest.raises(DeviceLost) as lost:
        run(made.check())
    assert (made.pid, cluster.started, cluster.killed) == (None, 2, 1)
    assert run(lost.value.back())
    assert (made.pid, told[1]) == (8, ("worker_lost", "models-1-1"))
