"""The server of one event loop: every request is answered or refused exactly once. No assertion is about a time."""

from __future__ import annotations

import asyncio
import math
import pickle
import random
import threading
import time
from collections import Counter
from concurrent.futures import CancelledError, Future, wait

import pytest

from benchmarks.rival_servers.fifo import Fifo
from benchmarks.served_by_thread import ServedByThread
from symphony_serve.delays import Delays
from symphony_serve.errors import DeviceLost, Refused, ServeError
from symphony_serve.messages import Reason
from symphony_serve.model_side import DEFERRED, EAGER, Model
from symphony_serve.profiles import Profile
from symphony_serve.scheduler import Scheduler
from symphony_serve.shell import async_server, device_slot
from symphony_serve.shell.async_server import told_moment
from symphony_serve.shell.device import LocalDevice
from tests.serve.driving import PATIENCE_S, never_back, until


def model(slo=60.0, max_batch=4, policy=EAGER, name="m", jitter=None):
    """A model whose batches take 1 ms by its profile. jitter: half of the SLO unless given."""
    profile = Profile.linear(0.0, 1e-3, max_batch)
    return Model(name, profile, slo, Fifo, policy, Delays(jitter=slo / 2 if jitter is None else jitter))


def doubled(values):
    return [2 * value for value in values]


def finished(answers):
    """The outcome of each answer: its result, or the name of what it was told instead."""
    assert not wait(answers, PATIENCE_S).not_done
    return [outcome(answer) for answer in answers]


def outcome(answer):
    try:
        return answer.result(0)
    except Refused as refused:
        return refused.reason.name
    except CancelledError:
        return "cancelled"
    except Exception as error:
        return str(error)


class Looked(LocalDevice):
    """A device with model "m", of which ``look`` says whether it is there, in a thread."""

    def __init__(self, function, look):
        super().__init__({"m": function})
        self._look = look

    async def check(self):
        await asyncio.to_thread(self._look)


class Gate:
    """A model that waits in its first batch until it is let go on. batches: the inputs of each batch."""

    def __init__(self, function=doubled):
        self.entered, self.open = threading.Event(), threading.Event()
        self.batches: list[list] = []
        self._function = function

    def __call__(self, values):
        self.batches.append(list(values))
        if len(self.batches) == 1:
            self.entered.set()
            assert self.open.wait(PATIENCE_S)
        return self._function(values)


def behind_a_gate(server, gate, count):
    """The answer of the first batch, which waits in the gate, and those of ``count`` requests behind it."""
    first = server.submit("m", 0)
    assert gate.entered.wait(PATIENCE_S)
    return first, [server.submit("m", value) for value in range(1, count + 1)]


def test_what_waits_is_answered_in_batches():
    gate = Gate()
    with ServedByThread([model()], [{"m": gate}]) as server:
        first, others = behind_a_gate(server, gate, 6)
        assert server.look("unanswered") == 7
        gate.open.set()
        assert finished([first, *others]) == [0, 2, 4, 6, 8, 10, 12]
        assert server.look("unanswered") == 0
    assert gate.batches == [[0], [1, 2, 3, 4], [5, 6]]


def test_a_request_of_which_time_was_spent_elsewhere_has_less_left():
    """Half of the SLO is the margin of a batch."""
    gate = Gate()
    with ServedByThread([model()], [{"m": gate}]) as server:
        first = server.submit("m", 0)
        assert gate.entered.wait(PATIENCE_S)
        spent, ample = server.submit("m", 1, within=1.0), server.submit("m", 2, within=1e9)
        with pytest.raises(Refused):
            spent.result(PATIENCE_S)
        assert not ample.done()
        with pytest.raises(Refused):
            server.submit("m", 3, within=-1.0).result(PATIENCE_S)
        gate.open.set()
        assert finished([first, ample]) == [0, 4]


