"""The server of one event loop: every request is answered or refused exactly once. No assertion is about a time."""

from __future__ import annotations

import asyncio
import math
import pickle
import random
import threading
import time
from collections import Counter
from concurrent.futures import Future

import pytest

from benchmarks.rival_servers.fifo import Fifo
from symphony_serve.delays import Delays
from symphony_serve.errors import DeviceLost, Refused, ServeError
from symphony_serve.messages import Reason
from symphony_serve.model_side import DEFERRED, EAGER, Batching, Model
from symphony_serve.profiles import Profile
from symphony_serve.shell import device_slot
from symphony_serve.shell.async_server import LEAST_PATIENCE_S, AsyncServer, told_moment
from symphony_serve.shell.device import LocalDevice
from tests.serve.driving import PATIENCE_S, reached
from tests.serve.stand_ins import HeldDevice, Patient, became, quick


@pytest.fixture
def device():
    return HeldDevice()


@pytest.fixture
async def server(device):
    async with Patient([quick()], [device]) as made:
        yield made


@pytest.fixture
def looks(monkeypatch):
    """A device without a batch is looked at at once."""
    monkeypatch.setattr(device_slot, "IDLE_S", 0.001)


def doubled(values):
    return [2 * value for value in values]


def cancelled():
    """What a pool gives for a call that it cancels."""
    future = Future()
    future.cancel()
    return future


async def behind(server, device, count):
    """The answer of the first batch, which stays in the device, and those of ``count`` requests behind it."""
    first = server.ask("m", 0)
    await device.has(0)
    return first, [server.ask("m", value) for value in range(1, count + 1)]


async def test_what_waits_is_answered_in_batches_without_what_is_cancelled_and_each_batch_is_seen_once(server, device):
    first, others = await behind(server, device, 7)
    assert others[1].cancel() and others[3].cancel()
    assert server.unanswered == 6
    device.open()
    assert await became(first, *others) == [0, 2, "cancelled", 6, "cancelled", 10, 12, 14]
    assert server.unanswered == 0
    assert device.runs == [[0], [1, 3, 5, 6], [7]]
    seen = server.seen
    assert [(one.device, one.model, one.size) for one in seen] == [(0, "m", 1), (0, "m", 4), (0, "m", 1)]
    # They waited while the first batch ran, so together longer than it has run since the last of them came.
    assert seen[1].waited > 0 and seen[1].sent >= seen[0].sent + seen[0].seconds


async def test_a_request_of_which_time_was_spent_elsewhere_has_less_left(server, device):
    """Half of the SLO is the margin of a batch."""
    first, _ = await behind(server, device, 0)
    spent, ample = server.ask("m", 1, within=1.0), server.ask("m", 2, within=1e9)
    assert await became(spent, server.ask("m", 3, within=-1.0)) == ["LATE_ON_ARRIVAL"] * 2
    assert not ample.done()
    device.open()
    assert await became(first, ample) == [0, 4]


async def test_a_device_that_leaves_answers_its_batch_and_gets_no_other(server, device):
    other = HeldDevice(opened=True)
    first, waiting = await behind(server, device, 1)
    server.leave(0)
    server.leave(0)
    assert server.devices == {0}
    with pytest.raises(ServeError, match="device 0 is there already; let it leave first"):
        server.join(0, other)
    server.join(1, other)
    assert await became(*waiting, server.ask("m", 2)) == [2, 4]
    assert not first.done()
    device.open()
    assert await became(first) == [0]
    await reached(lambda: server.devices == {1})
    server.leave(0)
    assert (device.runs, [value for run in other.runs for value in run]) == ([[0]], [1, 2])


