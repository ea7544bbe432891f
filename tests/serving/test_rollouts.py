"""What stands in the way of a deploy, with stand-ins for devices and processes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from fluidtune.serving.loaded_model import Samples
from fluidtune.serving.model_process import Loading, Place
from fluidtune.serving.winners import Winner
from symphony_serve.delays import Delays
from symphony_serve.errors import ServeError
from symphony_serve.model_side import EAGER, Batching, Model
from symphony_serve.profiles import Profile
from symphony_serve.shell.device import Waited

pytestmark = pytest.mark.serve

GIB = 2**30


class Device:
    """Stands for a `VersionedDevice` that says this of its memory."""

    over = False

    def __init__(self, place):
        self._place = place

    async def place(self):
        return self._place


def rollouts(*places, trials=1, serving=True):
    from fluidtune.serving.rollouts import Rollouts

    winners = tuple(Winner(name, None, {}, 1.0) for name in "ab"[:trials])
    setting = SimpleNamespace(run="run", stages=1, placing=None, loading=Loading(b"", (), winners))
    made = Rollouts(setting, lambda event, **fields: None)
    made._devices, made._server = [Device(place) for place in places], object() if serving else None
    return made


@pytest.mark.parametrize(
    ("places", "given", "said"),
    [
        (
            [Place("n", "", 2 * GIB, 3 * GIB, 0, 0)] * 2,
            {},
            "a second version takes about 4.0 GiB of the machine, as the first one does, and 3.0 GiB are free",
        ),
        ([Place("n", "0", GIB, 9 * GIB, 6 * GIB, 2 * GIB)], {}, "about 6.0 GiB of the GPU, .* and 2.0 GiB are free"),
        ([Place("n", "", GIB, 9 * GIB, 0, 0)], {"trials": 2}, "this service has several trials"),
        ([Place("n", "", GIB, 9 * GIB, 0, 0)], {"serving": False}, "the service does not answer yet"),
        ([], {}, "the service does not answer yet"),
    ],
)
def test_a_deploy_that_cannot_be_is_refused_before_anything_starts(places, given, said):
    made = rollouts(*places, **given)
    with pytest.raises(ServeError, match=said):
        asyncio.run(made.deploy(Winner("c", None, {}, 2.0), "other", 1.0))
    assert made.service.phase == "one"


def test_devices_of_two_machines_each_need_memory_of_their_own():
    made = rollouts(Place("n", "", 2 * GIB, 3 * GIB, 0, 0), Place("m", "", 2 * GIB, 3 * GIB, 0, 0))
    asyncio.run(made._check_memory())


class Leased:
    """Stands for a `VersionedDevice` that has loaded the new version if it was there when that was loaded.

    happens: is called before its batch of this size is measured, and with 0 before it has loaded.
    """

    def __init__(self, key, happens=lambda size: None):
        self.over, self._key, self._loaded, self._happens = False, key, False, happens

    def load_beside(self, loading):
        self._loaded = True

    async def look_beside(self):
        self._happens(0)
        if self.over:
            raise ServeError("a process has ended before it had loaded the models")
        return {self._key: Samples([1], [1])}

    async def measure(self, key, inputs):
        self._happens(len(inputs))
        if self.over or not self._loaded:
            raise ServeError("its process was ended while it was measured")
        return Waited([(200, "1")] * len(inputs), 0.0)

    measure_first = measure

    async def first_run(self, key, inputs):
        await self.measure(key, inputs)
        return 0.001

    async def check_beside(self, wait_s):
        return self._loaded and not self.over

    def able(self, key):
        return True

    def serve(self, key):
        """There are no processes."""


@pytest.mark.parametrize(
    ("what", "size"),
    [*((what, size) for what in ("a lease comes", "the lease ends") for size in range(3)), ("all leases end", 1)],
)
def test_leases_that_come_and_end_while_a_version_loads_or_is_measured_say_nothing_of_it(monkeypatch, what, size):
    """Seen: a deploy was refused: "its process was ended while it was measured"."""
    from fluidtune.serving import rollouts as module
    from fluidtune.serving.model_versions import Deploy

    monkeypatch.setattr(module, "kept_state", SimpleNamespace(keep=lambda *given: None, own_name=lambda: "x"))

    async def run():
        made, told, added = rollouts(), [], []
        made._tell_log = lambda event, **fields: told.append(fields)
        made._setting.__dict__.update(slo=1.0, max_batch=4, max_body=None, batching=Batching.WINDOW, policy=EAGER)
        serving = Model("a", Profile.linear(0.0, 1e-9, 1), 1.0, delays=Delays(jitter=0.01))
        made.answering["a"] = module.Answering.of(serving, Samples([1], [1]), 100)
        made._server, made._watch = SimpleNamespace(add=added.append), SimpleNamespace(serves=lambda *given: None)

        def happens(at):
            if at == size and what == "a lease comes":
                made._devices.append(Leased("c@2"))
            elif at == size:
                for device in made._devices[0 if what == "all leases end" else 1 :]:
                    device.over = True

        monkeypatch.setattr(module, "LOOK_S", 0.0)
        made._devices = [Leased("c@2"), Leased("c@2", happens)]
        made._tell(Deploy("c", "other", Winner("c", None, {}, 2.0), 1.0))
        await asyncio.wait([made._work])
        if what == "all leases end":
            assert told[-1]["state"] == "refused" and "no device with it is left" in told[-1]["reason"]
        else:
            assert made.service.serving.trial == "c" and "refused" not in [one.get("state") for one in told]
            assert [one.profile.max_batch for one in added] == [4]

    asyncio.run(run())


@pytest.mark.parametrize("state", ["canary", "kept"])
def test_what_is_asked_of_a_version_is_not_done_to_the_next_one(monkeypatch, state):
    """The version is waited for, and meanwhile somebody else rolls back and deploys another one."""
    from dataclasses import replace

    from fluidtune.serving import rollouts as module
    from fluidtune.serving.model_versions import Version

    monkeypatch.setattr(module, "kept_state", SimpleNamespace(keep=lambda *given: None, own_name=lambda: "x"))

    async def run():
        made = rollouts()
        old, new = (Version(number, "b", "run", state=state, share=0.5) for number in (2, 3))
        before = made.service = replace(made.service, other=old)
        device, release = Leased("b@2"), asyncio.Event()

        async def check_beside(wait_s):
            return await release.wait()

        device.check_beside, made._devices = check_beside, [device]
        asked = asyncio.ensure_future(made.promote() if state == "canary" else made.rollback())
        await asyncio.sleep(0.01)
        made.service = replace(before, other=new)
        release.set()
        with pytest.raises(ServeError, match=rf"version 2 \(trial b\) is no {state} version any more"):
            await asked
        assert made.service.other is new

    asyncio.run(run())


@pytest.mark.parametrize("method", ["promote", "rollback"])
def test_whoever_moves_the_requests_waits_as_long_as_a_batch_may_take(monkeypatch, method):
    """Seen: `promote` was refused while the canary ran a batch of more than a second."""
    from fluidtune.serving import service
    from fluidtune.serving.remote_devices import HUNG_S

    waited = []
    front = SimpleNamespace(**{method: SimpleNamespace(remote=lambda: "asked")})
    monkeypatch.setattr(service, "_front", lambda: front)
    monkeypatch.setattr(service.ray, "get", lambda asked, timeout: waited.append(timeout))
    getattr(service, method)()
    assert waited[0] > HUNG_S
