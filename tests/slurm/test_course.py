"""The course of a search in a job: its table, and what holds for whatever happens in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluidtune.slurm import course
from fluidtune.slurm.course import (
    AGAIN,
    AllEnded,
    Course,
    DriverEnded,
    EndAll,
    Event,
    Exit,
    Late,
    Lost,
    Noticed,
    Ready,
    Requeue,
    Say,
    StartDriver,
    StartMembers,
    TellDriver,
)

HEAD, N2, N3 = Ready("n1", "h:1"), Ready("n2", "h:1"), Ready("n3", "h:1")
NOTICE, EVERYBODY = Noticed(all_told=False), Noticed(all_told=True)


def taken(*events: Event, members: tuple[str, ...] = ("n2", "n3")) -> list[course.Instruction]:
    """What is done after these events."""
    job = Course("7", "n1", members)
    return [done for event in events for done in job.take(event)]


@pytest.mark.parametrize(
    "events, done",
    [
        ([HEAD, N2, N3], [StartMembers("h:1"), StartDriver("h:1")]),
        ([HEAD, N2, N3, NOTICE, NOTICE], [StartMembers("h:1"), StartDriver("h:1"), TellDriver()]),
        ([HEAD, N2, N3, EVERYBODY, NOTICE], [StartMembers("h:1"), StartDriver("h:1")]),
    ],
)
def test_in_order(events: list[Event], done: list[course.Instruction]) -> None:
    assert taken(*events) == done


@pytest.mark.parametrize(
    "events, status, again",
    [
        ([HEAD, DriverEnded(0)], 0, False),
        ([HEAD, DriverEnded(AGAIN)], AGAIN, True),
        ([HEAD, NOTICE, DriverEnded(AGAIN)], AGAIN, True),
        ([HEAD, DriverEnded(-9)], 137, False),
        ([HEAD, Lost("n1", "has ended (gcs_server)")], 1, False),
        ([Lost("n1", "does not start")], 1, False),
        ([NOTICE], 1, False),
    ],
)
def test_how_a_job_ends(events: list[Event], status: int, again: bool) -> None:
    done = taken(*events, AllEnded(), members=())
    assert done[-1] == Exit(status) and (Requeue() in done) is again and done.count(EndAll()) == 1


def test_a_node_that_does_not_come_is_named_and_not_waited_for() -> None:
    said = [done for done in taken(HEAD, Lost("n2", "does not start (status 1): no room"), Late(), N3)[1:]]
    assert isinstance(said[0], Say) and "job 7: Ray on node n2 does not start (status 1): no room" in said[0].line
    assert isinstance(said[1], Say) and "nodes n3 have not joined" in said[1].line
    assert said[2:] == [StartDriver("h:1")]


events = st.one_of(
    st.builds(Ready, st.sampled_from(["n1", "n2", "n3"]), st.just("h:1")),
    st.builds(Lost, st.sampled_from(["n1", "n2", "n3"]), st.just("has ended")),
    st.builds(Noticed, st.booleans()),
    st.builds(DriverEnded, st.sampled_from([0, 1, AGAIN, -9])),
    st.just(Late()),
    st.just(AllEnded()),
)


@given(st.lists(events, max_size=12))
def test_whatever_happens_a_job_ends_once_and_starts_its_driver_once(happening: list[Event]) -> None:
    done = taken(*happening)
    kinds = [type(each) for each in done]
    for kind in (StartMembers, StartDriver, TellDriver, EndAll, Requeue, Exit):
        assert kinds.count(kind) <= 1
    assert TellDriver not in kinds or StartDriver in kinds[: kinds.index(TellDriver)]
    if EndAll in kinds:
        assert {*kinds[kinds.index(EndAll) + 1 :]} <= {Requeue, Exit}
    if Exit in kinds:
        assert (Requeue in kinds) is (done[-1] == Exit(AGAIN)) and kinds[-1] is Exit
