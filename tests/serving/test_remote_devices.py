"""The front's side of a model process, with a Ray that the test holds in its hands."""

from __future__ import annotations

import asyncio
from asyncio import run
from types import SimpleNamespace

import pytest
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from fluidtune.cluster.forks.plain_process import NeedsPlainProcess
from fluidtune.serving import remote_devices
from fluidtune.serving.model_process import Loading
from fluidtune.serving.remote_devices import PlacedDevice, RemoteDevice
from fluidtune.serving.served_devices import Measured
from symphony_serve.errors import DeviceLost, ServeError
from symphony_serve.shell.measuring import measure_models

SAMPLES = {"t": [1]}


class Cluster:
    """Stands for Ray. answers: what `get` gives for each method, in this order; an exception is raised."""

    def __init__(self, **answers):
        self.answers, self.started, self.killed, self.waited = answers, 0, 0, []

    def remote(self, actor_class):
        return self

    def options(self, **given):
        def start(loading):
            self.started += 1
            names = ("ready", "run", "measure", "alive", "hold", "held", "drop")
            return SimpleNamespace(**{name: SimpleNamespace(remote=lambda *given, name=name: name) for name in names})

        return SimpleNamespace(remote=start)

    async def fetched(self, method, wait_s):
        self.waited.append((method, wait_s))
        answer = self.answers[method].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self, actor):
        self.killed += 1


@pytest.fixture
def device(monkeypatch):
    """Makes a device in a cluster that gives these answers. Returns both, and what the device tells."""

    def make(kind=RemoteDevice, **answers):
        cluster, told = Cluster(**answers), []
        monkeypatch.setattr(remote_devices, "ray", cluster)
        monkeypatch.setattr(remote_devices, "fetched", cluster.fetched)
        loading = Loading(b"", (), (SimpleNamespace(name="t"),))
        made = kind(1, loading, {}, lambda event, **fields: told.append((event, fields.get("worker"))))
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
@pytest.mark.parametrize("what", ["run", "measure"])
def test_a_process_that_dies_or_hangs_is_told_and_replaced(device, error, what):
    made, cluster, told = device(ready=[(7, SAMPLES), (8, SAMPLES)], **{what: [error]})
    assert run(made.look()) == SAMPLES
    with pytest.raises(DeviceLost) as lost:
        run(getattr(made, what)("t", [1]))
    assert (made.pid, cluster.started, cluster.killed) == (None, 2, 1)
    assert run(lost.value.back())
    assert made.pid == 8
    assert told == [("worker_started", "models-1-1"), ("worker_lost", "models-1-1"), ("worker_started", "models-1-2")]


@pytest.mark.parametrize("what", ["run", "alive"])
def test_what_the_old_process_was_asked_says_nothing_of_the_next_one(device, what):
    """Seen: a process that had just been started was killed because of what its predecessor had been asked."""

    async def test():
        made, cluster, told = device(ready=[(7, SAMPLES), (8, SAMPLES)], **{what: [RayActorError()]})
        await made.look()
        answer = cluster.fetched

        async def dies_meanwhile(method, wait_s):
            made.again()
            return await answer(method, wait_s)

        remote_devices.fetched = dies_meanwhile  # the fixture puts it back
        with pytest.raises(DeviceLost) as lost:
            await (made.run("t", [1]) if what == "run" else made.check())
        remote_devices.fetched = answer
        assert (cluster.started, cluster.killed) == (2, 1)
        assert await lost.value.back()
        assert (made.pid, [event for event, _ in told]) == (8, ["worker_started", "worker_started"])

    run(test())


def test_a_process_that_did_not_load_says_nothing_of_the_next_one(device, monkeypatch):
    async def test():
        monkeypatch.setattr(remote_devices, "PAUSE_S", 0.01)
        made, cluster, told = device(ready=[RayActorError(), (8, SAMPLES)], run=[RayActorError()])
        with pytest.raises(DeviceLost) as lost:
            await made.run("t", [1])
        back = asyncio.create_task(lost.value.back())
        await asyncio.sleep(0)
        made.again()
        assert not await back
        assert (cluster.started, made.trouble, [event for event, _ in told]) == (3, "", ["worker_lost"])
        assert await lost.value.back()

    run(test())


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