async def test_a_device_that_is_lost_while_it_leaves_does_not_come_back(server, device):
    first, _ = await behind(server, device, 0)
    server.leave(0)
    device.lose()
    await reached(lambda: not server.devices)
    server.join(1, HeldDevice(opened=True))
    assert await became(first) == [0]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda values: 1 // 0, "integer division or modulo by zero"),
        (lambda values: [1, 2, 3], "returned 3 outputs for 1 inputs"),
        (lambda values: None, "'NoneType' object is not iterable"),
        (lambda values: (_ for _ in ()).throw(SystemExit(3)), "wanted to end its thread by SystemExit(3)"),
        (lambda values: next(iter(())), "it raised StopIteration()"),
        (lambda values: cancelled().result(), "it raised CancelledError()"),
    ],
)
async def test_a_function_that_fails_for_one_batch(function, said):
    """Seen: one that waited for what its pool had cancelled ended its device for ever."""
    functions = iter([function, doubled])
    device = LocalDevice({"m": lambda values: next(functions)(values)})
    async with AsyncServer([quick()], [device]) as server:
        assert said in (await became(server.ask("m", 1)))[0]
        assert await became(server.ask("m", 2)) == [4]
    device.close()


async def test_a_thread_goes_on_after_a_batch_that_was_given_up_without_those_that_waited_behind_it():
    opened, runs = threading.Event(), []
    device = LocalDevice({"m": lambda values: [runs.append(values), opened.wait(PATIENCE_S)] and doubled(values)})
    given_up = [asyncio.ensure_future(device.run("m", [value])) for value in (1, 2)]
    await reached(lambda: runs)
    assert all(one.cancel() for one in given_up) and await became(*given_up) == ["cancelled"] * 2
    opened.set()
    assert await asyncio.wait_for(device.run("m", [3]), PATIENCE_S) == [6]
    assert runs == [[1], [3]]
    device.close()


async def test_a_request_is_hopeless_if_it_or_what_waits_before_it_takes_its_whole_slo(device):
    """Batches take 1 s for each request, and one of 1 runs: with 60 that wait, the next takes 61 s at least."""
    alone, full = Reason.LATE_ON_ARRIVAL, Reason.QUEUE_FULL
    slow = Model("m", Profile.linear(1.0, 0.0, 4), 60.0, Fifo, EAGER, Delays())
    async with AsyncServer([slow], [device]) as server:
        assert [server.hopeless("m", within) for within in (math.inf, 1.5, 0.5)] == [None, None, alone]
        first, others = await behind(server, device, 57)
        assert not server.hopeless("m")
        assert [server.hopeless("m", math.inf, count) for count in (2, 4)] == [None, full]
        others += [server.ask("m", value) for value in range(58, 61)]
        assert [server.hopeless("m", within) for within in (math.inf, 59.0, 0.5)] == [full, full, alone]
        for answer in others[:40]:
            assert answer.cancel()
        assert server.hopeless("m") is None and server.hopeless("m", 20.0) is full
        server.leave(0)
        assert not server.hopeless("m", 20.0), "without a device, ask decides"
        device.open()
        assert await became(first) == [0]
    assert await became(*others) == ["cancelled"] * 40 + ["CLOSED"] * 20


async def test_an_unknown_model_is_refused(server):
    with pytest.raises(Refused, match="model n was refused: no model of that name") as refused:
        await server.ask("n", 1)
    assert pickle.loads(pickle.dumps(refused.value)).reason is Reason.UNKNOWN_MODEL


async def test_close_refuses_what_waits_and_answers_what_runs(server, device):
    first, others = await behind(server, device, 5)
    closing = asyncio.ensure_future(server.close())
    assert await became(*others) == ["CLOSED"] * 5
    assert not first.done()
    device.open()
    await closing
    assert await became(first, server.ask("m", 1)) == [0, "CLOSED"]
    assert device.runs == [[0]]


async def test_what_ran_on_a_lost_device_is_refused_as_that_however_long_it_waits_for_another(device):
    """Seen: it was refused as `late`, so that `fluidtune.Client` sent again what a model may have run."""
    async with AsyncServer([quick(slo=1.0)], [device]) as server:
        first, (waits,) = await behind(server, device, 1)
        device.lose()
        assert await became(first) == ["GPU_LOST"]
        assert (await became(waits))[0] in ("LATE", "MAKES_WAY")