def test_a_device_that_leaves_answers_its_batch_and_gets_no_other():
    gate, other = Gate(), Gate()
    with ServedByThread([model(max_batch=1)], [{"m": gate}]) as server:
        first, waiting = behind_a_gate(server, gate, 1)
        server.leave(0)
        server.leave(0)
        assert server.look("devices") == {0}
        with pytest.raises(ServeError, match="device 0 is there already; let it leave first"):
            server.join(0, {"m": doubled})
        server.join(1, {"m": other})
        other.open.set()
        assert finished([*waiting, server.submit("m", 2)]) == [2, 4]
        assert not first.done()
        gate.open.set()
        assert finished([first]) == [0]
        until(lambda: server.look("devices") == {1})
        server.leave(0)
    assert gate.batches == [[0]] and other.batches == [[1], [2]]


def test_a_device_that_is_lost_while_it_leaves_does_not_come_back():
    def is_lost(values):
        raise DeviceLost("gone", never_back)

    gate = Gate(is_lost)
    with ServedByThread([model(max_batch=1)], [{"m": gate}]) as server:
        first, _ = behind_a_gate(server, gate, 0)
        server.leave(0)
        gate.open.set()
        until(lambda: not server.look("devices"))
        server.join(1, {"m": doubled})
        assert finished([first]) == [0]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda values: 1 // 0, "integer division or modulo by zero"),
        (lambda values: [1, 2, 3], "returned 3 outputs for 1 inputs"),
        (lambda values: None, "'NoneType' object is not iterable"),
        (lambda values: (_ for _ in ()).throw(SystemExit(3)), "wanted to end its thread by SystemExit(3)"),
    ],
)
def test_a_function_that_fails_for_one_batch(function, said):
    functions = iter([function, doubled])
    with ServedByThread([model()], [{"m": lambda values: next(functions)(values)}]) as server:
        assert said in finished([server.submit("m", 1)])[0]
        assert finished([server.submit("m", 2)]) == [4]


def test_a_request_is_hopeless_if_it_or_what_waits_before_it_takes_its_whole_slo():
    """Batches take 1 s for each request, and one of 1 runs: with 60 that wait, the next takes 61 s at least."""
    alone, behind = Reason.LATE_ON_ARRIVAL, Reason.QUEUE_FULL
    gate = Gate()
    slow = Model("m", Profile.linear(1.0, 0.0, 4), 60.0, Fifo, EAGER, Delays())
    with ServedByThread([slow], [{"m": gate}]) as server:
        assert [server.hopeless("m", within) for within in (math.inf, 1.5, 0.5)] == [None, None, alone]
        first, others = behind_a_gate(server, gate, 57)
        assert not server.hopeless("m")
        assert [server.hopeless("m", math.inf, count) for count in (2, 4)] == [None, behind]
        others += [server.submit("m", value) for value in range(58, 61)]
        assert [server.hopeless("m", within) for within in (math.inf, 59.0, 0.5)] == [behind, behind, alone]
        for answer in others[:40]:
            assert answer.cancel()
        assert server.hopeless("m") is None and server.hopeless("m", 20.0) is behind
        server.leave(0)
        assert not server.hopeless("m", 20.0), "without a device, submit decides"
        gate.open.set()
        assert finished([first]) == [0]


def test_an_unknown_model_is_refused():
    with ServedByThread([model()], [{"m": doubled}]) as server:
        answer = server.submit("n", 1)
        assert finished([answer]) == ["UNKNOWN_MODEL"]
        with pytest.raises(Refused, match="model n was refused: no model of that name"):
            answer.result()
        assert pickle.loads(pickle.dumps(answer.exception())).reason is Reason.UNKNOWN_MODEL


def test_close_refuses_what_waits_and_answers_what_runs():
    gate = Gate()
    server = ServedByThread([model()], [{"m": gate}])
    first, others = behind_a_gate(server, gate, 5)
    closing = threading.Thread(target=server.close)
    closing.start()
    assert finished(others) == ["CLOSED"] * 5
    assert not first.done()
    gate.open.set()
    closing.join(PATIENCE_S)
    assert finished([first]) == [0]
    assert finished([server.submit("m", 1)]) == ["CLOSED"]
    assert gate.batches == [[0]]


