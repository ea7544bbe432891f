"""The scheduler of a device: who is let in, who makes room, whose turn it is, and what it refuses."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from salus_share import Need, SalusError, Scheduler, StaleToken, policy
from salus_share.lanes import Place
from salus_share.messages import (
    Admit,
    IterationEnded,
    JobAdded,
    JobLeft,
    Move,
    NeedFound,
    Pause,
    Paused,
    Progress,
    Ready,
    Refuse,
    Run,
)
from salus_share.policies import POLICIES, Standing
from salus_share.scheduler import Resident
from tests.salus import storm


def device(name: str, capacity: int = 100) -> Scheduler:
    return Scheduler(capacity, policy(name))


def add(scheduler: Scheduler, job: str, persistent: int, ephemeral: int, **more):
    return scheduler.handle(JobAdded(job, Need(persistent, ephemeral), **more))


# Admission


def test_fifo_lets_one_in_at_a_time() -> None:
    scheduler = device("FIFO")
    assert add(scheduler, "a", 10, 10) == [Admit("a", 0, 1)]
    assert add(scheduler, "b", 10, 10) == []
    assert add(scheduler, "c", 10, 10) == []
    assert scheduler.waiting == ("b", "c")
    assert scheduler.handle(JobLeft("a")) == [Admit("b", 1, 2)]


def test_pack_opens_as_many_lanes_as_fit() -> None:
    scheduler = device("PACK")
    for lane, job in enumerate("abc"):
        assert add(scheduler, job, 10, 20) == [Admit(job, lane, lane + 1)]
    # A fourth lane does not fit; its P does, so it shares one.
    assert add(scheduler, "d", 10, 20) == [Admit("d", 0, 4)]
    assert scheduler.table.reserved == 100


def test_an_unknown_need_runs_alone_first() -> None:
    scheduler = device("FAIR")
    assert scheduler.handle(JobAdded("a", None)) == [Admit("a", 0, 1)]
    assert add(scheduler, "b", 10, 10) == []
    assert scheduler.handle(NeedFound("a", Need(20, 20))) == [Admit("b", 1, 2)]
    # And waits until it can.
    assert scheduler.handle(JobAdded("c", None)) == []
    assert scheduler.handle(JobLeft("a")) == []
    assert scheduler.handle(JobLeft("b")) == [Admit("c", 2, 3)]


def test_what_can_never_fit_is_refused() -> None:
    scheduler = device("FAIR")
    (refused,) = add(scheduler, "a", 60, 41)
    assert isinstance(refused, Refuse) and "smaller batch" in refused.reason
    assert scheduler.jobs == {}
    add(scheduler, "b", 10, 10)
    assert scheduler.handle(NeedFound("b", Need(99, 2))) == [Pause("b")]
    (refused,) = scheduler.handle(Paused("b"))
    assert isinstance(refused, Refuse)
    assert scheduler.table.reserved == 0


def test_a_large_job_is_passed_a_few_times_and_no_more() -> None:
    scheduler = device("FAIR")
    add(scheduler, "small", 10, 10)
    assert add(scheduler, "large", 90, 10) == []
    for index in range(20):
        told = add(scheduler, f"j{index}", 5, 5)
        assert bool(told) == (index < scheduler.policy.patience)
        if told:
            scheduler.handle(JobLeft(f"j{index}"))
    assert scheduler.handle(JobLeft("small"))[0] == Admit("large", 9, 10)


def test_srtf_makes_the_longest_leave_only_when_persistent_memory_does_not_fit() -> None:
    scheduler = device("SRTF")
    add(scheduler, "long", 30, 20, remaining=100)
    add(scheduler, "middle", 30, 20, remaining=50)
    # In the one lane its E takes nothing from the others: no one leaves.
    assert add(scheduler, "short", 10, 30, remaining=5) == [Admit("short", 0, 3)]
    assert add(scheduler, "shorter", 20, 10, remaining=4) == [Pause("long")]
    # What is on its way out is not asked twice, and what it frees is not given to others.
    assert add(scheduler, "longest", 1, 1, remaining=200) == []
    assert scheduler.handle(Paused("long")) == [Admit("shorter", 0, 4), Admit("longest", 0, 5)]
    assert scheduler.waiting == ("long",)
    assert scheduler.handle(JobLeft("middle")) == [Admit("long", 0, 6)]


def test_srtf_admits_what_fits_alone_whoever_is_there() -> None:
    scheduler = device("SRTF")
    add(scheduler, "a", 40, 20, remaining=100)
    add(scheduler, "b", 40, 20, remaining=90)
    assert set(add(scheduler, "c", 50, 50, remaining=10)) == {Pause("a"), Pause("b")}
    assert scheduler.handle(Paused("a")) == []
    assert scheduler.handle(JobLeft("b")) == [Admit("c", 1, 3)]
    assert add(scheduler, "unknown", 60, 40) == []


def test_hpt_lets_a_promoted_trial_take_the_place_of_one_left_behind() -> None:
    scheduler = device("HPT")
    add(scheduler, "a", 40, 20)
    assert add(scheduler, "b", 50, 20) == []
    assert scheduler.handle(Progress("b", None, rung=1)) == [Pause("a")]


# Memory that turns out different


def test_growing_in_place_moving_and_leaving() -> None:
    scheduler = device("PACK")
    add(scheduler, "a", 10, 20)
    add(scheduler, "b", 10, 40)
    assert scheduler.handle(NeedFound("a", Need(10, 30))) == []
    assert scheduler.table.lanes[0].size == 30
    scheduler.handle(Ready("a", 1))
    with pytest.raises(SalusError, match="within an iteration"):
        scheduler.handle(NeedFound("a", Need(10, 31)))
    scheduler.handle(IterationEnded("a", 1.0))
    assert scheduler.handle(NeedFound("a", Need(15, 45))) == [Move("a", 1)]
    assert scheduler.handle(NeedFound("a", Need(15, 80))) == [Pause("a")]
    with pytest.raises(StaleToken):
        scheduler.handle(Ready("a", 1))
    # Until it has left it holds what it held.
    assert scheduler.table.reserved == 70
    assert scheduler.handle(Paused("a")) == []
    assert scheduler.handle(JobLeft("b")) == [Admit("a", 2, 3)]


def test_shrinking_lets_others_in() -> None:
    scheduler = device("PACK")
    add(scheduler, "a", 40, 50)
    assert add(scheduler, "b", 20, 20) == []
    assert scheduler.handle(NeedFound("a", Need(30, 30))) == [Admit("b", 1, 2)]


# Turns


def test_one_iteration_at_a_time_in_a_lane() -> None:
    scheduler = device("SRTF")
    add(scheduler, "a", 10, 10, remaining=10)
    add(scheduler, "b", 10, 10, remaining=5)
    assert scheduler.handle(Ready("a", 1)) == [Run("a", 0)]
    assert scheduler.handle(Ready("b", 2)) == []
    # a would go on; b is shorter.
    assert scheduler.handle(IterationEnded("a", 1.0, again=True)) == [Run("b", 0)]
    assert scheduler.handle(IterationEnded("b", 1.0, again=True)) == [Run("b", 0)]
    assert scheduler.jobs["b"].standing.remaining == 4.0
    # Killed while it holds the lane: it is free at once.
    assert scheduler.handle(JobLeft("b")) == [Run("a", 0)]


def test_lanes_run_at_the_same_time() -> None:
    scheduler = device("PACK")
    add(scheduler, "a", 10, 10)
    add(scheduler, "b", 10, 10)
    assert scheduler.handle(Ready("a", 1)) == [Run("a", 0)]
    assert scheduler.handle(Ready("b", 2)) == [Run("b", 1)]
    assert running(scheduler) == ["a", "b"]


def running(scheduler: Scheduler) -> list[str]:
    return [job.name for job in scheduler.jobs.values() if job.status == "running"]


def fair_lane(*jobs: str) -> Scheduler:
    """A FAIR device with these jobs in one lane."""
    scheduler = device("FAIR")
    for job in jobs:
        assert add(scheduler, job, 1, 60) == [Admit(job, 0, len(scheduler.jobs))]
    return scheduler


def serve(scheduler: Scheduler, lengths: dict[str, float], iterations: int) -> dict[str, float]:
    """Seconds that each got, all always ready."""
    got = dict.fromkeys(lengths, 0.0)
    for job in lengths:
        if scheduler.jobs[job].status == "idle":
            scheduler.handle(Ready(job, scheduler.jobs[job].token))
    for _ in range(iterations):
        (job,) = running(scheduler)
        got[job] += lengths[job]
        scheduler.handle(IterationEnded(job, lengths[job], again=True))
    return got


def test_fair_gives_equal_service_whatever_an_iteration_takes() -> None:
    got = serve(fair_lane("a", "b", "c"), {"a": 0.1, "b": 1.0, "c": 0.37}, 1000)
    assert max(got.values()) - min(got.values()) <= 1.0


def test_fair_newcomers_share_at_once_and_do_not_catch_up() -> None:
    scheduler = fair_lane("a")
    serve(scheduler, {"a": 0.25}, 100)
    add(scheduler, "b", 1, 60)
    got = serve(scheduler, {"a": 0.25, "b": 0.25}, 20)
    assert abs(got["a"] - got["b"]) <= 0.25


def test_fair_owes_no_more_than_a_second_to_one_that_was_away() -> None:
    scheduler = fair_lane("a", "b")
    serve(scheduler, {"a": 0.25}, 400)
    got = serve(scheduler, {"a": 0.25, "b": 0.25}, 40)
    assert 0 < got["b"] - got["a"] <= 1.5


def test_hpt_prefers_the_promoted_and_is_fair_among_equals() -> None:
    scheduler = device("HPT")
    for job, rung in (("a", 0), ("b", 1), ("c", 1)):
        add(scheduler, job, 1, 60, rung=rung)
    scheduler.handle(Ready("a", 1))
    got = serve(scheduler, {"a": 1.0, "b": 1.0, "c": 1.0}, 101)
    assert got == {"a": 1.0, "b": 50.0, "c": 50.0}


# What cannot be


def test_old_tokens_are_refused() -> None:
    scheduler = device("SRTF")
    add(scheduler, "a", 50, 10, remaining=100)
    add(scheduler, "b", 60, 10, remaining=1)
    with pytest.raises(StaleToken, match="token 1"):
        scheduler.handle(Ready("a", 1))
    scheduler.handle(Paused("a"))
    with pytest.raises(StaleToken):
        scheduler.handle(Ready("a", 1))
    assert scheduler.handle(JobLeft("b")) == [Admit("a", 2, 3)]
    with pytest.raises(StaleToken):
        scheduler.handle(Ready("a", 1))
    assert scheduler.handle(Ready("a", 3)) == [Run("a", 2)]


@pytest.mark.parametrize("need", [Need(-1, 5), Need(5, -1), Need(float("nan"), 5), Need("5", 5)])
def test_needs_that_are_none(need) -> None:
    scheduler = device("FAIR")
    with pytest.raises(SalusError, match="expected bytes"):
        scheduler.handle(JobAdded("a", need))
    assert scheduler.jobs == {}
    add(scheduler, "b", 5, 5)
    with pytest.raises(SalusError, match="expected bytes"):
        scheduler.handle(NeedFound("b", need))
    assert scheduler.table.reserved == 10


def test_events_that_cannot_be_true() -> None:
    scheduler = device("FAIR")
    add(scheduler, "a", 5, 5)
    for event, why in (
        (JobAdded("a", None), "here already"),
        (JobAdded("b", None, remaining=-1.0), "remaining"),
        (Ready("b", 1), "not known"),
        (IterationEnded("a", 1.0), "is idle"),
        (object(), "not an event"),
    ):
        with pytest.raises(SalusError, match=why):
            scheduler.handle(event)
    scheduler.handle(Ready("a", 1))
    with pytest.raises(SalusError, match="already"):
        scheduler.handle(Ready("a", 1))
    with pytest.raises(SalusError, match="seconds >= 0"):
        scheduler.handle(IterationEnded("a", float("nan")))


# Found again


def test_restored_jobs_are_in_the_same_lanes_and_tokens_go_on() -> None:
    before = device("FAIR")
    for job in "abcd":
        add(before, job, 10, 20)
    places = dict(before.table.places)
    after = device("FAIR")
    jobs = before.jobs
    after.restore([Resident(j, place, jobs[j].token, jobs[j].standing) for j, place in places.items()], tokens=7)
    assert after.table.places == places
    assert after.table.lanes == before.table.lanes
    assert after.handle(Ready("a", 1)) == [Run("a", 0)]
    assert after.handle(JobLeft("b")) == []
    assert add(after, "e", 10, 20) == [Admit("e", 3, 8)]


def test_one_that_was_leaving_still_is_when_found_again() -> None:
    scheduler = device("SRTF")
    scheduler.restore([Resident("a", Place(0, 50, 10), 3, Standing(1), leaving=True)], tokens=3)
    with pytest.raises(StaleToken):
        scheduler.handle(Ready("a", 3))
    assert add(scheduler, "b", 60, 10, remaining=1.0) == []
    assert scheduler.handle(Paused("a")) == [Admit("b", 1, 4)]


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
