"""Admission to a device: who is let in, who makes room, and what is refused. The turns of a device beside it."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.shared_device.twin import Device
from salus_share import Admission, Need, SalusError, StaleToken, policy
from salus_share.admission import Resident
from salus_share.lanes import Place
from salus_share.messages import (
    Admit,
    Instruction,
    JobAdded,
    JobLeft,
    Move,
    NeedFound,
    Pause,
    Paused,
    Progress,
    Refuse,
    Served,
)
from salus_share.policies import POLICIES, Standing
from salus_share.turns import IDLE, INSIDE
from tests.salus import storm


def admission(name: str, capacity: int = 100) -> Admission:
    return Admission(capacity, policy(name))


def add(to: Admission | Device, job: str, persistent: int, ephemeral: int, **more) -> list[Instruction]:
    event = JobAdded(job, Need(persistent, ephemeral), **more)
    return to.handle(event, 0.0)[0] if isinstance(to, Device) else to.handle(event)


# Admission


def test_fifo_lets_one_in_at_a_time() -> None:
    found = admission("FIFO")
    assert add(found, "a", 10, 10) == [Admit("a", 0, 1)]
    assert add(found, "b", 10, 10) == []
    assert add(found, "c", 10, 10) == []
    assert found.waiting == ("b", "c")
    assert found.handle(JobLeft("a")) == [Admit("b", 1, 2)]


def test_pack_opens_as_many_lanes_as_fit() -> None:
    found = admission("PACK")
    for lane, job in enumerate("abc"):
        assert add(found, job, 10, 20) == [Admit(job, lane, lane + 1)]
    # A fourth lane does not fit; its P does, so it shares one.
    assert add(found, "d", 10, 20) == [Admit("d", 0, 4)]
    assert found.table.reserved == 100


def test_an_unknown_need_runs_alone_first() -> None:
    found = admission("FAIR")
    assert found.handle(JobAdded("a", None)) == [Admit("a", 0, 1)]
    assert add(found, "b", 10, 10) == []
    assert found.handle(NeedFound("a", Need(20, 20))) == [Admit("b", 1, 2)]
    # And waits until it can.
    assert found.handle(JobAdded("c", None)) == []
    assert found.handle(JobLeft("a")) == []
    assert found.handle(JobLeft("b")) == [Admit("c", 2, 3)]


def test_what_can_never_fit_is_refused() -> None:
    found = admission("FAIR")
    (refused,) = add(found, "a", 60, 41)
    assert isinstance(refused, Refuse) and "smaller batch" in refused.reason
    assert found.jobs == {}
    add(found, "b", 10, 10)
    assert found.handle(NeedFound("b", Need(99, 2))) == [Pause("b")]
    (refused,) = found.handle(Paused("b"))
    assert isinstance(refused, Refuse)
    assert found.table.reserved == 0


def test_a_large_job_is_passed_a_few_times_and_no_more() -> None:
    found = admission("FAIR")
    add(found, "small", 10, 10)
    assert add(found, "large", 90, 10) == []
    for index in range(20):
        told = add(found, f"j{index}", 5, 5)
        assert bool(told) == (index < found.policy.patience)
        if told:
            found.handle(JobLeft(f"j{index}"))
    assert found.handle(JobLeft("small"))[0] == Admit("large", 9, 10)


def test_srtf_makes_the_longest_leave_only_when_persistent_memory_does_not_fit() -> None:
    found = admission("SRTF")
    add(found, "long", 30, 20, remaining=100)
    add(found, "middle", 30, 20, remaining=50)
    # In the one lane its E takes nothing from the others: no job leaves.
    assert add(found, "short", 10, 30, remaining=5) == [Admit("short", 0, 3)]
    assert add(found, "shorter", 20, 10, remaining=4) == [Pause("long")]
    # A job on its way out is not asked twice, and what it frees is not given to others.
    assert add(found, "longest", 1, 1, remaining=200) == []
    assert found.handle(Paused("long")) == [Admit("shorter", 0, 4), Admit("longest", 0, 5)]
    assert found.waiting == ("long",)
    assert found.handle(JobLeft("middle")) == [Admit("long", 0, 6)]


def test_srtf_admits_what_fits_alone_whoever_is_there() -> None:
    found = admission("SRTF")
    add(found, "a", 40, 20, remaining=100)
    add(found, "b", 40, 20, remaining=90)
    assert set(add(found, "c", 50, 50, remaining=10)) == {Pause("a"), Pause("b")}
    assert found.handle(Paused("a")) == []
    assert found.handle(JobLeft("b")) == [Admit("c", 1, 3)]
    assert add(found, "unknown", 60, 40) == []


def test_hpt_lets_a_promoted_trial_take_the_place_of_one_left_behind() -> None:
    found = admission("HPT")
    add(found, "a", 40, 20)
    assert add(found, "b", 50, 20) == []
    assert found.handle(Progress("b", None, rung=1)) == [Pause("a")]


def test_the_resident_that_was_served_most_makes_room() -> None:
    found = admission("HPT")
    add(found, "a", 40, 10)
    add(found, "b", 40, 10)
    standings = {"a": Standing(1, service=5.0, last_turn=2), "b": Standing(2, service=1.0, last_turn=3)}
    assert found.handle(Served(standings)) == []
    assert add(found, "c", 40, 10, rung=1) == [Pause("a")]
    with pytest.raises(SalusError, match="not on this device"):
        found.handle(Served({"c": Standing(3)}))


# Memory that turns out different


def test_growing_in_place_moving_and_leaving() -> None:
    device = Device(100, policy("PACK"))
    add(device, "a", 10, 20)
    add(device, "b", 10, 40)
    assert device.handle(NeedFound("a", Need(10, 30)), 0.0)[0] == []
    assert device.admission.table.lanes[0].size == 30
    assert device.arrive("a", 1, 0.0) == "a"
    with pytest.raises(SalusError, match="within an iteration"):
        device.handle(NeedFound("a", Need(10, 31)), 0.0)
    device.end_iteration("a", 1.0, 1.0)
    assert device.handle(NeedFound("a", Need(15, 45)), 1.0)[0] == [Move("a", 1)]
    assert device.handle(NeedFound("a", Need(15, 80)), 1.0)[0] == [Pause("a")]
    with pytest.raises(StaleToken):
        device.arrive("a", 1, 1.0)
    # Until it has left it holds what it held.
    assert device.admission.table.reserved == 70
    assert device.handle(Paused("a"), 1.0)[0] == []
    assert device.handle(JobLeft("b"), 1.0)[0] == [Admit("a", 2, 3)]


def test_shrinking_lets_others_in() -> None:
    found = admission("PACK")
    add(found, "a", 40, 50)
    assert add(found, "b", 20, 20) == []
    assert found.handle(NeedFound("a", Need(30, 30))) == [Admit("b", 1, 2)]


# Turns


def end(device: Device, job: str, seconds: float) -> str | None:
    """End the iteration of a job that is back at the gate in the same moment. Returns who has the lane now."""
    woken = device.end_iteration(job, seconds, 0.0)
    granted = device.arrive(job, device.seats.seat(job).token, 0.0)
    return granted if granted is not None else woken


def test_one_iteration_at_a_time_in_a_lane() -> None:
    device = Device(100, policy("SRTF"))
    add(device, "a", 10, 10, remaining=10)
    add(device, "b", 10, 10, remaining=5)
    assert device.arrive("a", 1, 0.0) == "a"
    assert device.arrive("b", 2, 0.0) is None
    # a would go on; b is shorter.
    assert end(device, "a", 1.0) == "b"
    assert end(device, "b", 1.0) == "b"
    assert device.seats.seat("b").standing.remaining == 4.0
    # Killed while it holds the lane: it is free at once.
    assert device.handle(JobLeft("b"), 0.0)[1] == ["a"]
    assert running(device) == ["a"]


def test_lanes_run_at_the_same_time() -> None:
    device = Device(100, policy("PACK"))
    add(device, "a", 10, 10)
    add(device, "b", 10, 10)
    assert device.arrive("a", 1, 0.0) == "a"
    assert device.arrive("b", 2, 0.0) == "b"
    assert running(device) == ["a", "b"]


def running(device: Device) -> list[str]:
    return [job for job, seat in device.seats.by_job.items() if seat.state == INSIDE]


def fair_lane(*jobs: str) -> Device:
    """A FAIR device with these jobs in one lane."""
    device = Device(100, policy("FAIR"))
    for job in jobs:
        assert add(device, job, 1, 60) == [Admit(job, 0, len(device.admission.jobs))]
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


def test_fair_newcomers_share_at_once_and_do_not_catch_up() -> None:
    device = fair_lane("a")
    serve(device, {"a": 0.25}, 100)
    add(device, "b", 1, 60)
    got = serve(device, {"a": 0.25, "b": 0.25}, 20)
    assert abs(got["a"] - got["b"]) <= 0.25


def test_fair_owes_no_more_than_a_second_to_one_that_was_away() -> None:
    device = fair_lane("a", "b")
    serve(device, {"a": 0.25}, 400)
    got = serve(device, {"a": 0.25, "b": 0.25}, 40)
    assert 0 < got["b"] - got["a"] <= 1.5


def test_hpt_prefers_the_promoted_and_is_fair_among_equals() -> None:
    device = Device(100, policy("HPT"))
    for job, rung in (("a", 0), ("b", 1), ("c", 1)):
        add(device, job, 1, 60, rung=rung)
    device.arrive("a", 1, 0.0)
    got = serve(device, {"a": 1.0, "b": 1.0, "c": 1.0}, 101)
    assert got == {"a": 1.0, "b": 50.0, "c": 50.0}


# What cannot be


def test_old_tokens_are_refused() -> None:
    device = Device(100, policy("SRTF"))
    add(device, "a", 50, 10, remaining=100)
    add(device, "b", 60, 10, remaining=1)
    with pytest.raises(StaleToken, match="token 1"):
        device.arrive("a", 1, 0.0)
    device.handle(Paused("a"), 0.0)
    with pytest.raises(SalusError, match="not on this device"):
        device.arrive("a", 1, 0.0)
    assert device.handle(JobLeft("b"), 0.0)[0] == [Admit("a", 2, 3)]
    with pytest.raises(StaleToken):
        device.arrive("a", 1, 0.0)
    assert device.arrive("a", 3, 0.0) == "a"


@pytest.mark.parametrize("need", [Need(-1, 5), Need(5, -1), Need(float("nan"), 5), Need("5", 5)])
def test_needs_that_are_no_amounts_are_refused(need) -> None:
    found = admission("FAIR")
    with pytest.raises(SalusError, match="expected bytes"):
        found.handle(JobAdded("a", need))
    assert found.jobs == {}
    add(found, "b", 5, 5)
    with pytest.raises(SalusError, match="expected bytes"):
        found.handle(NeedFound("b", need))
    assert found.table.reserved == 10


def test_events_that_cannot_be_true() -> None:
    found = admission("FAIR")
    add(found, "a", 5, 5)
    for event, why in (
        (JobAdded("a", None), "here already"),
        (JobAdded("b", None, remaining=-1.0), "remaining"),
        (Progress("b", 1.0, 0), "not known"),
        (Progress("a", float("nan"), 0), "remaining"),
        (object(), "not an event"),
    ):
        with pytest.raises(SalusError, match=why):
            found.handle(event)


def test_turns_that_cannot_be() -> None:
    device = Device(100, policy("FAIR"))
    add(device, "a", 5, 5)
    with pytest.raises(SalusError, match="not on this device"):
        device.arrive("b", 1, 0.0)
    with pytest.raises(SalusError, match="not within one"):
        device.end_iteration("a", 1.0, 0.0)
    device.arrive("a", 1, 0.0)
    with pytest.raises(SalusError, match="already"):
        device.arrive("a", 1, 0.0)
    with pytest.raises(SalusError, match="seconds >= 0"):
        device.end_iteration("a", float("nan"), 0.0)


# Found again


def test_restored_jobs_are_in_the_same_lanes_and_tokens_go_on() -> None:
    before = admission("FAIR")
    for job in "abcd":
        add(before, job, 10, 20)
    places = dict(before.table.places)
    after = admission("FAIR")
    jobs = before.jobs
    after.restore([Resident(j, place, jobs[j].token, jobs[j].standing) for j, place in places.items()], tokens=7)
    assert after.table.places == places
    assert after.table.lanes == before.table.lanes
    assert after.handle(JobLeft("b")) == []
    assert add(after, "e", 10, 20) == [Admit("e", 3, 8)]


def test_one_that_was_leaving_still_is_when_found_again() -> None:
    found = admission("SRTF")
    found.restore([Resident("a", Place(0, 50, 10), 3, Standing(1), leaving=True)], tokens=3)
    assert found.jobs["a"].leaving
    assert add(found, "b", 60, 10, remaining=1.0) == []
    assert found.handle(Paused("a")) == [Admit("b", 1, 4)]


# Whatever happens


@pytest.mark.parametrize("name", POLICIES)
def test_storm(name) -> None:
    # Five policies: 100,000 events in all.
    counted = storm.run(name, 20_000, random.Random(name))
    assert min(counted[what] for what in ("Admit", "Run", "NeedFound", "Progress")) > 100


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(POLICIES)), st.randoms(use_true_random=False))
def test_small_storms(name, source) -> None:
    storm.run(name, 60, source)