def test_what_is_cancelled_does_not_run():
    gate = Gate()
    with ServedByThread([model()], [{"m": gate}]) as server:
        first, others = behind_a_gate(server, gate, 5)
        assert not first.cancel()
        assert others[1].cancel() and others[3].cancel()
        gate.open.set()
        assert finished([first, *others]) == [0, 2, "cancelled", 6, "cancelled", 10]
    assert gate.batches == [[0], [1, 3, 5]]


def test_a_batch_that_takes_too_long_is_given_up_and_its_device_comes_back(monkeypatch):
    monkeypatch.setattr(async_server, "LEAST_PATIENCE_S", 0.05)
    gate = Gate()
    with ServedByThread([model(slo=0.04)], [{"m": gate}]) as server:
        first, _ = behind_a_gate(server, gate, 0)
        assert finished([first]) == ["GPU_LOST"]
        gate.open.set()
        until(lambda: finished([server.submit("m", 3)]) == [6])


def test_what_ran_on_a_lost_device_is_refused_as_that_however_long_it_waits_for_another():
    """Seen: it was refused as `late`, so that `fluidtune.Client` sent again what a model may have run."""

    def is_lost(values):
        raise DeviceLost("gone", never_back)

    gate = Gate(is_lost)
    with ServedByThread([model(slo=1.0)], [{"m": gate}]) as server:
        first, (behind,) = behind_a_gate(server, gate, 1)
        gate.open.set()
        assert finished([first]) == ["GPU_LOST"]
        assert finished([behind])[0] in ("LATE", "MAKES_WAY")


