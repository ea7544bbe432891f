"""Every instruction says why: each reason comes about, with the numbers that decided, and docs/engine.md lists it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fluidtune.engine import Reason, Why, because
from fluidtune.engine import messages as m
from tests.engine.helpers import Bench, elastic, grows, plain
from tests.engine.test_packing_search import Device

ROOT = Path(__file__).parents[2]
#: Makes an engine give an instruction for the reason. Returns what was said last, and a part of what it says in words.
Scenario = Callable[[], tuple[list[m.Instruction], str]]
SCENARIOS: dict[Reason, Scenario] = {}


def scenario(reason: Reason) -> Callable[[Scenario], Scenario]:
    def note(found: Scenario) -> Scenario:
        SCENARIOS[reason] = found
        return found

    return note


def wide() -> Bench:
    """Trial a has devices 0 and 1 of two, and 0.5 s an iteration there."""
    bench = Bench(2)
    bench(elastic("a"))
    bench(m.Resized("a", (0, 1), 0.1))
    bench.results("a", 0.5, 3, width=2)
    return bench


@scenario(Reason.FREE_DEVICE)
def a_device_is_idle() -> tuple[list[m.Instruction], str]:
    return Bench(2)(plain("a"), plain("b"))[:1], "2 devices idle, 2 trials waiting"


@scenario(Reason.SPARE_DEVICES)
def more_devices_than_trials() -> tuple[list[m.Instruction], str]:
    return Bench(4)(elastic("a")), "4 devices idle, 1 trial waiting; 25 s left on 4 devices, 100 s on one"


@scenario(Reason.NODE_FREE)
def a_trial_over_several_devices() -> tuple[list[m.Instruction], str]:
    return Bench(2)(plain("a", share=2)), "one node had the 2 devices that it needs at once, 1 trial waiting"


@scenario(Reason.OPEN_SHARE)
def a_share_of_a_device() -> tuple[list[m.Instruction], str]:
    out = Bench(1)(plain("a", share=0.3), plain("b", share=0.3))
    return out[1:], "divided for 3 trials had room, and now has 2 trials; 1 trial waiting"


@scenario(Reason.PACKING)
def c_was_found() -> tuple[list[m.Instruction], str]:
    devices = Device({1: 1.0, 2: 1.0, 3: 9.0, 4: 9.0})
    while devices.bench.engine.c < 2:
        out = devices.turn()
    return out, "no device idle, 5 trials waiting, and up to 2 trials may share a device: it now has 2"


@scenario(Reason.PACKING_SAMPLED)
def c_is_looked_for() -> tuple[list[m.Instruction], str]:
    devices = Device({1: 1.0, 2: 1.0})
    while not (out := devices.turn()):
        pass
    return out, "6 trials waiting; it is measured if 2 trials on one device pay, so far 1"


@scenario(Reason.IDLE_DEVICES)
def a_trial_grows() -> tuple[list[m.Instruction], str]:
    bench = Bench(2)
    bench(plain("a"))
    bench(*grows("a"))
    out = bench(m.Result("a", 1.0, 1))
    return out, "1 device idle, no trial waits for them; 49.5 s left on 2 devices instead of 99 s on 1"


@scenario(Reason.WAITING_TRIALS)
def a_trial_waits() -> tuple[list[m.Instruction], str]:
    bench = Bench(4)
    bench(elastic("a"), elastic("b"))
    bench(m.Resized("a", (0, 1), 0.1), m.Resized("b", (2, 3), 0.1))
    return bench(plain("c")), "1 trial waiting, for which 1 device lacked; 100 s left on 1 device instead of 50 s on 2"


@scenario(Reason.BALANCE)
def a_larger_trial_lacks_devices() -> tuple[list[m.Instruction], str]:
    bench = Bench(4)
    bench(elastic("a", 1000), plain("z", 1))
    bench.results("a", 1.0, 1)
    bench(m.Resized("a", (0, 1, 2), 0.1))
    bench.results("a", 0.45, 4, width=3)
    bench(m.TrialEnded("z", "stopped"), plain("b", 4000))
    out = bench(*grows("b"), m.Result("b", 1.0, 1), m.DeviceGained(9, "node0"))
    later = "trials that would end later at their widths can use its devices"
    return out[1:], f"{later}; 995 s left on 1 device instead of 448 s on 3"


@scenario(Reason.SLOWER)
def a_wide_trial_is_slow() -> tuple[list[m.Instruction], str]:
    bench = Bench(2)
    bench(plain("a"))
    bench(*grows("a"))
    bench.results("a", 1.0, 1)
    bench(m.Resized("a", (0, 1), 0.1))
    return bench.results("a", 2.0, 4, width=2), "an iteration takes 2 s on 2 devices, and 1 s on 1"


@scenario(Reason.GROWTH_ENDED)
def a_loop_cannot_be_divided() -> tuple[list[m.Instruction], str]:
    assert wide()(m.GrowthEnded("a", stays=True)) == []
    return wide()(m.GrowthEnded("a")), "several workers do not help it: 1 device instead of 2"


@scenario(Reason.LEAVING_DEVICE)
def a_lease_ends() -> tuple[list[m.Instruction], str]:
    bench = wide()
    (shrunk,) = bench(m.DeviceLeaving(1))
    assert isinstance(shrunk, m.Resize) and shrunk.why == because(Reason.LEAVING_DEVICE, width=2, leaving=1)
    bench(m.Resized("a", (0,), 0.1))
    return bench(m.DeviceLeaving(0)), "1 of its 1 device will be lost soon"


@scenario(Reason.PACKING_REJECTED)
def packing_does_not_pay() -> tuple[list[m.Instruction], str]:
    devices = Device({1: 1.0, 2: 2.0})
    devices.until_suspended()
    return (
        devices.said,
        "takes 2 times as long as the 1 s alone: the last of 2 trials adds 0% of a device, and above 5%",
    )


@scenario(Reason.PACKING_HOPELESS)
def packing_is_hopeless() -> tuple[list[m.Instruction], str]:
    devices = Device({1: 1.0, 2: 10.0})
    devices.until_suspended()
    return devices.said, "among 2 trials took 10 times as long as the 1 s alone, and 3 times is the limit"


@scenario(Reason.OWN_DEVICE)
def a_device_of_its_own_pays() -> tuple[list[m.Instruction], str]:
    bench = Bench(2, max_packing=2)
    bench(*[m.TrialAdded(name, "g", "checkpointing", 50) for name in "abcd"])
    for name in "abcd":
        bench.results(name, 3.0, 3, width=0.5)
    bench(m.TrialEnded("b", "stopped"), m.Result("d", 1.0, 1), m.Result("d", 1.0, 1))
    out = bench(m.TrialEnded("d", "stopped"))
    return out, "1 device idle; 47 s left on 1 device of its own instead of 141 s at its share of 0.5"


@scenario(Reason.TRIAL_LEFT)
def a_trial_ends() -> tuple[list[m.Instruction], str]:
    return wide()(m.TrialEnded("a", "stopped")), "the trial has left its devices"


@scenario(Reason.RESIZE_DONE)
def a_trial_has_shrunk() -> tuple[list[m.Instruction], str]:
    bench = wide()
    bench(m.GrowthEnded("a"))
    return bench(m.Resized("a", (0,), 0.1)), "the trial now has 1 device"


@scenario(Reason.RESIZE_FAILED)
def a_trial_could_not_grow() -> tuple[list[m.Instruction], str]:
    bench = Bench(2)
    bench(elastic("a"))
    return bench(m.ResizeFailed("a", (0,))), "the trial stays on 1 device"


@scenario(Reason.WORKER_LOST)
def a_worker_dies() -> tuple[list[m.Instruction], str]:
    return wide()(m.WorkerLost("a", left=(0,))), "the trial lost a worker, and has 1 device now"


@scenario(Reason.DEVICE_LOST)
def a_device_is_lost() -> tuple[list[m.Instruction], str]:
    return wide()(m.DeviceLost(1)), "the trial lost a device"


#: Of each wait of the engine's: an engine, its events, and a part of what is said of why the last trial waits.
WAITS: dict[Reason, tuple[Callable[[], Bench], list[m.Event], str]] = {
    Reason.DEVICES_BUSY: (lambda: Bench(1), [plain("a"), plain("b"), plain("c")], "hold all devices"),
    Reason.NO_DEVICE: (Bench, [plain("a")], "the job has no device"),
    Reason.DEVICES_LEAVING: (
        lambda: Bench(1),
        [m.DeviceLeaving(0), plain("a")],
        "only devices that will be lost soon",
    ),
    Reason.GROUP_FULL: (
        lambda: Bench(2),
        [m.GroupAnnounced("n", False, 1), plain("a", group="n"), plain("b", group="n")],
        "run as may at once, 1",
    ),
    Reason.NODE_SMALL: (lambda: Bench(2, per_node=1), [plain("a", share=2)], "no node of the job has more than 1"),
    Reason.NODE_BUSY: (lambda: Bench(2), [plain("a"), plain("b", share=2)], "asks for 2 devices of one node"),
    Reason.KEPT_IDLE: (
        lambda: Bench(2),
        [plain("a"), plain("b", 50, share=2), plain("c", 20)],
        "the idle devices are kept",
    ),
    Reason.NO_ROOM: (lambda: Bench(1, lanes="FAIR", max_packing=2), [plain("a"), plain("b")], "as far as its need of"),
}


def waits(bench: Bench) -> dict[str, Why]:
    """Why each trial waits of which the engine says it now."""
    return {name: why for _, names, why in bench.engine.new_waits() for name in names}


@pytest.mark.parametrize("reason", WAITS, ids=lambda reason: reason.label)
def test_each_wait_has_a_reason_that_is_said_once(reason: Reason) -> None:
    """Seen: no command said why a trial waits."""
    made, events, words = WAITS[reason]
    bench = made()
    bench(*events)
    why = waits(bench)[bench.engine.waiting[-1]]
    assert why.reason is reason and words in why.words and reason.remedy
    bench(m.GroupAnnounced("other"))
    assert bench.engine.new_waits() == []


def test_a_wait_for_another_reason_is_said() -> None:
    bench = Bench(1)
    bench(plain("a"), plain("b"))
    bench(m.DeviceLost(0))
    assert {name: why.reason for name, why in waits(bench).items()} == dict.fromkeys("ab", Reason.NO_DEVICE)
    bench(m.DeviceGained(1))
    ((_, new, why),) = bench.engine.new_waits()
    assert (new, why.reason) == ([], Reason.DEVICES_BUSY), "said of the line, whose trials are known"


@pytest.mark.parametrize("reason", SCENARIOS, ids=lambda reason: reason.label)
def test_each_reason_comes_about_and_says_what_decided(reason: Reason) -> None:
    said, words = SCENARIOS[reason]()
    (why,) = [each.why for each in said if each.why.reason is reason][-1:]
    assert words in why.words, why.words


def test_the_table_of_reasons_in_the_docs_is_that_of_the_code() -> None:
    page = (ROOT / "docs" / "engine.md").read_text()
    section = page[page.index("## Why an instruction is given") : page.index("## What `Engine.handle` does")]
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \| ([^|]+) \|$", section, re.MULTILINE)
    assert set(SCENARIOS) == {each for each in Reason if not each.remedy}
    assert rows == [(each.label, ", ".join(map("`{}`".format, each.numbers)) or "-") for each in Reason]
    units = re.findall(r"^\| `(\w+)` \| [^|]+ \|$", section, re.MULTILINE)
    assert sorted(units) == sorted({number for reason in Reason for number in reason.numbers})


def test_a_reason_has_exactly_its_numbers() -> None:
    with pytest.raises(ValueError, match="'free_device' has the numbers"):
        because(Reason.FREE_DEVICE, waiting=1, idle=1, width=2)
