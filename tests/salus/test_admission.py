"""The twin's device: who is let in, who makes room, what is refused, and its turns."""

from __future__ import annotations

import random

import pytest

from benchmarks.shared_device import messages as m
from benchmarks.shared_device.admission import Admission
from benchmarks.shared_device.twin import Device
from salus_share import Need, SalusError, policy
from salus_share.policies import POLICIES, Standing
from salus_share.turns import IDLE, INSIDE
from tests.salus import storm


def admission(name: str, capacity: int = 100) -> Admission:
    return Admission(capacity, policy(name))


def add(to: Admission | Device, job: str, persistent: int, ephemeral: int, **more) -> list[m.Instruction]:
    event = m.JobAdded(job, Need(persistent, ephemeral), **more)
    return to.handle(event, 0.0)[0] if isinstance(to, Device) else to.handle(event)


# Admission


def test_fifo_lets_one_in_at_a_time() -> None:
    found = admission("FIFO")
    assert add(found, "a", 10, 10) == [m.Admit("a", 0, 1)]
    assert add(found, "b", 10, 10) == []
    assert add(found, "c", 10, 10) == []
    assert found.waiting == ("b", "c")
    assert found.handle(m.JobLeft("a")) == [m.Admit("b", 1, 2)]


def test_an_unknown_need_runs_alone_first() -> None:
    found = admission("FAIR")
    assert found.handle(m.JobAdded("a", None)) == [m.Admit("a", 0, 1)]
    assert add(found, "b", 10, 10) == []
    assert found.handle(m.NeedFound("a", Need(20, 20))) == [m.Admit("b", 1, 2)]
    # And waits until it can.
    assert found.handle(m.JobAdded("c", None)) == []
    assert found.handle(m.JobLeft("a")) == []
    assert found.handle(m.JobLeft("b")) == [m.Admit("c", 2, 3)]


def test_what_can_never_fit_is_refused() -> None:
    found = admission("FAIR")
    (refused,) = add(found, "a", 60, 41)
    assert isinstance(refused, m.Refuse) and "smaller batch" in refused.reason
    assert found.jobs == {}
    add(found, "b", 10, 10)
    assert found.handle(m.NeedFound("b", Need(99, 2))) == [m.Pause("b")]
    assert found.handle(m.JobLeft("b")) == []
    (refused,) = add(found, "b", 99, 2)
    assert isinstance(refused, m.Refuse)
    assert found.table.reserved == 0


def test_srtf_makes_the_longest_leave_only_when_persistent_memory_does_not_fit() -> None:
    found = admission("SRTF")
    add(found, "long", 30, 20, remaining=100)
    add(found, "middle", 30, 20, remaining=50)
    # In the one lane its E takes nothing from the others: no job leaves.
    assert add(found, "short", 10, 30, remaining=5) == [m.Admit("short", 0, 3)]
    assert add(found, "shorter", 20, 10, remaining=4) == [m.Pause("long")]
    # A job on its way out is not asked twice, and what it frees is not given to others.
    assert add(found, "longest", 1, 1, remaining=200) == []
    assert found.handle(m.JobLeft("long")) == [m.Admit("shorter", 0, 4), m.Admit("longest", 0, 5)]
    assert add(found, "long", 30, 20, remaining=99) == []
    assert found.handle(m.JobLeft("middle")) == [m.Admit("long", 0, 6)]


def test_hpt_lets_a_promoted_trial_take_the_place_of_one_left_behind() -> None:
    found = admission("HPT")
    add(found, "a", 40, 20)
    assert add(found, "b", 50, 20) == []
    assert found.handle(m.Progress("b", None, rung=1)) == [m.Pause("a")]


def test_the_resident_that_was_served_most_makes_room() -> None:
    found = admission("HPT")
    add(found, "a", 40, 10)
    add(found, "b", 40, 10)
    standings = {"a": Standing(1, service=5.0, last_turn=2), "b": Standing(2, service=1.0, last_turn=3)}
    assert found.handle(m.Served(standings)) == []
    assert add(found, "c", 40, 10, rung=1) == [m.Pause("a")]
    with pytest.raises(SalusError, match="not on this device"):
        found.handle(m.Served({"c": Standing(3)}))


# Turns


def end(device: Device, job: str, seconds: float) -> str | None:
    """End the iteration of a job that is back at the gate in the same moment. Returns who has the lane now."""
    woken = device.end_iteration(job, seconds, 0.0)
    granted = device.arrive(job, device.seats.seat(job).token, 0.0)
    return granted if granted is not None else woken


def running(device: Device) -> list[str]:
    return [job for job, seat in device.seats.by_job.items() if seat.state == INSIDE]


def fair_lane(*jobs: str) -> Device:
    """A FAIR device with these jobs in one lane."""
    device = Device(100, policy("FAIR"))
    for job in jobs:
        assert add(device, job, 1, 60) == [m.Admit(job, 0, len(device.admission.jobs))]
    return device


def serve(device: Device, lengths: dict[str, float], iterations: int) -> dict[str, float]:
    """Seconds that each job got; all are always ready."""
    got = dict.fromkeys(lengths, 0.0)
    for job in lengths:
        if device.seats.seat(job).state == IDLE:
            device.arrive(job, device.seats.seat(job).token, 0.0)
    for _ in range(iterations):
        (job,) = running(device)
        got[job] += lengths[job]
        end(device, job, lengths[job])
    return got


def test_fair_gives_equal_service_whatever_an_iteration_takes() -> None:
    got = serve(fair_lane("a", "b", "c"), {"a": 0.1, "b": 1.0, "c": 0.37}, 1000)
    assert max(got.values()) - min(got.values()) <= 1.0


# What cannot be


def test_old_tokens_are_refused() -> None:
    device = Device(100, policy("SRTF"))
    add(device, "a", 50, 10, remaining=100)
    add(device, "b", 60, 10, remaining=1)
    with pytest.raises(SalusError, match="token 1"):
        device.arrive("a", 1, 0.0)
    device.handle(m.JobLeft("a"), 0.0)
    assert add(device, "a", 50, 10, remaining=99) == []
    with pytest.raises(SalusError, match="not on this device"):
        device.arrive("a", 1, 0.0)
    assert device.handle(m.JobLeft("b"), 0.0)[0] == [m.Admit("a", 2, 3)]
    with pytest.raises(SalusError, match="is old"):
        device.arrive("a", 1, 0.0)
    assert device.arrive("a", 3, 0.0) == "a"


# Whatever happens


@pytest.mark.parametrize("name", POLICIES)
def test_storm(name) -> None:
    # Five policies: 100,000 events in all.
    counted = storm.run(name, 20_000, random.Random(name))
    assert min(counted[what] for what in ("Admit", "Run", "NeedFound", "Progress")) > 100
