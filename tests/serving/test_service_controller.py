"""A service from its start on, without Ray."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest

from fluidtune.report import read_events
from fluidtune.serving import service_controller
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

    async def first():
        step("first")
        await asyncio.Event().wait()

    rollouts = Mock(keys=("t",), restore=AsyncMock(side_effect=partial(step, "restore")), close=AsyncMock())
    server = Mock(close=AsyncMock(side_effect=lambda *given: told.set()))
    devices = Mock(trouble="", waits="", first=first, anew=partial(step, "anew"), close=AsyncMock())
    devices.interrupted = AsyncMock(side_effect=partial(step, "interrupted"))
    stand_ins = {"Rollouts": lambda *given: rollouts, "Devices": lambda *given: devices, "AGAIN_S": 0.0}
    stand_ins["ForkedActors"] = lambda *given: step("forks") or "forks"
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(service_controller, name, stand_in)
    loading = SimpleNamespace(trials=[SimpleNamespace(name="t", value=None)], environment={})
    about = {"devices": 1, "resources": {}, "stages": 1, "policy": SimpleNamespace(value="eager"), "run": "r"}
    about |= {"placing": None, "leasing": None, "modules": ("numpy",), "slo": 1.0, "loading": loading}

    async def request(controller):
        with controller.intake.one(Holding(0.0)):
            await told.wait()
            await asyncio.sleep(0.1)  # its answer is on its way through the front

    controller = service_controller.ServiceController(SimpleNamespace(folder=str(tmp_path / "serving"), **about))
    while "first" not in passed:
        await asyncio.sleep(0.001)
    assert controller.state == "loading" and not failing
    controller.server, asked = server, asyncio.ensure_future(request(controller))
    await asyncio.sleep(0)
    await controller.stop()
    assert controller.stopping and asked.done() and controller.state == "ended"
    said = [one["reason"] for one in read_events(tmp_path / "serving" / "fluid_events.jsonl") if "reason" in one]
    assert said[-1] == repr(OSError(f"{where} fails")) and f"{where} fails" in caplog.text
    assert passed.count("forks") == 1