def test_why_the_next_process_does_not_load_is_told_once(device, monkeypatch):
    """Seen: each next process ended, and nothing said why."""
    monkeypatch.setattr(remote_devices, "PAUSE_S", 0.0)
    broken = RayActorError(error_msg="ServeError: the checkpoint of trial t does not load")
    made, cluster, told = device(ready=[broken, broken, (7, SAMPLES)], run=[RayActorError()])
    with pytest.raises(DeviceLost) as lost:
        run(made.run("t", [1]))
    assert [run(lost.value.back()), run(lost.value.back())] == [False, False]
    assert made.trouble == "the checkpoint of trial t does not load"
    assert told == [("worker_lost", "models-1-1"), ("worker_lost", "models-1-2")]
    assert run(lost.value.back())
    assert (made.trouble, cluster.started) == ("", 4)


def placed(device, **answers):
    """A process of models that come and go, with what `device` has and how often it was lost."""
    made, cluster, told = device(PlacedDevice, **answers)
    lost = []
    made.lost = lambda: lost.append(made.models)
    return made, cluster, told, lost


def test_the_next_process_of_models_that_come_and_go_has_none(device):
    made, cluster, _, lost = placed(device, run=[RayActorError()])
    assert made.models == {"t"}
    with pytest.raises(DeviceLost):
        run(made.run("t", [1]))
    assert (made.models, lost, cluster.started) == (frozenset(), [frozenset()], 2)
    made.stop()
    assert len(lost) == 1


class Processes(Cluster):
    """Has processes with the models that they were told to hold. The batches of these sizes end theirs once each."""

    def __init__(self, *ends):
        super().__init__()
        self.ends, self.models, self.seen = list(ends), set(), []

    def options(self, **given):
        def start(loading):
            self.started, self.models = self.started + 1, set()
            names = ("ready", "measure", "hold", "held")
            asked = {name: SimpleNamespace(remote=lambda *given, name=name: (name, *given)) for name in names}
            return SimpleNamespace(**asked)

        return SimpleNamespace(remote=start)

    async def fetched(self, asked, wait_s):
        what, *given = asked
        await asyncio.sleep(0)
        if what == "ready":
            return self.started, {}
        if what == "hold":
            self.models.add(given[0].name)
        if what == "measure":
            model, inputs = given
            if model not in self.models:
                raise RayTaskError("measure", f"KeyError: {model!r}", KeyError(model))
            self.seen.append(len(inputs))
            if len(inputs) in self.ends:
                self.ends.remove(len(inputs))
                raise RayActorError
            return [(200, "1")] * len(inputs), 0.0
        return "found"


@pytest.mark.parametrize(("ends", "most"), [((), 64), ((1,), 64), ((16,), 64), ((4, 16), 64), ((16, 16), 8)])
def test_a_process_of_models_that_come_and_go_which_is_lost_while_one_is_measured_loads_them_again(
    monkeypatch, ends, most
):
    """A loss is no measurement, unless the size brings it about each time."""

    async def test():
        cluster = Processes(*ends)
        monkeypatch.setattr(remote_devices, "ray", cluster)
        monkeypatch.setattr(remote_devices, "fetched", cluster.fetched)
        device = PlacedDevice(1, Loading(b"", (), ()), {}, lambda event, **fields: None)
        for name in "ab":
            await device.load(SimpleNamespace(name=name))
        (model, _) = await measure_models([Measured(device)], {"a": [1], "b": [1]}, {"a": 60.0, "b": 60.0})
        assert model.profile.max_batch == most
        assert cluster.models == device.models == {"a", "b"} and cluster.started == 1 + len(ends)
        assert [trial.name for trial in device.loading.trials] == ["a", "b"]

    run(test())


