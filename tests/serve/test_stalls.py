"""A server whose event loop stands still for a while: what devices answered meanwhile is not lost."""

from __future__ import annotations

import asyncio
import time

import pytest

from symphony_serve.delays import Delays
from symphony_serve.model_side import EAGER, Batching, Model
from symphony_serve.profiles import Profile
from symphony_serve.shell.async_server import LEAST_PATIENCE_S, AsyncServer
from symphony_serve.shell.device import LocalDevice

#: Of a batch of 1.
SECONDS = 0.05
#: Is longer than a batch may take at most.
STALL = 1.4 * LEAST_PATIENCE_S


@pytest.mark.parametrize("stall", [STALL, 0.5])
@pytest.mark.parametrize("arrives", [False, True])
async def test_an_answer_that_was_there_is_not_lost_and_the_stall_is_not_learned(stall, arrives):
    def runs(values):
        time.sleep(SECONDS)
        return values

    profile = Profile.linear(0.001, SECONDS, 4)
    device = LocalDevice({"m": runs})
    model = Model("m", profile, 8.0, Batching.WINDOW, EAGER, Delays(jitter=0.001))
    async with AsyncServer([model], [device]) as server:
        for number in range(2):
            answer = server.ask("m", number)
            while not answer.sent:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            time.sleep(stall)
            # The first thing after the stall is an event, or the timer.
            other = server.ask("m", 7) if arrives else answer
            assert await answer == number
            assert await other in (7, number)
            assert server.able == 1
        assert server.profile("m").seconds(1) < 2 * SECONDS
    device.close()
