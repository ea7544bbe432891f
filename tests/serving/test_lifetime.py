"""A service from its start on, without Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from fluidtune.report import read_events
from fluidtune.serving import lifetime
from fluidtune.serving.intake import Holding

pytestmark = pytest.mark.serve


@pytest.mark.parametrize("where", ["forks", "restore", "first", "anew", "interrupted"])
async def test_what_fails_at_the_start_is_said_and_tried_again(monkeypatch, tmp_path, caplog, where):
    """And a stop lets what runs be answered first.

    Seen: with a full /tmp, `serve start` waited for ever in the state "loading", with no word in any log.
    """
    told = asyncio.Event()
    failing, passed = {where, "first"} if where in ("anew", "interrupted") else {where}, []

    def step(name):
        if name in failing:
            failing.remove(name)
            raise OSError(f"{name} fails")
        passed.append(name)

    class Rollouts:
        keys, desired = ("t",), None

        def __init__(self, *given):
            """Nothing was deployed."""

        async def restore(self):
            step("restore")

        async def close(self):
            """There is nothing."""

    class Devices(Rollouts):
        trouble = waits = ""

        async def first(self):
            step("first")
            await asyncio.Event().wait()

        async def close(self, timeout=None):
            told.set()

        async def interrupted(self):
            step("interrupted")

        def anew(self):
            step("anew")

    for name, stand_in in (("Rollouts", Rollouts), ("Devices", Devices), ("AGAIN_S", 0.0)):
        monkeypatch.setattr(lifetime, name, stand_in)
    monkeypatch.setattr(lifetime, "ForkedActors", lambda *given: step("forks") or "forks")
    loading = SimpleNamespace(trials=[SimpleNamespace(name="t", value=None)], environment={})
    about = {"devices": 1, "resources": {}, "stages": 1, "policy": SimpleNamespace(value="eager"), "run": "r"}
    about |= {"placing": None, "leasing": None, "modules": ("numpy",), "slo": 1.0, "loading": loading}

    async def request(life):
        with life.intake.one(Holding(0.0)):
            await told.wait()
            await asyncio.sleep(0.1)  # its answer is on its way through the front

    life = lifetime.Lifetime(SimpleNamespace(folder=str(tmp_path / "serving"), **about))
    while "first" not in passed:
        await asyncio.sleep(0.001)
    assert life.state == "loading" and not failing
    life.server, asked = Devices(), asyncio.ensure_future(request(life))
    await asyncio.sleep(0)
    await life.stop()
    assert life.stopping and asked.done() and life.state == "ended"
    said = [one["reason"] for one in read_events(tmp_path / "serving" / "fluid_events.jsonl") if "reason" in one]
    assert said[-1] == repr(OSError(f"{where} fails")) and f"{where} fails" in caplog.text
    assert passed.count("forks") == 1