def test_a_load_that_ends_its_process_is_told_and_the_next_model_loads_in_the_next_process(device):
    async def test():
        made, cluster, told, _ = placed(device, hold=[None, None], held=[RayActorError(), "found"])
        both = [made.load(SimpleNamespace(name=name)) for name in "xy"]
        failed, found = await asyncio.gather(*both, return_exceptions=True)
        assert str(failed).startswith("the process ended while it loaded model x (")
        assert (found, made.models, cluster.started, told) == ("found", {"y"}, 2, [("worker_lost", "models-1-1")])

    run(test())


PLAIN = RayTaskError("hold", f"{NeedsPlainProcess.__module__}.{NeedsPlainProcess.__qualname__}: reads X", None)


@pytest.mark.parametrize("what", ["run", "measure"])
def test_a_batch_that_must_be_in_a_plain_process_gets_one(device, what):
    """Else a size that is measured would be taken to be too large."""
    made, cluster, told = device(ready=[(7, SAMPLES)], **{what: [PLAIN]})
    made._forks = SimpleNamespace(turn_off=lambda why: None, runtime_env=lambda: {})
    with pytest.raises(DeviceLost, match="reads X") as lost:
        run(getattr(made, what)("t", [1]))
    assert run(lost.value.back())
    assert (made.pid, cluster.started, told[0]) == (7, 2, ("worker_lost", "models-1-1"))


def test_a_load_that_must_be_in_a_plain_process_gets_one(device):
    """Seen: `serve start --models` never came up."""
    made, cluster, told, lost = placed(device, hold=[None, None], held=[PLAIN, "found"])
    made._forks = SimpleNamespace(turn_off=lambda why: None, runtime_env=lambda: {})
    assert run(made.load(SimpleNamespace(name="x"))) == "found"
    assert (made.models, cluster.started, cluster.killed, len(lost)) == ({"x"}, 2, 1, 1)
    assert told == [("worker_lost", "models-1-1")]


def test_a_load_that_fails_in_a_plain_process_as_well_is_an_error(device):
    made, *_ = placed(device, hold=[None, None], held=[PLAIN, PLAIN])
    made._forks = SimpleNamespace(turn_off=lambda why: None, runtime_env=lambda: {})
    with pytest.raises(ServeError, match="reads X"):
        run(made.load(SimpleNamespace(name="x")))


@pytest.mark.parametrize("at", ["hold", "held"])
def test_a_load_is_waited_for_as_long_as_loads_are_and_then_the_process_is_replaced(device, at):
    """A load may keep the process from answering, or a long batch. Seen: the model loaded on beyond `--memory`."""
    answers = {"hold": [None], "held": [None], at: [GetTimeoutError()]}
    made, cluster, told, lost = placed(device, **answers)
    with pytest.raises(ServeError, match=r"^model x has not loaded within 600 s; does load end\?$"):
        run(made.load(SimpleNamespace(name="x")))
    assert all(wait_s > remote_devices.HUNG_S for _, wait_s in cluster.waited)
    assert (cluster.killed, cluster.started, len(lost), made.models) == (1, 2, 1, frozenset())
    assert told == [("worker_lost", "models-1-1")]


def test_while_a_model_loads_a_process_is_not_taken_to_hang(device):
    async def test():
        made, *_ = placed(device)
        before = made._patience
        async with made._loads:
            assert (before, made._patience) == (remote_devices.HUNG_S, remote_devices.LOAD_S)

    run(test())


def test_a_process_that_does_not_let_go_of_a_model_is_replaced(device):
    made, cluster, _, lost = placed(device, drop=[GetTimeoutError(), RayActorError()])
    run(made.unload("t"))
    assert (made.models, cluster.started, len(lost)) == (frozenset(), 2, 1)
    run(made.unload("t"))
    assert cluster.started == 2
