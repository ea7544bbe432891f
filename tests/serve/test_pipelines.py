"""GPUs that are pipelines of stages: the scheduler's clocks, and the server, whose tests assert nothing of a time."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from symphony_serve.autoscale import gpus_for
from symphony_serve.batching.window import Window
from symphony_serve.errors import ServeError
from symphony_serve.messages import BatchPassed, Dispatch, Request
from symphony_serve.model_side import EAGER, Model
from symphony_serve.placement.served_models import Cut, Group, ServedModel, Shape
from symphony_serve.placement.simulator import Requests, Simulator
from symphony_serve.profiles import Profile, profiles_from_json, profiles_to_json
from symphony_serve.scheduler import Scheduler
from symphony_serve.seen_times import SeenTimes
from symphony_serve.shell.measuring import measure_profile
from tests.serve.driving import Driver, reached
from tests.serve.stand_ins import HeldDevice, Patient, became


def model(seconds, part=1 / 3, slo=60.0):
    """Batches take these seconds, of which a part keeps the next one from starting."""
    return Model("m", Profile.from_seconds(seconds).in_stages([part] * len(seconds)), slo, Window, EAGER)


def pipeline(*given):
    return Scheduler([model(*given)])


def asked(arrivals, slo):
    return [Request(number, "m", float(at), at + slo) for number, at in enumerate(arrivals)]


#: Seconds between two arrivals, and within a stage.
GAPS = st.lists(st.integers(0, 30), max_size=40)
STAGES = st.lists(st.integers(1, 20), min_size=1, max_size=4)


@settings(deadline=None)
@given(GAPS, STAGES, st.integers(0, 5), st.integers(0, 80), st.integers(1, 3))
def test_one_request_at_a_time_is_what_the_simulator_plays(gaps, stages, hop, more, groups):
    cut = Cut(tuple(map(float, stages)), 0.0, float(hop))
    slo = cut.latency + more + 0.5  # So that nobody is in time by a rounding error.
    arrivals = np.cumsum(gaps, dtype=float)
    shape = Shape(1, len(stages))
    simulator = Simulator([ServedModel("m", {shape: cut}, slo)], Requests(arrivals, np.zeros(len(arrivals), dtype=int)))
    played = simulator.play(*simulator.lane([Group(shape, (0,))] * groups))
    driver = Driver(pipeline([cut.latency], max(stages) / cut.latency, slo))
    driver.joins(*[0.0] * groups)
    driver.requests(asked(arrivals, slo))
    driver.run()
    answered = {one for _, _, batch in driver.batches for one in batch}
    assert answered == set(np.flatnonzero(played.attained[:, 0]).tolist())


class Staged(Driver):
    """Knows when each stage is done with what it has, as a pipeline would. parts: of a batch's seconds, by stage."""

    def __init__(self, scheduler, parts, gpus):
        super().__init__(scheduler)
        self.parts, self.clocks = parts, {gpu: [0.0] * len(parts) for gpu in range(1, gpus + 1)}
        self.joins(*[0.0] * gpus)

    def _carry_out(self, instruction):
        if isinstance(instruction, Dispatch):
            clocks, end = self.clocks[instruction.gpu], self.now
            for stage, part in enumerate(self.parts):
                clocks[stage] = end = max(end, clocks[stage]) + part * instruction.seconds
            assert end <= instruction.start + instruction.seconds + 1e-6, "it takes longer than was said"
            assert end <= min(one.deadline for one in instruction.requests) + 1e-6
        super()._carry_out(instruction)


@given(GAPS, STAGES, st.integers(0, 3), st.integers(1, 80), st.integers(1, 2))
def test_batches_of_all_sizes_leave_their_stages_when_it_was_said(gaps, stages, rise, more, gpus):
    whole = sum(stages)
    seconds = [whole + rise * size for size in range(4)]
    slo = float(seconds[0] + more)
    driver = Staged(pipeline(seconds, max(stages) / whole, slo), [one / whole for one in stages], gpus)
    driver.requests(asked(np.cumsum(gaps), slo))
    driver.run()
    assert len(driver.refused) + sum(len(batch) for _, _, batch in driver.batches) == len(gaps)


def test_a_group_that_says_so_gets_the_next_batch_before_it_was_predicted():
    driver = Driver(pipeline([10.0], 0.5, 100.0))
    driver.joins(0.0)
    driver.requests(asked([0.0] * 3, 100.0))
    driver.at(3.0, BatchPassed(1, 1, 0))
    driver.at(4.0, BatchPassed(1, 1, 0))  # Another one was sent since then.
    driver.run()
    assert [start for start, _, _ in driver.batches] == [0.0, 3.0, 10.0], "it holds two at a time"


@pytest.mark.parametrize(("slo", "gpus", "batches"), [
    (9.0, 1, [(0.0, 1, [0, 1, 2, 3]), (7.0, 1, [4])]),
    (7.5, 1, [(0.0, 1, [0, 1, 2, 3])]),
    (7.5, 2, [(0.0, 1, [0, 1, 2, 3]), (1.0, 2, [4])]),
])  # fmt: skip
def test_a_small_batch_behind_a_large_one_ends_no_sooner_than_that_lets_it(slo, gpus, batches):
    """The large one ends at 8 and the small one's last stage takes 1: it cannot end before 9."""
    driver = Driver(pipeline([2.0, 4.0, 6.0, 8.0], 0.5, 8.5))
    driver.joins(*[0.0] * gpus)
    later = Request(5, "m", 20.0, 28.5)
    driver.requests([*asked([0.0] * 4, 8.5), Request(4, "m", 1.0, 1.0 + slo), later])
    driver.run()
    assert driver.batches == [*batches, (20.0, 1, [5])]
    assert list(driver.refused) == ([4] if len(batches) == 1 else [])


def test_a_profile_in_stages_is_kept_corrected_and_counted():
    profile = Profile.from_seconds([1.0, 2.0]).in_stages([0.5, 0.6])
    assert profiles_from_json(profiles_to_json({"m": profile}, "here"))[0] == {"m": profile}
    assert (profile.overlap(2), profile.depth, Profile.from_seconds([1.0]).depth) == (pytest.approx(0.8), 2, 1)
    assert gpus_for([(profile, 10.0, 0.1)]) == pytest.approx(0.05)
    corrected = SeenTimes(profile, math.inf).add(1, 3.0)
    assert corrected.seconds(1) == 3.0 and corrected.overlap(1) == 1.5
    seen = SeenTimes(profile, math.inf)
    for seconds in [1.2] * 15 + [3.0]:
        corrected = seen.add(1, seconds)
    # The next batch can usually start after 0.6 s; 3.0 - 0.6.
    assert (corrected.seconds(1), corrected.overlap(1)) == (3.0, pytest.approx(2.4))
    assert seen.usual.seconds(1) == 1.2
    for parts in ([0.5], [0.5, 1.5], [0.0, 1.0]):
        with pytest.raises(ServeError, match="expected as many numbers above 0 and at most 1; measure"):
            profile.in_stages(parts)


# The server.


@pytest.fixture
def device():
    return HeldDevice()


@pytest.fixture
async def server(device):
    async with Patient([model([0.003])], [device]) as made:
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
    async with Patient([model([20.0])], [device]) as server:
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
