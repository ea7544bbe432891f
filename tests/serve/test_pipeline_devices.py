"""The server of one event loop with devices that have several batches at once. No assertion is about a time."""

from __future__ import annotations

import asyncio

import pytest

from symphony_serve.batching.window import Window
from symphony_serve.model_side import EAGER, Model
from symphony_serve.profiles import Profile
from symphony_serve.shell.measuring import measure_profile
from tests.serve.driving import reached
from tests.serve.stand_ins import HeldDevice, Patient, became


def model(seconds=0.003):
    """Batches of 1 that take so long, of which a third keeps the next one from starting."""
    return Model("m", Profile.from_seconds([seconds]).in_stages([1 / 3]), 60.0, Window, EAGER)


@pytest.fixture
def device():
    return HeldDevice()


@pytest.fixture
async def server(device):
    async with Patient([model()], [device]) as made:
        yield made
    assert all(0 < one.overlap <= one.seconds for one in made.seen)


async def test_a_pipeline_has_as_many_batches_as_its_profile_says_and_no_more(server, device):
    answers = [server.ask("m", value) for value in range(5)]
    await device.has(0, 1, 2)
    await asyncio.sleep(0.05)
    for value in range(5):
        await device.ends(value, 10 * value)
        assert await answers[value] == 10 * value
    assert device.most == 3


async def test_a_pipeline_whose_first_stage_is_free_gets_the_next_batch(device):
    async with Patient([model(20.0)], [device]) as server:
        answers = [server.ask("m", value) for value in range(2)]
        await device.has(0)
        await asyncio.sleep(0.05)
        assert device.there.keys() == {0}
        device.passed[0]()
        await device.has(0, 1)
        for value in range(2):
            await device.ends(value, value)
        assert await asyncio.gather(*answers) == [0, 1]


async def test_all_that_a_lost_pipeline_had_is_answered_when_it_is_back(server, device):
    answers = [server.ask("m", value) for value in range(4)]
    await device.has(0, 1, 2)
    device.lose()
    await reached(lambda: device.asked)
    assert server.able == 0
    device.back.set()
    for value in range(4):
        await device.ends(value, value)
    assert await asyncio.gather(*answers) == [0, 1, 2, 3]
    assert server.able == 1


async def test_what_stages_of_two_lost_pipelines_had_is_refused_once_and_what_stood_before_them_is_answered(
    server, device
):
    """Seen: all that was in a pipeline counted as begun, and so was refused."""
    device.back.set()
    answers = [server.ask("m", value) for value in range(3)]
    for _ in range(2):
        await device.has(0, 1, 2)
        device.passed[0]()
        device.lose()
    await device.ends(2, "there")
    assert await became(*answers) == ["LOST_TWICE"] * 2 + ["there"]


async def test_a_server_that_is_closed_leaves_no_batch_in_a_pipeline(server, device):
    answers = [server.ask("m", value) for value in range(4)]
    await device.has(0, 1, 2)
    await server.close(timeout=0.01)
    assert not device.there
    assert await became(*answers) == ["CUT_OFF"] * 3 + ["CLOSED"]


@pytest.mark.parametrize("stages", [1, 3])
async def test_what_a_pipeline_is_measured_with(stages):
    """Three stages of one length, each a lock that a batch holds for a while."""
    locks, inside = [asyncio.Lock() for _ in range(3)], [0, 0]

    async def run(inputs):
        inside[0] += 1
        inside[1] = max(inside)
        for lock in locks:
            async with lock:
                await asyncio.sleep(0.01)
        inside[0] -= 1
        return inputs

    profile = await measure_profile([run], [1], 1.0, 2, stages)
    assert (profile.parts is None, inside[1]) == ((True, 1) if stages == 1 else (False, 7))
    assert stages == 1 or all(1 / 6 <= part <= 1 for part in profile.parts)
