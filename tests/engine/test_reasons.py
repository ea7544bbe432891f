"""Every instruction says why: each reason comes about, with the numbers that decided, and docs/engine.md lists it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluidtune.engine import Reason, Why, because
from fluidtune.engine import messages as m
from tests.engine.helpers import Bench, alone, elastic, grows, plain
from tests.engine.test_packing_search import Device

ROOT = Path(__file__).parents[2]


def wide() -> Bench:
    """Trial a has devices 0 and 1 of two, and 0.5 s an iteration there."""
    bench = Bench(2)
    bench(elastic("a"))
    bench(m.Resized("a", (0, 1)))
    bench.results("a", 0.5, 3, width=2)
    return bench


def result(trial: str, seconds: float, width: float = 1, count: int = 1) -> list[m.Event]:
    return [m.Result(trial, seconds, width)] * count


#: Of each reason: an engine, its events (those of a tuple at once), a part of what all such instructions say.
SCENARIOS: dict[Reason, tuple[Callable[[], Bench], list[Any], str]] = {
    Reason.FREE_DEVICE: (lambda: Bench(2), [plain("a")], "2 devices idle, 1 trial waiting"),
    Reason.SPARE_DEVICES: (
        lambda: Bench(4),
        [elastic("a")],
        "4 devices idle, 1 trial waiting; 25 s left on 4 devices, 100 s on one",
    ),
    Reason.NODE_FREE: (
        lambda: Bench(2),
        [plain("a", share=2)],
        "one node had the 2 devices that it needs at once, 1 trial waiting",
    ),
    Reason.OPEN_SHARE: (
        lambda: Bench(1),
        [plain("a", share=0.3), plain("b", share=0.3)],
        "divided for 3 trials had room, and now has 2 trials; 1 trial waiting",
    ),
    Reason.IDLE_DEVICES: (
        alone,
        result("a", 1.0),
        "1 device idle, no trial waits for them; 49.5 s left on 2 devices instead of 99 s on 1",
    ),
    Reason.WAITING_TRIALS: (
        wide,
        [plain("c")],
        "1 trial waiting, for which 1 device lacked; 97 s left on 1 device instead of 48.5 s on 2",
    ),
    Reason.BALANCE: (
        lambda: Bench(4),
        [
            *((elastic("a", 1000), plain("z", 1)), *result("a", 1.0), m.Resized("a", (0, 1, 2))),
            *(*result("a", 0.45, 3, 4), (m.TrialEnded("z", "stopped"), plain("b", 4000))),
            (*grows("b"), *result("b", 1.0), m.DeviceGained(9, "node0")),
        ],
        "trials that would end later at their widths can use its devices; 995 s left on 1 device instead of 448 s on 3",
    ),
    Reason.SLOWER: (
        alone,
        [*result("a", 1.0), m.Resized("a", (0, 1)), *result("a", 2.0, 2, 4)],
        "an iteration takes 2 s on 2 devices, and 1 s on 1",
    ),
    Reason.GROWTH_ENDED: (wide, [m.GrowthEnded("a")], "several workers do not help it: 1 device instead of 2"),
    Reason.LEAVING_DEVICE: (
        wide,
        [m.DeviceLeaving(1), m.Resized("a", (0,)), m.DeviceLeaving(0)],
        "1 of its 2 devices will be lost soon; 1 of its 1 device will be lost soon",
    ),
    Reason.TRIAL_LEFT: (wide, [m.TrialEnded("a", "stopped")], "the trial has left its devices"),
    Reason.RESIZE_DONE: (wide, [m.GrowthEnded("a"), m.Resized("a", (0,))], "the trial now has 1 device"),
    Reason.RESIZE_FAILED: (
        alone,
        [*result("a", 1.0), m.ResizeFailed("a", (0,))],
        "the trial stays on 1 device",
    ),
    Reason.WORKER_LOST: (wide, [m.WorkerLost("a", left=(0,))], "the trial lost a worker, and has 1 device now"),
    Reason.DEVICE_LOST: (wide, [m.DeviceLost(1)], "the trial lost a device"),
    Reason.OWN_DEVICE: (
        lambda: Bench(2, max_packing=2),
        [
            *(m.TrialAdded(name, "g", "checkpointing", 50) for name in "abcd"),
            *(each for name in "abcd" for each in result(name, 3.0, 0.5, 3)),
            *(m.TrialEnded("b", "stopped"), *result("d", 1.0, count=2), m.TrialEnded("d", "stopped")),
        ],
        "1 device idle; 47 s left on 1 device of its own instead of 141 s at its share of 0.5",
    ),
}
#: Of each reason of the search for c: seconds of an iteration by the trials on a device, and a part of what is said.
SEARCHES: dict[Reason, tuple[dict[int, float], str]] = {
    Reason.PACKING: (
        {1: 1.0, 2: 1.0, 3: 9.0, 4: 9.0},
        "no device idle, 5 trials waiting, and up to 2 trials may share a device: it now has 2",
    ),
    Reason.PACKING_SAMPLED: (
        {1: 1.0, 2: 1.0},
        "6 trials waiting; it is measured if 2 trials on one device pay, so far 1",
    ),
    Reason.PACKING_REJECTED: (
        {1: 1.0, 2: 2.0},
        "takes 2 times as long as the 1 s alone: the last of 2 trials adds 0% of a device, and above 5%",
    ),
    Reason.PACKING_HOPELESS: (
        {1: 1.0, 2: 10.0},
        "among 2 trials took 10 times as long as the 1 s alone, and 3 times is the limit",
    ),
}
#: Of each wait of the engine's: an engine, its events, and a part of what is said of why the last trial waits.
WAITS: dict[Reason, tuple[Callable[[], Bench], list[m.Event], str]] = {
    Reason.DEVICES_BUSY: (lambda: Bench(1), [plain("a"), plain("b"), plain("c")], "hold all devices"),
    Reason.SEARCH_OVER: (lambda: Bench(1, max_packing=None, search_limit=1), [plain("a"), plain("b")], "at most 1 may"),
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


@pytest.mark.parametrize("reason", SCENARIOS, ids=lambda reason: reason.label)
def test_each_reason_comes_about_and_says_what_decided(reason: Reason) -> None:
    made, events, words = SCENARIOS[reason]
    bench = made()
    out = [each for event in events for each in bench(*(event if isinstance(event, tuple) else [event]))]
    said = [each.why.words for each in out if each.why.reason is reason]
    assert words in "; ".join(said)


@pytest.mark.parametrize("reason", SEARCHES, ids=lambda reason: reason.label)
def test_each_reason_of_the_search_for_c_comes_about(reason: Reason) -> None:
    times, words = SEARCHES[reason]
    devices = Device(times)
    while not (said := [each.why.words for each in devices.said if each.why.reason is reason]):
        devices.turn()
    assert words in said[0], said


def test_the_table_of_reasons_in_the_docs_is_that_of_the_code() -> None:
    page = (ROOT / "docs" / "engine.md").read_text()
    section = page[page.index("## Why an instruction is given") : page.index("## What `Engine.handle` does")]
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \| ([^|]+) \|$", section, re.MULTILINE)
    assert SCENARIOS.keys() | SEARCHES.keys() == {each for each in Reason if not each.remedy}
    assert rows == [(each.label, ", ".join(map("`{}`".format, each.numbers)) or "-") for each in Reason]
    units = re.findall(r"^\| `(\w+)` \| [^|]+ \|$", section, re.MULTILINE)
    assert sorted(units) == sorted({number for reason in Reason for number in reason.numbers})


def test_a_reason_has_exactly_its_numbers() -> None:
    with pytest.raises(ValueError, match="'free_device' has the numbers"):
        because(Reason.FREE_DEVICE, waiting=1, idle=1, width=2)
