"""How c is found while trials train: on one device at a time, and at little cost where packing does not pay."""

from __future__ import annotations

import pytest

from fluidtune.engine import messages as m
from fluidtune.engine.packing_search import TRIES
from tests.engine.helpers import Bench, elastic, holders, plain, resume, start


class Device:
    """Runs what an engine starts; ``times[p]``: seconds per iteration of each of p trials on one device."""

    def __init__(self, times: dict[int, float], *, devices: int = 2, trials: int = 8, memory: float | None = 0.1, **c):
        self.bench = Bench(devices, max_packing=None, **c)
        self.times, self.memory = times, memory
        self.said: list[m.Instruction] = self.bench(*[elastic(f"t{k}", 40) for k in range(trials)])

    def turn(self) -> list[m.Instruction]:
        """Every running trial does an iteration."""
        out = []
        for name in self.bench.engine.held_devices():
            held = self.bench.engine.trial(name)
            count = len(self.bench.engine.tenants(held.devices[0]))
            out += self.bench(m.Result(name, self.times[count], held.width, self.memory))
        self.said += out
        return out

    def until_suspended(self) -> str:
        """Does iterations until the engine suspends a trial. Returns its name."""
        for _ in range(40):
            for instruction in self.turn():
                if isinstance(instruction, m.Suspend):
                    return instruction.trial
        raise AssertionError("no trial was told to leave")

    def move(self, trial: str) -> None:
        self.bench(m.TrialEnded(trial, "paused"), elastic(trial, 38))

    def most(self) -> int:
        return max(len(tenants) for tenants in holders(self.bench.engine).values())


def test_packing_that_pays_is_tried_on_one_device_and_then_used_on_all():
    devices = Device({1: 1.0, 2: 1.1, 3: 1.7, 4: 2.3})
    assert [i.devices for i in devices.said if isinstance(i, m.Start)] == [(0,), (1,)]
    shared = []
    for _ in range(5):
        devices.turn()
        shared.append(sorted(len(tenants) for tenants in holders(devices.bench.engine).values()))
        if devices.bench.engine.c == 2:
            break
    assert devices.bench.engine.c == 2
    assert [1, 2] in shared, "both devices were opened at once, before anything was known"
    assert min(shared[-1]) == 2


@pytest.mark.parametrize("slower", [2.0, 10.0])
def test_packing_that_does_not_pay_is_given_up_and_the_newcomer_leaves(slower: float):
    devices = Device({1: 1.0, 2: slower, 3: 99.0, 4: 99.0})
    assert {why.reason.label for _, _, why in devices.bench.engine.new_waits()} == {"devices_busy"}
    for _ in range(8):
        devices.turn()
        gone = [i for i in devices.said if isinstance(i, m.Suspend)]
        if gone:
            break
    assert [i.trial for i in gone] == ["t2"]
    assert devices.bench.engine.c == 1
    heard = {why.reason.label for _, _, why in devices.bench.engine.new_waits()}
    assert heard == ({"search_over"} if slower < 3 else set())
    devices.move("t2")
    if slower > 3:
        devices.move(devices.until_suspended())  # one very slow iteration may be an accident, so that it is tried again
    for _ in range(10):
        assert devices.turn() == []
    assert devices.most() == 1
    assert {why.reason.label for _, _, why in devices.bench.engine.new_waits()} == {"search_over"}


def test_the_largest_memory_seen_limits_sharing_later_too():
    devices = Device({1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}, devices=1, trials=3, memory=0.3)
    while devices.bench.engine.c < 3:
        devices.turn()
    for k in range(3):
        devices.bench(m.TrialEnded(f"t{k}", "stopped"))
    devices.bench(elastic("big", 40))
    devices.bench(m.Result("big", 1.0, 1, 0.45))
    devices.bench(elastic("u", 40), elastic("v", 40))
    assert devices.most() == 2
    assert [(why.reason.label, why.numbers) for *_, why in devices.bench.engine.new_waits()] == [
        ("search_over", (("limit", 2),))
    ]
    devices.bench(m.TrialEnded("big", "stopped"))
    assert devices.most() == 2, "two of 0.45 fit a device, three do not"


