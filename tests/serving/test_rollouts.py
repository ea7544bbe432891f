"""What stands in the way of a deploy, with stand-ins for devices and processes."""

from __future__ import annotations

import asyncio
import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray

from fluidtune.ray_compat import kept_state
from fluidtune.serving import rollouts as module
from fluidtune.serving.model_process import Place
from fluidtune.serving.model_versions import Deploy
from fluidtune.serving.process import HUNG_S
from fluidtune.serving.running_services import RunningService
from fluidtune.serving.winners import Winner
from symphony_serve.errors import ServeError
from tests.serving.stand_ins import device, rollouts, settled

pytestmark = [pytest.mark.serve, pytest.mark.usefixtures("kept")]

GIB = 2**30


def deploy(name="b"):
    return Deploy(name, "other", Winner(name, None, {}, 2.0))


@pytest.mark.parametrize(
    ("places", "trials", "said"),
    [
        (
            [Place("m", GIB, 3 * GIB, 0, 0), *[Place("n", 2 * GIB, 3 * GIB, 0, 0)] * 2],  # Each machine has its own.
            "a",
            "a second version takes about 4.0 GiB of the machine, as the first one does, and 3.0 GiB are free",
        ),
        ([Place("n", GIB, 9 * GIB, 6 * GIB, 2 * GIB)], "a", "about 6.0 GiB of the GPU, .* and 2.0 GiB are free"),
        ([Place("n", GIB, 9 * GIB, 0, 0)], "ab", "this service has several trials"),
        ([], "a", "the service does not answer yet"),
        ([Place("n", GIB, 9 * GIB, 0, 0)], "a", "the service does not answer yet"),  # It measures still.
    ],
)
async def test_a_deploy_that_cannot_be_is_refused_before_anything_starts(places, trials, said):
    devices = [device() for _ in places]
    made = rollouts(*devices, trials=trials)
    made._server = None if "answer" in said else made._server
    for one, place in zip(devices, places, strict=True):
        one.processes["a"].where = place
    with pytest.raises(ServeError, match=said):
        await made.deploy(Winner("c", None, {}, 2.0), "other", 1.0)
    assert made.versions.phase == "one"


@pytest.mark.parametrize("at", ["it loads", "it is measured"])
@pytest.mark.parametrize(
    "what", ["a lease comes", "the lease ends", "all leases end", "none comes back", "a process dies"]
)
async def test_leases_that_come_and_end_while_a_version_loads_or_is_measured_say_nothing_of_it(monkeypatch, what, at):
    """Seen: a deploy was refused: "its process was ended while it was measured"."""
    monkeypatch.setattr(module, "LOAD_S", 0.0 if what == "none comes back" else 100.0)
    loads, told = at == "it is measured", []
    two = [device(lambda key: loads or key == "a" or None) for _ in range(2)]
    made = rollouts(*two, tell=lambda event, **fields: told.append(fields))
    made._tell(deploy("c"))
    present, processes = made._devices.present, [one.processes["c@2"] for one in two]
    for process in processes:
        process.go.clear()
    await asyncio.sleep(0.01)
    if what == "a lease comes":
        present[2] = device()
    elif what == "a process dies":
        processes[1].fails("a process has ended before it had loaded the model")
    for number in {"the lease ends": [1], "all leases end": [0, 1], "none comes back": [0, 1]}.get(what, []):
        present.pop(number).stop()
    made._reconcile()
    for process in processes:
        process.go.set()
        if not (loads or process.trouble or process.stopped):
            process.loads()
    if (what, at) == ("all leases end", "it loads"):  # Then it waits for the next one.
        present[3] = device()
        made._reconcile()
    await settled()
    refused = {("all leases end", "it is measured"): "no device with it is left"}
    refused |= {("none comes back", at): "(the service has had no device for 0 s|no device with it is left)"}
    refused |= {("a process dies", at): "(a process has ended before it|its process has ended, or hangs)"}
    if (what, at) in refused:
        assert told[-1]["state"] == "refused" and re.search(refused[what, at], told[-1]["reason"])
    else:
        assert made.versions.serving.trial == "c" and "refused" not in [one.get("state") for one in told]
        assert [one.profile.max_batch for one in made._server.added] == [4]


async def test_the_kept_version_has_answered_and_ended_before_the_next_one_loads():
    """There is memory for two."""
    made = rollouts(device())
    made._tell(deploy("b"))
    await settled()
    assert made.versions.phase == "moved" and list(made.answering) == ["a", "b@2"]
    made._server.go.clear()
    made._tell(deploy("c"))
    await asyncio.sleep(0.01)
    assert made.desired(0).keys() == {"a", "b@2"}
    made._server.go.set()
    await settled()
    assert made.desired(0).keys() == {"b@2", "c@3"}


@pytest.mark.parametrize("state", ["canary", "kept"])
async def test_what_is_asked_of_a_version_is_not_done_to_the_next_one(state):
    """The version is waited for, and meanwhile somebody else rolls back and deploys another one."""
    there = device()
    made = rollouts(there)
    made._tell(replace(deploy(), share=0.5 if state == "canary" else 1.0))
    await settled()
    old, process = made.versions, there.processes["b@2" if state == "canary" else "a"]
    process.go.clear()
    asked = asyncio.ensure_future(made.promote() if state == "canary" else made.rollback())
    await asyncio.sleep(0.01)
    made.versions = new = replace(old, other=replace(old.other, number=3))
    process.go.set()
    with pytest.raises(ServeError, match=rf"version \d \(trial \w\) is no {state} version any more"):
        await asked
    assert made.versions is new


async def test_a_service_that_is_over_leaves_nothing_for_a_restart(monkeypatch, kept):
    # Seen: what was being written when the service stopped was there after it.
    made, begun, go, keep = rollouts(device()), threading.Event(), threading.Event(), kept_state.keep
    made._tell(replace(deploy(), share=0.5))
    await settled()
    monkeypatch.setattr(kept_state, "keep", lambda *given: (begun.set(), go.wait(), keep(*given)))
    asked = asyncio.ensure_future(made.promote())
    await asyncio.to_thread(begun.wait)
    over = asyncio.ensure_future(made.close())
    await asyncio.sleep(0.01)
    go.set()
    await asyncio.gather(asked, over)
    await made.rollback()
    assert not kept


async def test_what_a_restart_needs_is_kept_also_when_the_devices_cannot_follow(monkeypatch, kept, caplog):
    made = rollouts(device())
    made._tell(deploy())
    monkeypatch.setattr(made._devices, "reconcile", lambda: 1 / 0)
    await settled()
    assert kept and "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("method", ["promote", "rollback"])
def test_whoever_moves_the_requests_waits_as_long_as_a_batch_may_take(monkeypatch, method):
    """Seen: `promote` was refused while the canary ran a batch of more than a second."""
    waited = []
    front = SimpleNamespace(ask=SimpleNamespace(remote=lambda method: "asked"))
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: front)
    monkeypatch.setattr(ray, "get", lambda asked, timeout: waited.append(timeout))
    getattr(RunningService("digits", "anna"), method)()
    assert waited[0] > HUNG_S
