"""What stands in the way of a deploy, with stand-ins for devices and processes."""

from __future__ import annotations

import asyncio
import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fluidtune.serving import device as device_module
from fluidtune.serving.loaded_model import Samples
from fluidtune.serving.model_process import Place
from fluidtune.serving.model_versions import Deploy, Loaded, Measured, Version
from fluidtune.serving.winners import Winner
from symphony_serve.delays import Delays
from symphony_serve.errors import ServeError
from symphony_serve.model_side import EAGER, Batching, Model
from symphony_serve.profiles import Profile
from symphony_serve.replacement import Held
from tests.serving.fake_ray import loading
from tests.serving.stand_ins import FakeDevices, device, settled

pytestmark = pytest.mark.serve

GIB = 2**30


def rollouts(*places, trials=1, serving=True):
    from fluidtune.serving.rollouts import Rollouts

    known, loads = SimpleNamespace(name="digits", user="anna"), loading(*"ab"[:trials])
    setting = SimpleNamespace(known=known, run="run", folder="folder", stages=1, placing=None, loading=loads)
    made = Rollouts(setting, lambda event, **fields: None)
    made._devices = FakeDevices(made.desired, *[device() for _ in places])
    made._reconcile()
    for one, place in zip(made._devices.present.values(), places, strict=True):
        one.processes["a"].where = place
    made._server = object() if serving else None
    return made


@pytest.mark.parametrize(
    ("places", "given", "said"),
    [
        (
            [Place("m", GIB, 3 * GIB, 0, 0), *[Place("n", 2 * GIB, 3 * GIB, 0, 0)] * 2],  # Each machine has its own.
            {},
            "a second version takes about 4.0 GiB of the machine, as the first one does, and 3.0 GiB are free",
        ),
        ([Place("n", GIB, 9 * GIB, 6 * GIB, 2 * GIB)], {}, "about 6.0 GiB of the GPU, .* and 2.0 GiB are free"),
        ([Place("n", GIB, 9 * GIB, 0, 0)], {"trials": 2}, "this service has several trials"),
        ([Place("n", GIB, 9 * GIB, 0, 0)], {"serving": False}, "the service does not answer yet"),
        ([], {}, "the service does not answer yet"),
    ],
)
def test_a_deploy_that_cannot_be_is_refused_before_anything_starts(places, given, said):
    made = rollouts(*places, **given)
    with pytest.raises(ServeError, match=said):
        asyncio.run(made.deploy(Winner("c", None, {}, 2.0), "other", 1.0))
    assert made.service.phase == "one"


@pytest.mark.parametrize("at", ["it loads", "it is measured"])
@pytest.mark.parametrize(
    "what", ["a lease comes", "the lease ends", "all leases end", "none comes back", "a process dies"]
)
async def test_leases_that_come_and_end_while_a_version_loads_or_is_measured_say_nothing_of_it(monkeypatch, what, at):
    """Seen: a deploy was refused: "its process was ended while it was measured"."""
    from fluidtune.serving import rollouts as module

    monkeypatch.setattr(module, "kept_state", SimpleNamespace(keep=lambda *given: None, own_name=lambda: "x"))
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    monkeypatch.setattr(module, "LOAD_S", 0.0 if what == "none comes back" else 100.0)
    made, told, added = rollouts(), [], []
    made._tell_log = lambda event, **fields: told.append(fields)
    made._setting.__dict__.update(slo=1.0, max_batch=4, max_body=None, batching=Batching.WINDOW, policy=EAGER)
    serving = Model("a", Profile.linear(0.0, 1e-9, 1), 1.0, delays=Delays(jitter=0.01))
    made.answering["a"] = module.Answering.of(serving, Samples([1], [1]), 100)
    made._server, made._watch = SimpleNamespace(add=added.append), SimpleNamespace(serves=lambda *given: None)
    loads = at == "it is measured"
    present = made._devices.present
    present.update({number: device(lambda key: loads or key == "a" or None) for number in range(2)})

    def happens():
        if what == "a lease comes":
            present[2] = device()
        elif what == "a process dies":
            present[1].processes["c@2"].fails("a process has ended before it had loaded the model")
        for number in {"the lease ends": [1], "all leases end": [0, 1], "none comes back": [0, 1]}.get(what, []):
            present.pop(number).stop()
        made._reconcile()

    made._reconcile()
    if at == "it is measured":
        measure, happened = device_module.Device.measure, []

        async def measures(one, model, inputs, turn):
            if not happened:
                happened.append(happens())
            return await measure(one, model, inputs, turn)

        monkeypatch.setattr(device_module.Device, "measure", measures)
    made._tell(Deploy("c", "other", Winner("c", None, {}, 2.0), 1.0))
    if at == "it loads":
        await asyncio.sleep(0.01)
        happens()
        for one in present.values():
            process = one.processes["c@2"]
            process.trouble or process.loads()
        if what == "all leases end":  # Then it waits for the next one.
            present[3] = device()
            made._reconcile()
    await settled()
    refused = {("all leases end", "it is measured"): "no device with it is left"}
    refused |= {("none comes back", at): "(the service has had no device for 0 s|no device with it is left)"}
    refused |= {("a process dies", at): "(a process has ended before it|its process has ended, or hangs)"}
    if (what, at) in refused:
        assert told[-1]["state"] == "refused" and re.search(refused[what, at], told[-1]["reason"])
    else:
        assert made.service.serving.trial == "c" and "refused" not in [one.get("state") for one in told]
        assert [one.profile.max_batch for one in added] == [4]