def test_a_trial_that_ran_out_of_memory_beside_others_has_a_device_of_its_own_next_time():
    devices = Device({1: 1.0, 2: 1.1, 3: 2.0}, devices=1, trials=3, memory=0.3)
    while devices.bench.engine.c < 2:
        devices.turn()
    ran_out = devices.bench.engine.tenants(0)[-1]
    out = devices.bench(m.NeedFound(ran_out, 1.0, 0.0), m.WorkerLost(ran_out))
    assert not [instruction for instruction in out if isinstance(instruction, m.Start)]
    assert ran_out not in devices.bench.engine.tenants(0)
    while others := [name for name in devices.bench.engine.tenants(0) if name != ran_out]:
        started = devices.bench(m.TrialEnded(others[0], "stopped"))
    assert resume(ran_out, (0,), 1.0) in started and devices.most() == 1


def test_a_newcomer_that_cannot_be_moved_stays_and_its_neighbour_leaves():
    devices = Device({1: 1.0, 2: 10.0}, devices=1, trials=1)
    devices.said += devices.bench(plain("p", 40))
    for _ in range(8):
        devices.turn()
    assert devices.bench.engine.c == 1
    assert [i.trial for i in devices.said if isinstance(i, m.Suspend)] == ["t0"]


def test_trials_of_one_iteration_that_start_together_show_that_packing_pays():
    bench = Bench(2, max_packing=None)
    bench(*[elastic(f"t{k}", 1) for k in range(12)])
    assert bench(m.Result("t0", 1.0, 1, 0.1), m.TrialEnded("t0", "stopped"))[1:] == [
        start("t2", (0,), 1.0),
        start("t3", (0,), 0.5),
    ]
    for one, two in (("t2", "t3"), ("t5", "t6")):
        bench(m.Result(one, 1.05, 0.5, 0.1), m.TrialEnded(one, "stopped"), m.Result(two, 1.05, 0.5, 0.1))
        bench(m.TrialEnded(two, "stopped"))
        if bench.engine.c == 2:
            break
    assert bench.engine.c == 2


def test_iterations_with_changing_neighbours_do_not_count():
    bench = Bench(1, max_packing=None)
    bench(*[elastic(f"t{k}", 1) for k in range(9)])
    bench(m.Result("t0", 8.0, 1, 0.1), m.TrialEnded("t0", "stopped"))
    for k in (1, 3, 5):
        # Its neighbour left, or came, during the iteration.
        bench.at += 4
        bench(m.Result(f"t{k}", 4.0, 0.5, 0.1), m.TrialEnded(f"t{k}", "stopped"))
        bench.at += 4
        bench(m.Result(f"t{k + 1}", 8.0, 0.5, 0.1), m.TrialEnded(f"t{k + 1}", "stopped"))
        assert bench.engine.c == 1


def test_trials_that_cannot_be_moved_and_short_ones_are_not_tried():
    bench = Bench(1, max_packing=None)
    bench(plain("a"), plain("b"))
    for _ in range(6):
        assert bench(m.Result("a", 1.0, 1, 0.1)) == []
    bench = Bench(1, max_packing=None)
    bench(elastic("a", 100), elastic("b", 2))
    for _ in range(6):
        assert bench(m.Result("a", 1.0, 1, 0.1)) == []


def test_attempts_that_measure_nothing_end_the_search_whatever_one_before_them_measured():
    bench = Bench(1, max_packing=None)
    bench(elastic("a", 1000), elastic("b", 100))
    while not bench(m.Result("a", 1.0, 1, 0.1)):
        pass
    bench(m.Result("a", 1.9, 0.5, 0.1))
    bench.at += 1.9
    bench(m.Result("a", 1.95, 0.5, 0.1), m.Result("b", 1.95, 0.5, 0.1))
    bench(m.TrialEnded("b", "stopped"))
    for k in range(TRIES):
        assert len(bench(elastic(f"c{k}", 100))) == 1
        bench(m.TrialEnded(f"c{k}", "stopped"))
    assert bench(elastic("d", 100)) == []


def test_while_a_newcomer_loads_its_neighbours_times_do_not_count():
    bench = Bench(1, max_packing=None)
    bench(elastic("a", 100), elastic("b", 100))
    while not bench(m.Result("a", 1.0, 1, 0.1)):
        pass
    for _ in range(6):
        bench(m.Result("a", 1.0, 0.5, 0.1))  # still alone, since b's process is starting
    assert bench.engine.c == 1
    assert bench.engine.trial("a").seconds == {1: 1.0}