def test_a_device_whose_batches_cannot_be_seen_goes_on():
    """Whatever is wrong in the server itself."""
    with ServedByThread([model()], [{"m": doubled}], lambda seen: 1 // 0) as server:
        assert [finished([server.submit("m", value)]) for value in (1, 2)] == [[2], [4]]


@pytest.mark.parametrize("arrivals_before", [0, 1])
def test_a_scheduler_that_fails_leaves_nobody_waiting(monkeypatch, arrivals_before):
    gate = Gate()
    with ServedByThread([model()], [{"m": gate}]) as server:
        first, others = behind_a_gate(server, gate, arrivals_before)
        monkeypatch.setattr(Scheduler, "handle", lambda self, event, now: 1 // 0)
        others.append(server.submit("m", 7))
        assert finished([first, *others]) == ["CUT_OFF"] + ["CLOSED"] * (1 + arrivals_before)
        gate.open.set()
        assert finished([server.submit("m", 8)]) == ["CLOSED"]


@pytest.mark.parametrize("within", [math.nan, -math.inf])
async def test_a_call_that_cannot_be_is_its_caller_s_error_alone(within):
    device = LocalDevice({"m": doubled})
    async with async_server.AsyncServer([model()], [device]) as server:
        with pytest.raises(ServeError, match="give a finite time"):
            server.ask("m", 1, within)
        assert (server.closed, server.unanswered) == (False, 0)
        assert await server.ask("m", 2) == 4
    device.close()


@pytest.mark.parametrize("seed", range(4))
def test_each_request_of_a_storm_is_told_once(seed, monkeypatch):
    """Three callers, two models on two devices, functions that fail, cancellations, and a close in the middle."""
    monkeypatch.setattr(async_server, "LEAST_PATIENCE_S", PATIENCE_S)
    ran: Counter = Counter()
    told: Counter = Counter()
    lock = threading.Lock()

    def function(values):
        with lock:
            ran.update(values)
        if random.random() < 0.1:
            raise RuntimeError("failed")
        time.sleep(random.uniform(0.0, 2e-3))
        return doubled(values)

    functions = {"a": function, "b": function}
    models = [model(0.01, name="a", jitter=5e-3), model(0.02, 8, DEFERRED, "b", 5e-3)]
    server = ServedByThread(models, [functions, functions])
    answers: dict[int, Future] = {}

    def note(value):
        with lock:
            told[value] += 1

    def ask(first):
        rng = random.Random(seed * 10 + first)
        for value in range(first, first + 200):
            answers[value] = server.submit(rng.choice("ab"), value)
            answers[value].add_done_callback(lambda answer, value=value: note(value))
            if rng.random() < 0.1:
                answers[value].cancel()
            if rng.random() < 0.05:
                time.sleep(2e-3)

    callers = [threading.Thread(target=ask, args=(1000 * number,)) for number in range(3)]
    for caller in callers:
        caller.start()
    if seed % 2:
        time.sleep(0.02)
        server.close()
    for caller in callers:
        caller.join(PATIENCE_S)
    server.close()
    outcomes = finished(list(answers.values()))
    until(lambda: len(told) == 600)
    assert set(told.values()) == {1}
    assert max(ran.values(), default=1) == 1
    values = zip(answers, outcomes, strict=True)
    assert all(one in (2 * value, "failed", "cancelled") or one in Reason.__members__ for value, one in values)
    assert server.look("unanswered") == 0


def test_what_is_a_little_late_is_told_with_its_own_moment():
    """Else a batch that is to start at its latest start would be given up each time that the thread wakes late."""
    assert told_moment(5.0, 5.003, 0.004) == 5.0
    assert told_moment(5.0, 5.010, 0.004) == pytest.approx(5.006)


@pytest.mark.parametrize(
    ("devices", "said"),
    [([], "there are 0 devices"), ([{"m": doubled}, {"n": doubled}], r"device 1 has the models \['n'\], expected")],
)
def test_what_is_refused(devices, said):
    with pytest.raises(ServeError, match=said):
        ServedByThread([model()], devices)


class Mortal:
    """A device that is lost whenever it gets a poisonous input, and is back when ``back`` is set."""

    def __init__(self, poison=None):
        self.lives, self.back, self.waits = True, threading.Event(), threading.Event()
        self.runs: list[list] = []
        self._poison = poison

    def __call__(self, values):
        self.runs.append(list(values))
        if not self.lives or self._poison in values:
            self.lives = False
            raise DeviceLost("it was killed", self._return)
        return doubled(values)

    async def _return(self):
        self.waits.set()
        await asyncio.sleep(0.001)
        self.lives = self.back.is_set()
        return self.lives


def test_a_request_that_has_lost_two_devices_loses_no_third():
    devices = [Mortal(poison=0) for _ in range(3)]
    with ServedByThread([model()], [{"m": device} for device in devices]) as server:
        assert finished([server.submit("m", 0)]) == ["LOST_TWICE"]
        assert finished([server.submit("m", 1)]) == [2]
        assert server.look("unanswered") == 0
    assert [device.runs for device in devices] == [[[0]], [[0]], [[1]]]


def test_a_server_ends_whose_device_does_not_come_back():
    device = Mortal(poison=0)
    server = ServedByThread([model()], [{"m": device}])
    answer = server.submit("m", 0)
    assert device.waits.wait(PATIENCE_S)
    server.close()
    assert finished([answer]) == ["CUT_OFF"]
    assert server.look("closed")


def test_an_input_whose_batch_never_ends_holds_two_devices_and_no_third(monkeypatch):
    monkeypatch.setattr(async_server, "LEAST_PATIENCE_S", 0.05)
    gates = [Gate() for _ in range(3)]
    with ServedByThread([model()], [{"m": gate} for gate in gates]) as server:
        assert finished([server.submit("m", 0)]) == ["LOST_TWICE"]
        assert [gate.batches for gate in gates] == [[[0]], [[0]], []]
        for gate in gates:
            gate.open.set()


def test_each_batch_is_seen_once_with_what_its_requests_have_waited():
    gate, seen = Gate(), []
    with ServedByThread([model()], [{"m": gate}], seen.append) as server:
        first, behind = behind_a_gate(server, gate, 3)
        gate.open.set()
        assert finished([first, *behind]) == [0, 2, 4, 6]
    assert [(one.device, one.model, one.size) for one in seen] == [(0, "m", 1), (0, "m", 3)]
    # Three requests waited while the first batch ran, so together longer than it has run since the last of them came.
    assert seen[1].waited > 0 and seen[1].sent >= seen[0].sent + seen[0].seconds


def test_an_idle_device_that_is_lost_gets_no_batch_until_it_is_back(monkeypatch):
    monkeypatch.setattr(device_slot, "IDLE_S", 0.001)
    there, back, runs = threading.Event(), threading.Event(), []
    there.set()

    async def is_back():
        await asyncio.sleep(0.001)
        return back.is_set()

    def look():
        if not there.is_set():
            raise DeviceLost("it does not answer", is_back)

    def counted(values):
        runs.append(values)
        return doubled(values)

    with ServedByThread([model()], [Looked(counted, look)]) as server:
        assert server.look("able") == 1
        there.clear()
        until(lambda: server.look("able") == 0)
        answer = server.submit("m", 1)
        time.sleep(0.01)
        assert (server.look("unanswered"), runs) == (1, [])
        there.set()
        back.set()
        assert finished([answer]) == [2]
        assert server.look("able") == 1


def test_a_batch_that_was_given_up_while_its_device_was_looked_at_does_not_end_the_device(monkeypatch):
    monkeypatch.setattr(device_slot, "IDLE_S", 0.001)
    monkeypatch.setattr(async_server, "LEAST_PATIENCE_S", 0.01)
    looks, go_on = threading.Event(), threading.Event()

    def look():
        looks.set()
        go_on.wait(PATIENCE_S)

    with ServedByThread([model()], [Looked(doubled, look)]) as server:
        assert looks.wait(PATIENCE_S)
        answer = server.submit("m", 1)
        until(lambda: server.look("able") == 0)
        go_on.set()
        assert finished([answer]) == [2]
        assert server.look("able") == 1


@pytest.mark.parametrize(("order", "said"), [(1, True), (-1, True), (1, False)])
def test_a_device_that_is_lost_before_it_runs_a_batch_is_no_loss_of_the_batch(order, said, monkeypatch):
    """It says so, or is suspect. Seen: the request was refused as `lost_twice` though one device alone had run it."""
    monkeypatch.setattr(device_slot, "IDLE_S", 0.001)
    looks, go_on, mortal = threading.Event(), threading.Event(), Mortal(poison=1)

    def look():
        looks.set()
        assert go_on.wait(PATIENCE_S)
        raise DeviceLost("it does not answer", never_back)

    devices = [Looked(doubled, look), {"m": mortal}][::order]
    with ServedByThread([model()], [*devices, {"m": doubled}]) as server:
        assert looks.wait(PATIENCE_S)
        answer = server.submit("m", 1)
        until(lambda: server.look("unanswered") and (order > 0 or mortal.waits.is_set()))
        go_on.set() if said else None
        assert finished([answer]) == [2]
        go_on.set()
    assert mortal.runs == [[1]]


async def cannot_say():
    raise ValueError("a fault")


@pytest.mark.parametrize("looked", [False, True])
@pytest.mark.parametrize("fault", [DeviceLost("gone", cannot_say), ValueError("a fault")])
def test_a_device_of_which_nobody_can_say_whether_it_is_there_goes_on(looked, fault, monkeypatch):
    """Seen: its task ended, so that it got no batch for ever, and could not leave."""
    monkeypatch.setattr(device_slot, "IDLE_S", 0.001 if looked else PATIENCE_S)
    failed = threading.Event()

    def fails(values=()):
        if not failed.is_set():
            failed.set()
            raise fault
        return doubled(values)

    with ServedByThread([model()], [Looked(fails, fails)]) as server:
        first = None if looked else server.submit("m", 1)
        assert failed.wait(PATIENCE_S)
        assert finished([server.submit("m", 2)]) == [4]
        assert looked or outcome(first) in (2, "a fault")
        server.leave(0)
        until(lambda: not server.look("devices"))
