"""The course of a search in a job, and of a job in an array: tables, and what holds whatever happens in any order."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

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
from fluidtune.slurm.joined import Sibling, head, others

HEAD, N2, N3 = Ready("n1", "h:1"), Ready("n2", "h:1"), Ready("n3", "h:1")
CAME, NEXT = (Came("7_2", "8", ("n4",), start) for start in (5, 6))
NOTICE, DIED = Noticed(), Lost("n1", "has ended (gcs_server)")
JOINS, REJOINS = (Join("n4", "h:1", each) for each in (CAME, NEXT))
OUT, LEFT = Lost(JOINS.name, "is out"), Lost(JOINS.name, "leaves", leaves=True)
MEMBERS, DRIVER, HEADS = [Join("n2", "h:1"), Join("n3", "h:1")], Drive("h:1"), Drive("h:1", counted=False)


def taken(events: list[Event]) -> list[Instruction]:
    """What is done after these events in a job of three nodes; in one that others join if `CAME` is among them."""
    job = Course("7", "n1", ("n2", "n3"), joined=CAME in events)
    return [done for event in events for done in job.take(event)]


@pytest.mark.parametrize(
    "events, done",
    [
        ([HEAD, N2, N3, NOTICE, NOTICE, DriverEnded(AGAIN)], [*MEMBERS, DRIVER, TellDriver(), End(AGAIN)]),
        ([HEAD, N2, N3, DIED], [*MEMBERS, DRIVER, "Ray on node n1 has ended (gcs_server). Run the job again", End(1)]),
        ([HEAD, NOTICE], [*MEMBERS, "ends before its search has begun", End(1)]),
        ([HEAD, Lost("n2", "is out"), Late(), N3], [*MEMBERS, "node n2 is out", "nodes n3 join later", DRIVER]),
        ([CAME, HEAD, CAME, N2, CAME, N3, DriverEnded(1)], [*MEMBERS, JOINS, HEADS, End(1, others=True)]),
        ([HEAD, CAME, OUT, CAME, N2, N3, DriverEnded(AGAIN)], [*MEMBERS, JOINS, "is out", JOINS, HEADS, End(AGAIN)]),
        ([HEAD, CAME, LEFT, CAME, NEXT, N2, N3, DIED], [*MEMBERS, JOINS, "leaves", REJOINS, HEADS, "Another", End(1)]),
        ([HEAD, N2, N3, CAME, DriverEnded(-9)], [*MEMBERS, HEADS, JOINS, End(137)]),
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


@given(st.lists(events, max_size=12))
def test_whatever_happens_a_job_ends_once_and_starts_its_driver_once(happening: list[Event]) -> None:
    done = [each for each in taken(happening) if not isinstance(each, Say)]
    ends = [each for each in done if isinstance(each, End)]
    assert done == [each for each in (*MEMBERS, DRIVER, TellDriver(), *ends) if each in done] and len(ends) < 2


states = st.sampled_from(["RUNNING", "CONFIGURING", "COMPLETING", "PENDING"])
starts = st.lists(st.tuples(st.integers(5, 15), states), max_size=5)
#: Stands for Slurm's commands. The first call of each fails. A second after squeue has named the jobs, SENT comes.
SLURM = """#!/bin/bash
grep -qs "^${0##*/} " calls; new=$?
echo "${0##*/} ${!#}" >>calls
case $new,$* in
[12],*) exit 1 ;;
*-r*) printf "8|7_1|RUNNING|9|9:00|n1\\n9|7_2|RUNNING|10|9:00|n2\\n"; (sleep 1; kill -$SENT $PPID) >/dev/null 2>&1 & ;;
*-s*) if (($(grep -c scancel calls) < 2)); then echo 7_2.0; else echo 7_2.batch; fi ;;
*%T*) echo RUNNING ;;
esac
"""


@given(starts, starts)
def test_the_head_of_an_array_stays_the_head(first: list[tuple[int, str]], later: list[tuple[int, str]]) -> None:
    """No other job becomes it while it has nodes, nor while one ends. Only it ends the others."""
    told = [*enumerate(first, 1), *((n, (start + 11, state)) for n, (start, state) in enumerate(later, 9))]
    jobs = [Sibling(f"{n}", f"7_{n}", s, f"{at}", "5:00", "" if s == "PENDING" else "n1") for n, (at, s) in told]
    begun = [replace(each, state=each.state.replace("CONFIGURING", "RUNNING")) for each in jobs[::-1]]
    then, now = head(jobs[: len(first)]), head(begun)
    assert not then or now in (then, "")
    assert not now or [each.job for each in jobs if each.hosts and others(jobs, each.name) is not None] == [now]


@pytest.mark.parametrize("sent", ["USR1", "TERM"])
def test_a_job_that_is_not_the_head_leaves_it_and_is_requeued(sent: str, tmp_path: Path) -> None:
    """Seen: a call that failed ended it; every end of squeue had it call squeue again; SIGTERM ended it at once."""
    for name in ("squeue", "scancel", "scontrol"):
        (tmp_path / name).write_text(SLURM)
        (tmp_path / name).chmod(0o755)
    told = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_NODELIST": "n2"}
    own = {**os.environ, **told, "SENT": sent, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "-m", "fluidtune.slurm.joined", "s.py"], cwd=tmp_path, env=own)
    calls = (tmp_path / "calls").read_text().splitlines()
    asked = ["squeue %A|%i|%T|%S|%L|%N"] * 2 + ["squeue %i", "scancel 7_2"] * 2 + ["squeue %i", "squeue %T"]
    assert done.returncode == os.EX_TEMPFAIL and calls == [*asked, *["scontrol 7_2"] * 2]
