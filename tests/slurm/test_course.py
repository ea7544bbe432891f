"""The course of a search in a job: its table, and what holds for whatever happens in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluidtune.slurm.course import (
    AGAIN,
    Came,
    Course,
    Drive,
    DriverEnded,
    End,
    EndOthers,
    Event,
    Instruction,
    Join,
    Late,
    Lost,
    Noticed,
    Ready,
    Say,
    TellDriver,
)
from fluidtune.slurm.joined import head, siblings

HEAD, N2, N3 = Ready("n1", "h:1"), Ready("n2", "h:1"), Ready("n3", "h:1")
CAME = Came("7_2", "8", ("n4",))
NOTICE, DIED = Noticed(), Lost("n1", "has ended (gcs_server)")
JOINS = Join("n4", "h:1", CAME)
MEMBERS, DRIVER = [Join("n2", "h:1"), Join("n3", "h:1")], Drive("h:1")


def taken(events: list[Event]) -> list[Instruction]:
    """What is done after these events in a job of three nodes; in one that others join if `CAME` is among them."""
    job = Course("7", "n1", ("n2", "n3"), joined=CAME in events)
    return [done for event in events for done in job.take(event)]


@pytest.mark.parametrize(
    "events, done",
    [
        ([HEAD, N2, N3, NOTICE, NOTICE], [*MEMBERS, DRIVER, TellDriver()]),
        ([HEAD, N2, N3, NOTICE, DriverEnded(AGAIN)], [*MEMBERS, DRIVER, TellDriver(), End(AGAIN)]),
        ([HEAD, N2, N3, DriverEnded(-9)], [*MEMBERS, DRIVER, End(137)]),
        (
            [HEAD, N2, N3, DIED, N2],
            [*MEMBERS, DRIVER, "Ray on node n1 has ended (gcs_server). Run the job again", End(1)],
        ),
        ([HEAD, NOTICE], [*MEMBERS, "ends before its search has begun", End(1)]),
        (
            [HEAD, Lost("n2", "is out"), Lost("n2", "is out"), Late(), N3],
            [*MEMBERS, "node n2 is out", "nodes n3 join later", DRIVER],
        ),
        ([CAME, HEAD, N2, N3, DriverEnded(1)], [*MEMBERS, JOINS, DRIVER, EndOthers(), End(1)]),
        ([HEAD, CAME, N2, N3, DriverEnded(AGAIN)], [*MEMBERS, JOINS, DRIVER, End(AGAIN)]),
        ([CAME, NOTICE], [End(AGAIN)]),
    ],
)
def test_what_is_done_when(events: list[Event], done: list[Instruction | str]) -> None:
    for found, expected in zip(taken(events), done, strict=True):
        assert expected in found.line if isinstance(found, Say) else found == expected  # type: ignore[operator]


events = st.one_of(
    st.builds(Ready, st.sampled_from(["n1", "n2", "n3"]), st.just("h:1")),
    st.builds(Lost, st.sampled_from(["n1", "n2", "n3"]), st.just("has ended")),
    st.builds(DriverEnded, st.sampled_from([0, 1, AGAIN, -9])),
    st.sampled_from([NOTICE, Late()]),
)


starts = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["RUNNING", "COMPLETING", "PENDING"])), max_size=5)


@given(starts, starts)
def test_the_head_of_an_array_stays_the_head(first: list[tuple[int, str]], later: list[tuple[int, str]]) -> None:
    before = [f"{n}|7_{n}|{state}|2026-01-01T00:00:0{at}|5:00|n1\n" for n, (at, state) in enumerate(first, 1)]
    after = [f"{n}|7_{n}|{state}|2026-01-01T00:00:0{at + 4}|5:00|n1\n" for n, (at, state) in enumerate(later, 9)]
    now = head(siblings("".join(before)))
    assert not now or now == head(siblings("".join(after + before)))


@given(st.lists(events, max_size=12))
def test_whatever_happens_a_job_ends_once_and_starts_its_driver_once(happening: list[Event]) -> None:
    done = [each for each in taken(happening) if not isinstance(each, Say)]
    ends = [each for each in done if isinstance(each, End)]
    assert done == [each for each in (*MEMBERS, DRIVER, TellDriver(), *ends) if each in done] and len(ends) < 2