async def test_the_kept_version_has_answered_and_ended_before_the_next_one_loads():
    """There is memory for two."""
    from fluidtune.serving.rollouts import ALL

    made, release = rollouts(), asyncio.Event()
    made._load = lambda key: asyncio.sleep(0)
    deploys = [Deploy(name, "run", Winner(name, None, {}, 2.0)) for name in "bc"]
    for event in (deploys[0], Loaded(2), Measured(2)):
        made._tell(event)
    made._hear(Held(ALL, "b@2"))
    made.answering = dict.fromkeys(made.desired(0))
    assert list(made.answering) == ["a", "b@2"]

    async def remove(key):
        await release.wait()

    made._server = SimpleNamespace(remove=remove)
    made._tell(deploys[1])
    await asyncio.sleep(0.01)
    assert made.desired(0).keys() == {"a", "b@2"}
    release.set()
    await asyncio.sleep(0.01)
    assert made.desired(0).keys() == {"b@2", "c@3"}


@pytest.mark.parametrize("state", ["canary", "kept"])
async def test_what_is_asked_of_a_version_is_not_done_to_the_next_one(monkeypatch, state):
    """The version is waited for, and meanwhile somebody else rolls back and deploys another one."""
    from fluidtune.serving import rollouts as module

    monkeypatch.setattr(module, "kept_state", SimpleNamespace(keep=lambda *given: None, own_name=lambda: "x"))
    made = rollouts()
    made._devices.present[0] = device()
    winner = Winner("b", None, {}, 2.0)
    old, new = (Version(number, "b", "run", winner, state=state, share=0.5) for number in (2, 3))
    made._load = lambda key: asyncio.sleep(0)
    made._tell(Deploy("b", "run", winner))
    before = made.service = replace(made.service, other=old)
    made._devices.present[0].processes["b@2"].go.clear()
    asked = asyncio.ensure_future(made.promote() if state == "canary" else made.rollback())
    await asyncio.sleep(0.01)
    made.service = replace(before, other=new)
    made._devices.present[0].processes["b@2"].go.set()
    with pytest.raises(ServeError, match=rf"version 2 \(trial b\) is no {state} version any more"):
        await asked
    assert made.service.other is new


async def test_a_service_that_is_over_leaves_nothing_for_a_restart(monkeypatch):
    # Seen: what was being written when the service stopped was there after it.
    from fluidtune.serving import rollouts as module

    begun, go, done = threading.Event(), threading.Event(), []

    def keep(*given):
        begun.set()
        go.wait()
        done.append("kept")

    store = SimpleNamespace(keep=keep, forget=lambda name: done.append("forgotten"), own_name=lambda: "x")
    monkeypatch.setattr(module, "kept_state", store)
    made, winner = rollouts(), Winner("b", None, {}, 2.0)
    made._load = lambda key: asyncio.sleep(0)
    made.service = replace(made.service, other=Version(2, "b", "run", winner, state="canary", share=0.5))
    asked = asyncio.ensure_future(made.promote())
    await asyncio.to_thread(begun.wait)
    over = asyncio.ensure_future(made.close())
    await asyncio.sleep(0.01)
    go.set()
    await asyncio.gather(asked, over)
    await made.rollback()
    assert done == ["kept", "forgotten"]


async def test_what_a_restart_needs_is_kept_also_when_the_devices_cannot_follow(monkeypatch, caplog):
    from fluidtune.serving import rollouts as module

    kept = []
    monkeypatch.setattr(module, "kept_state", SimpleNamespace(keep=lambda *given: kept.append(given), own_name=str))
    monkeypatch.setattr(module, "LOAD_S", 0.0)
    made = rollouts()
    made._server = made._watch = SimpleNamespace(forget=lambda key: None)
    made._tell(Deploy("b", "run", Winner("b", None, {}, 2.0)))
    monkeypatch.setattr(made._devices, "reconcile", lambda: 1 / 0)
    await settled()
    assert kept and "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("method", ["promote", "rollback"])
def test_whoever_moves_the_requests_waits_as_long_as_a_batch_may_take(monkeypatch, method):
    """Seen: `promote` was refused while the canary ran a batch of more than a second."""
    from fluidtune.serving import running_services
    from fluidtune.serving.process import HUNG_S

    waited = []
    front = SimpleNamespace(ask=SimpleNamespace(remote=lambda method: "asked"))
    monkeypatch.setattr(running_services.RunningService, "front", lambda one: front)
    monkeypatch.setattr(running_services.ray, "get", lambda asked, timeout: waited.append(timeout))
    getattr(running_services.RunningService("digits", "anna"), method)()
    assert waited[0] > HUNG_S