async def test_a_device_whose_batches_cannot_be_seen_goes_on():
    """Whatever is wrong in the server itself."""
    async with AsyncServer([quick()], [HeldDevice(opened=True)], lambda seen: 1 // 0) as server:
        assert [await became(server.ask("m", value)) for value in (1, 2)] == [[2], [4]]


@pytest.mark.parametrize("arrivals_before", [0, 1])
async def test_a_scheduler_that_fails_leaves_nobody_waiting(server, device, arrivals_before):
    first, others = await behind(server, device, arrivals_before)
    server.scheduler.handle = lambda event, now: 1 // 0
    others.append(server.ask("m", 7))
    assert await became(first, *others) == ["CUT_OFF"] + ["CLOSED"] * (1 + arrivals_before)
    device.open()
    assert await became(server.ask("m", 8)) == ["CLOSED"]


@pytest.mark.parametrize("within", [math.nan, -math.inf])
async def test_a_call_that_cannot_be_is_its_caller_s_error_alone(server, device, within):
    device.open()
    with pytest.raises(ServeError, match="give a finite time"):
        server.ask("m", 1, within)
    assert (server.closed, server.unanswered) == (False, 0)
    assert await server.ask("m", 2) == 4


@pytest.mark.parametrize("seed", range(4))
async def test_each_request_of_a_storm_is_told_once(seed):
    """Three callers, two models on two devices, functions that fail, cancellations, and a close in the middle."""
    ran, told, answers, lock = Counter(), Counter(), {}, threading.Lock()

    def function(values):
        with lock:
            ran.update(values)
        if random.random() < 0.1:
            raise RuntimeError("failed")
        time.sleep(random.uniform(0.0, 2e-3))
        return doubled(values)

    async def ask(first):
        rng = random.Random(seed * 10 + first)
        for value in range(first, first + 200):
            answers[value] = server.ask(rng.choice("ab"), value)
            answers[value].add_done_callback(lambda answer, value=value: told.update([value]))
            if rng.random() < 0.1:
                answers[value].cancel()
            await asyncio.sleep(2e-3 if rng.random() < 0.05 else 0.0)

    models = [quick("a", 0.01, jitter=5e-3), quick("b", 0.02, 8, DEFERRED, 5e-3)]
    devices = [LocalDevice({"a": function, "b": function}) for _ in range(2)]
    server = Patient(models, devices)
    callers = [asyncio.ensure_future(ask(1000 * number)) for number in range(3)]
    if seed % 2:
        await asyncio.sleep(0.02)
        await server.close()
    await asyncio.gather(*callers)
    await server.close()
    outcomes = dict(zip(answers, await became(*answers.values()), strict=True))
    assert len(told) == 600 and set(told.values()) == {1}
    assert max(ran.values(), default=1) == 1
    known = {"failed", "cancelled", *Reason.__members__}
    assert all(one == 2 * value or one in known for value, one in outcomes.items())
    assert server.unanswered == 0
    for device in devices:
        device.close()


def test_what_is_a_little_late_is_told_with_its_own_moment():
    """Else a batch that is to start at its latest start would be given up each time that the thread wakes late."""
    assert told_moment(5.0, 5.003, 0.004) == 5.0
    assert told_moment(5.0, 5.010, 0.004) == pytest.approx(5.006)


@pytest.mark.parametrize("stall", [1.4 * LEAST_PATIENCE_S, 0.5])
@pytest.mark.parametrize("arrives", [False, True])
async def test_what_was_answered_while_the_loop_stood_still_is_not_lost_and_the_stall_is_not_learned(stall, arrives):
    ran = []

    def runs(values):
        ran.extend(values)
        time.sleep(0.05)
        return values

    device = LocalDevice({"m": runs})
    model = Model("m", Profile.linear(0.001, 0.05, 4), 8.0, Batching.WINDOW, EAGER, Delays(jitter=0.001))
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
        assert server.profile("m").seconds(1) < 0.1 and ran.count(0) == ran.count(1) == 1
    device.close()


@pytest.mark.parametrize(
    ("devices", "said"),
    [("", "there are 0 devices"), ("mn", r"device 1 has the models \['n'\], expected")],
)
async def test_what_is_refused(devices, said):
    with pytest.raises(ServeError, match=said):
        AsyncServer([quick()], [HeldDevice(name) for name in devices])


async def test_a_server_ends_whose_device_does_not_come_back(server, device):
    answer, _ = await behind(server, device, 0)
    device.lose()
    await reached(lambda: device.asked)
    await server.close()
    assert await became(answer) == ["CUT_OFF"]
    assert server.closed


@pytest.mark.parametrize("ends", [True, False])
async def test_an_input_that_ends_its_device_or_whose_batch_never_ends_holds_two_devices_and_no_third(ends):
    """A batch that takes too long is given up, and its device comes back."""
    devices = [HeldDevice(opened=ends, poison=0 if ends else None) for _ in range(3)]
    async with Patient([quick()], devices, PATIENCE_S if ends else 0.05) as server:
        assert await became(server.ask("m", 0)) == ["LOST_TWICE"]
        devices[2].open()
        assert await became(server.ask("m", 1)) == [2]
        assert server.unanswered == 0
        assert [device.runs for device in devices] == [[[0]], [[0]], [[1]]]
        for device in devices:
            device.back.set()
            device.open()
        await reached(lambda: server.able == 3)


async def test_an_idle_device_that_is_lost_gets_no_batch_until_it_is_back(looks, server, device):
    device.open()
    assert server.able == 1
    device.alive = False
    await reached(lambda: server.able == 0)
    answer = server.ask("m", 1)
    await asyncio.sleep(0.01)
    assert (server.unanswered, device.runs) == (1, [])
    device.back.set()
    assert await became(answer) == [2]
    assert server.able == 1


async def test_a_batch_that_was_given_up_while_its_device_was_looked_at_does_not_end_the_device(looks, device):
    device.open()
    device.look.clear()
    async with Patient([quick()], [device], 0.01) as server:
        await reached(lambda: device.looked)
        answer = server.ask("m", 1)
        await reached(lambda: server.able == 0)
        device.look.set()
        assert await became(answer) == [2]
        assert (server.able, device.runs) == (1, [[1]])


@pytest.mark.parametrize(("order", "said"), [(1, True), (-1, True), (1, False)])
async def test_a_device_that_is_lost_before_it_runs_a_batch_is_no_loss_of_the_batch(looks, order, said):
    """It says so, or is suspect. Seen: the request was refused as `lost_twice` though one device alone had run it."""
    gone, mortal = HeldDevice(), HeldDevice(opened=True, poison=1)
    gone.alive = False
    gone.look.clear()
    async with AsyncServer([quick()], [*[gone, mortal][::order], HeldDevice(opened=True)]) as server:
        await reached(lambda: gone.looked)
        answer = server.ask("m", 1)
        await reached(lambda: server.unanswered and (order > 0 or mortal.asked))
        if said:
            gone.look.set()
        assert await became(answer) == [2]
        gone.look.set()
    assert mortal.runs == [[1]]


async def cannot_say():
    raise ValueError("a fault")


@pytest.mark.parametrize("looked", [False, True])
@pytest.mark.parametrize("fault", [DeviceLost("gone", cannot_say), ValueError("a fault")])
async def test_a_device_of_which_nobody_can_say_whether_it_is_there_goes_on(looks, server, device, looked, fault):
    """Seen: its task ended, so that it got no batch for ever, and could not leave."""
    first = [] if looked else [server.ask("m", 1)]
    await reached(lambda: looked or device.there)
    device.fault = fault
    device.open()
    await reached(lambda: device.fault is None)
    assert await became(server.ask("m", 2)) == [4]
    assert set(await became(*first)) <= {2, "a fault"}
    server.leave(0)
    await reached(lambda: not server.devices)
