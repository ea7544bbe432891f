"""`fluidtune why`: the sentences of one trial's story, what is summed up, and which trial is meant."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidtune.cli import cli
from fluidtune.engine import Reason, Why, because
from fluidtune.report.events import EventDict
from fluidtune.report.story import TOLD_FIRST, TOLD_WHOLE, story_of
from fluidtune.report.trial_lookup import UnknownTrialError, find_trial
from tests.report.makers import (
    added,
    begin,
    ended,
    ev,
    group,
    over,
    random_run,
    resized,
    resizing,
    result,
    started,
    written,
)
from tests.report.test_readable import OF_A_JOB, whole
from tests.report.test_summary import by_hand

GROWS = because(Reason.IDLE_DEVICES, idle=1, width=1, to=2, left=20, left_to=11, resize=0.2)
SHRINKS = because(Reason.WAITING_TRIALS, waiting=1, wanted=1, width=2, to=1, left=10, left_to=20)
STARTS = because(Reason.FREE_DEVICE, waiting=1, idle=2)


def cause(why: Why) -> dict[str, Any]:
    return {"reason": why.words, "why": why.reason.label, "numbers": dict(why.numbers)}


def starts(t: float, trial: str, *devices: int, share: float = 1.0, resumed: bool = False, why: Why = STARTS) -> Any:
    return {**started(t, trial, *devices, share=share, resumed=resumed), **cause(why)}


def grown(t: float) -> list[EventDict]:
    return [resizing(t, "a", [0], [0, 1], **cause(GROWS)), resized(t + 0.5, "a", 0, 1)]


def shrunk(t: float) -> list[EventDict]:
    return [resizing(t, "a", [0, 1], [0], **cause(SHRINKS)), resized(t + 0.5, "a", 0)]


def told(events: list[EventDict], trial: str = "a") -> list[str]:
    return [re.sub(r" +", " ", line).strip() for line in story_of(events, trial).lines()]


BEGUN = [begin(100, 2), group(100), added(100, "a"), starts(101, "a", 0)]


def test_a_trial_that_grew_and_shrank() -> None:
    events = [*BEGUN, result(103, "a", 1, 2.0, 1), *grown(104), result(106, "a", 2, 1.0, 2), *shrunk(107)]
    assert told([*events, ended(110, "a"), over(111)]) == [
        "trial a of test: elastic, 2 iterations reported, stopped",
        "0 s added to group g, waits with 10 iterations to do",
        "1 s started on device 0: 2 devices idle, 1 trial waiting",
        "4.5 s [1] grew from width 1 to 2, 2 devices (0, 1): 1 device idle, no trial waits for"
        " them; 11 s left on 2 devices instead of 20 s on 1, and a resize costs 0.2 s",
        "7.5 s [2] shrank from width 2 to 1, device 0: 1 trial waiting, for which 1 device"
        " lacked; 20 s left on 1 device instead of 10 s on 2",
        "10 s [2] was stopped",
    ]


def test_a_trial_that_was_suspended_and_moved() -> None:
    why = because(Reason.OWN_DEVICE, idle=1, width=0.5, to=1, left=40, left_to=20)
    events = [*BEGUN[:3], added(100, "b"), starts(101, "a", 0, share=0.5), starts(101, "b", 0, share=0.5)]
    events += [ev(105, "suspend_asked", trial="a", **cause(why))]
    events += [{**ended(106, "a", "paused"), "reason": f"moved to another device: {why.words}"}, added(106, "a")]
    events += [starts(107, "a", 1, resumed=True)]
    events += [ev(108, "recovered", trial="a", iteration=4, reason="moved to another device")]
    words = "1 device idle; 20 s left on 1 device of its own instead of 40 s at its share of 0.5"
    assert told(events)[2:] == [
        "1 s started on device 0, at a share of 0.5: 2 devices idle, 1 trial waiting",
        "1 s trial b came to its device, which 2 trials have now: 2 devices idle, 1 trial waiting",
        f"5 s was asked to leave its device and to go on later: {words}",
        f"6 s left its devices: moved to another device: {words}",
        "6 s waits again with 10 iterations to do",
        "7 s moved and went on on device 1: 2 devices idle, 1 trial waiting",
        "8 s another worker has it, with 4 iterations reported: moved to another device",
        "It never grew: it has reported nothing, and a trial grows when its speed is known.",
    ]
    assert "3 s trial a left its device, which 1 trial has now" not in told(events, "b")
    assert "6 s trial a left its device, which 1 trial has now" in told(events, "b")


def test_a_trial_that_was_tried_again_after_losses() -> None:
    events = [*BEGUN, ev(102, "worker_lost", worker="w1", device=0, reason="killed\nby a signal")]
    events += [ev(102, "trial_suspended", trial="a", reason="its worker died: killed")]
    events += [
        starts(103, "a", 1, resumed=True),
        ev(104, "recovered", trial="a", iteration=3, reason="its worker died"),
        ev(104, "went_on", trial="a", iteration=0, reported=3),
    ]
    events += [ev(105, "device_lost", device=1, reason="the lease has ended"), started(106, "a", 0, resumed=True)]
    events += [{**ended(107, "a", "paused"), "reason": "it failed: ValueError: no"}, added(107, "a")]
    events += [{**ended(108, "a", "failed"), "reason": "it failed: ValueError: again"}]
    assert [line.partition(" s ")[2] for line in told(events)[3:-1]] == [
        "its worker on device 0 died: killed",
        "left its devices, to go on later: its worker died: killed",
        "moved and went on on device 1: 2 devices idle, 1 trial waiting",
        "another worker has it, with 3 iterations reported: its worker died",
        "begins anew; 3 iterations of it are done twice",
        "it lost device 1: the lease has ended",
        "moved and went on on device 0: the log does not say why",
        "left its devices: it failed: ValueError: no",
        "waits again with 10 iterations to do",
        "failed: it failed: ValueError: again",
    ]


def test_a_group_that_lost_a_worker_and_a_growth_that_failed() -> None:
    events = [*BEGUN, *grown(102), ev(104, "worker_lost", worker="w2", device=1, reason="killed")]
    lost = {"reason": "worker w2 was lost", "why": "worker_lost"}
    events += [{**resized(104, "a", 0), **lost}, resizing(105, "a", [0], [0, 1], **cause(GROWS))]
    events += [ev(106, "resize_failed", trial="a", devices=[0], reason="a new worker did not come")]
    lines = told(events)
    assert "4 s its worker on device 1 died: killed" in lines
    assert "4 s shrank from width 2 to 1, device 0: worker w2 was lost" in lines
    assert lines[-1].startswith("6 s a change to 2 devices (0, 1), wanted because: 1 device idle, no trial waits")
    assert lines[-1].endswith("failed, it stays on device 0: a new worker did not come")


def test_what_a_trial_waits_for_and_why_it_was_refused() -> None:
    """Seen: nothing said why a trial waits, and no log had one that was refused."""
    busy, paused = because(Reason.DEVICES_BUSY), because(Reason.PAUSED)
    refused = because(Reason.JOB_SMALL, asked=9, largest=1, noun="device")
    events = [
        begin(0, 1),
        added(1, "a"),
        added(1, "b"),
        starts(1, "a", 0),
        ev(1, "trial_waits", line=1, trials=["b"], **cause(busy)),
    ]
    events += [{**ended(2, "c", "failed"), **cause(refused)}]
    assert told(events, "b")[2:] == [
        "1 s waits: trials hold all devices",
        f"It waits: trials hold all devices. What can be done: {Reason.DEVICES_BUSY.remedy}.",
    ]
    stories = [story_of([*events, next_], "b") for next_ in (over(3, 3, 3), begin(3, 1))]
    for gone in (*stories, story_of(events, "b", died=True)):
        assert gone.end == (), "seen: a trial waited whose driver had ended or died"
    assert told(events, "c")[1:] == [
        f"2 s was refused: {refused.words}",
        f"It was refused: it asks for 9 devices, and the job may have 1. What can be done: {Reason.JOB_SMALL.remedy}.",
    ]
    events += [{**ended(3, "a", "paused"), **cause(paused)}, starts(3, "b", 0)]
    assert told(events)[-2].startswith(
        "It waits: Tune paused it, and b of its group did not. What can be done: its alg"
    )
    assert not told(events, "b")[-1].startswith("It waits")
    ends = {**ended(3, "d", "paused"), "reason": "its driver ends"}
    assert "5 s after the one before it ended" in told([added(2, "d"), ends, over(4), begin(9, 1)], "d")[3]


SUSPENDED = ev(2, "trial_suspended", trial="a", reason="its worker died")
LOST = ev(2, "device_lost", device=0, reason="its node died")


@pytest.mark.parametrize(
    ("before", "fields", "words"),
    [
        ([SUSPENDED], cause(because(Reason.PAUSED)), "was paused by Tune"),
        ([starts(1, "a", 0), LOST], {"reason": "device 0 was lost"}, "was paused: device 0 was lost"),
        ([], {"reason": "its driver ends"}, "was paused: its driver ends"),
    ],
)
def test_a_trial_that_is_paused_without_a_device(before: list[EventDict], fields: dict[str, Any], words: str) -> None:
    """Seen: it "left its devices", and had none; it "waits no more", and waited again."""
    assert f"3 s {words}" in told([begin(0, 1), added(0, "a"), *before, {**ended(3, "a", "paused"), **fields}])


def test_a_long_wait_tells_each_reason_also_those_in_its_middle() -> None:
    """Seen: 12 x waits."""
    reasons = [Reason.DEVICES_BUSY, Reason.NO_DEVICE, *[Reason.DEVICES_BUSY] * TOLD_WHOLE, Reason.KEPT_IDLE]
    waits = [ev(n, "trial_waits", line=n, trials=["a"], **cause(because(why))) for n, why in enumerate(reasons)]
    lines = told([begin(0, 1), added(0, "a"), *waits, *waits])
    assert {f"waits: {why.template}" for why in reasons} <= {line.partition(" s ")[2] for line in lines}
    assert any(" x waits (devices busy)" in line for line in lines)


RAN = [added(0, "a"), starts(1, "a", 0)]
REPORTED = [*RAN, result(2, "a", 1, 1.0, 1)]
FAILED = [ev(2, "resize_failed", trial="a", devices=[0], reason=reason) for reason in ("died", "too late")]
#: Why a trial never grew -> what happened on two devices.
NEVER = {
    "no call of a torch module with parameters was seen in it": [
        ev(0, "trial_added", trial="a", group="g", kind="elastic", iterations=9, growable=False),
        starts(1, "a", 0),
        ev(2, "kind_found", trial="a", kind="elastic"),
    ],
    "it keeps an iterator": [
        *RAN,
        ev(2, "growth_ended", trial="a", reason="it keeps an iterator"),
    ],
    "2 growths failed, the last one because too late": [*RAN, *FAILED],
    "1 growth began, and it left its devices before the growth was done": [
        *RAN,
        resizing(2, "a", [0], [0, 1], **cause(GROWS)),
        ended(3, "a", "paused"),
    ],
    "it has reported nothing, and a trial grows when its speed is known": RAN,
    "no device was idle while it ran.": [
        *(added(0, "b"), RAN[0], starts(1, "b", 1), *REPORTED[1:], ended(3, "a", "paused"), over(3)),
        *(begin(9, 2), ended(10, "a")),
    ],
    "no device was idle while it ran, but for less than 0.1 s.": [*RAN, starts(1.00006, "b", 1), REPORTED[-1]],
    "other trials waited whenever a device was idle (3 s in all)": [added(0, "b"), *REPORTED, ended(4, "a")],
    "devices were idle for 3 s while it ran and no trial waited, but a trial grows only": [*REPORTED, ended(4, "a")],
}


@pytest.mark.parametrize("why", NEVER)
def test_why_a_trial_never_grew(why: str) -> None:
    assert f"It never grew: {why}" in told([begin(0, 2), group(0), *NEVER[why]])[-1]


def test_why_no_trial_of_a_job_could_grow() -> None:
    assert told([begin(0, 2, settings={"max_workers": 1}), group(0), *REPORTED])[-1] == "It never grew: max_workers=1."
    assert "the job never had a second device" in told([begin(0, 1), group(0), *REPORTED])[-1]
    wide = [{**added(0, "a"), "share": 2.0}, starts(1, "a", 0, 1)]
    assert told([begin(0, 2), group(0), *wide])[-1] == "It was never resized: it asks for 2 devices at once."


def test_a_long_story_is_summed_up_and_a_short_one_is_told_whole() -> None:
    turns = [event for turn in range(500) for event in (*grown(200 + 4 * turn), *shrunk(202 + 4 * turn))]
    lines = told([*BEGUN, *turns, ended(3000, "a")])
    assert len(lines) == 1 + 2 + 2 * TOLD_FIRST + 1 + 2 + 1
    assert lines[9] == (
        "1 min 52 s 992 events like those before, until 34 min 54 s: 496 x grew (idle devices), 496 x shrank (waiting"
        " trials); widths 1, 2"
    )
    few = told([*BEGUN, *turns[: 2 * (TOLD_WHOLE - 2)]])
    assert len(few) == 1 + TOLD_WHOLE and not any("events like" in line for line in few)


# Any log


@settings(deadline=None, max_examples=100)
@given(
    st.integers(0, 1000),
    st.integers(1, 40),
    st.dictionaries(st.integers(0, 200), st.sampled_from([None, *OF_A_JOB]), max_size=60),
    st.floats(-0.5, 0.5),
)
def test_any_log_gives_a_story_that_mentions_every_change_of_width(
    seed: int, iterations: int, others: dict[int, str | None], drift: float
) -> None:
    """Also one that has other events or none in the place of some, and whose clock was set back."""
    events = random_run(seed, devices=3, trials=4, iterations=iterations)
    for place in others.keys() & set(range(len(events))):
        other = whole(name) if (name := others[place]) else {}
        events[place] = {**other, **{field: events[place].get(field, "a") for field in other.keys() & {"t", "trial"}}}
    events = [{**event, "t": event["t"] + drift * (place % 3)} for place, event in enumerate(filter(None, events))]
    expected = Counter[str]()
    for event in events:
        expected[event.get("trial", "")] += event["event"] in ("trial_started", "resized")
    for trial in {event["trial"] for event in events if "trial" in event}:
        story = story_of(events, trial)
        changes = [each for each in story.entries if each.width is not None and each.kind != "resize failed"]
        assert len(changes) == expected[trial]
        lines = story.lines()
        assert sum(_stood_for(line) for line in lines[1 : len(lines) - len(story.end)]) == len(story.entries)
        summed = [line.partition("; widths ")[2].split(", ") for line in lines if "; widths " in line]
        for entry in changes:
            width = f"{entry.width:.3g}"
            told = any(line.endswith(entry.text) for line in lines)
            assert told or any(width in widths for widths in summed), (width, lines)
            began = entry.text.startswith(("started on", "went on on", "moved and"))
            assert began or f"width {width}," in entry.text or f"to {width}," in entry.text


def _stood_for(line: str) -> int:
    """How many entries a line of a story stands for."""
    found = re.search(r"(\d+) events like those before", line)
    return int(found[1]) if found else 1


# Which trial, and which run


def test_which_trial_is_meant() -> None:
    """Seen: `why` refused the numbers that all pictures show."""
    named = {**added(1, "4f2e1_00010"), "name": "mine"}
    events = [begin(0, 2), added(1, "4f2e1_00002"), named, *(added(1, name) for name in ("4f2e1_0001", "77a", "c8_2"))]
    found = {
        **{"4f2e1_0001": "4f2e1_0001", "mine": "4f2e1_00010", "train_4f2e1_00002": "4f2e1_00002"},
        **{"train_4f2e1_00002_1_lr=0.1_2026": "4f2e1_00002", "1": "4f2e1_0001", "00010": "4f2e1_00010"},
        **{"77": "77a", "7a": "77a", "8_2": "c8_2"},
    }
    assert {wanted: find_trial(events, wanted) for wanted in found} == found
    refusals = {
        "2": "'2' may be any of 2 trials: 4f2e1_00002, c8_2",
        "4f2e1_0": "'4f2e1_0' may be any of 3 trials: 4f2e1_00002, 4f2e1_00010, 4f2e1_0001",
        "x": "no trial 'x'; the run has 5: 4f2e1_00002, 4f2e1_00010, 4f2e1_0001, 77a, c8_2",
        "": "no trial ''; the run has 5",
    }
    for wanted, said in refusals.items():
        with pytest.raises(UnknownTrialError, match=said):
            find_trial(events, wanted)
    with pytest.raises(UnknownTrialError, match=r"the run has 50: .* and 30 more"):
        find_trial([added(1, f"t{number}") for number in range(50)], "x")
    with pytest.raises(UnknownTrialError, match="no trial 'x': the log has no trials"):
        find_trial([begin(0, 1)], "x")


def test_the_command_prints_the_story(tmp_path: Path) -> None:
    """Seen: `fluidtune why 8` said "Missing argument", where `top` and `view` show the newest run."""
    run = written(tmp_path / "ray_results" / "one", by_hand()).parent
    for where in ([str(run)], []):
        done = CliRunner(env={"HOME": str(tmp_path)}).invoke(cli, ["why", *where, "c"])
        assert done.output.startswith("trial c of test: elastic, 3 iterations reported, paused\n")


def test_what_a_clone_differs_in_is_said_as_json() -> None:
    """The text "2" is no 2. The trial has not been begun: it is in the log because it is steered."""
    act = {"act": "1", "kind": "clone", "trial": "a", "by": "ann", "via": "page", "parameters": {"nw": "2", "on": True}}
    told = story_of([begin(0, 1), ev(1, "steered", state="asked", **act)], "a").lines()
    assert told[1] == '1 s  ann (page) asked for a clone of it with nw="2", on=true'
