"""Real gates and the twin are one turn machine: the same trace gives the same turns, charges and lingering."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.shared_device.twin import TwinJob, TwinSeats, simulate
from salus_share import Need, policy
from salus_share.policies import POLICIES
from salus_share.seat_table import SeatTable
from salus_share.turns import INSIDE
from tests.salus import on_a_clock
from tests.salus.processes import home

GB = 10**9
CAPACITY = 10 * GB

#: What one side does, in order: ("turn", job), ("linger", job) or ("charge", job, turn, service, remaining, seconds).
History = list[tuple[Any, ...]]
#: The methods by which `Turns` changes seats.
CHANGES = ("set_state", "set_counts", "record_iteration", "set_lingering")


@contextmanager
def recorded(seats: type[Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[History]:
    """The history of every change that `Turns` makes by way of these seats."""
    history: History = []

    def name(table: Any, key: Any) -> str:
        return table.seat(key).name if isinstance(table, SeatTable) else key

    with monkeypatch.context() as patched:
        before = {method: getattr(seats, method) for method in CHANGES}

        def set_state(table: Any, key: Any, state: int) -> None:
            if state == INSIDE != table.seat(key).state:
                history.append(("turn", name(table, key)))
            before["set_state"](table, key, state)

        def set_counts(table: Any, key: Any, counts: tuple[float, ...]) -> None:
            history.append(("charge", name(table, key), *counts))
            before["set_counts"](table, key, counts)

        def record_iteration(table: Any, key: Any, *done: float) -> None:
            before["record_iteration"](table, key, *done)
            history.append(("charge", name(table, key), *table.counts(key)))

        def set_lingering(table: Any, key: Any, until: float) -> None:
            history.append(("linger", name(table, key), until))
            before["set_lingering"](table, key, until)

        for changed in (set_state, set_counts, record_iteration, set_lingering):
            patched.setattr(seats, changed.__name__, changed)
        yield history


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """One device for all runs: a process keeps the lock of a device that it has seen."""
    with home() as made:
        yield made


def by_gates(jobs: list[TwinJob], name: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> History:
    with recorded(SeatTable, monkeypatch) as history, monkeypatch.context() as patched:
        on_a_clock.run(jobs, CAPACITY, name, directory, patched)
    return history


def by_twin(jobs: list[TwinJob], name: str, monkeypatch: pytest.MonkeyPatch) -> History:
    with recorded(TwinSeats, monkeypatch) as history:
        simulate(jobs, CAPACITY, policy(name))
    return history


def job(index: int, arrival: int, size: tuple[int, int], iterations: int, length: int, gap: int) -> TwinJob:
    """A job whose times are its own (a multiple of 2 ** -36 s that no other has), so that no two events coincide."""
    own = 64**index * 2.0**-36
    seconds, away = length / 64 + own, gap / 1024 + own if gap else 0.0
    # Iterations that run at the same time do not slow each other: that is the twin's model and not a turn.
    need = Need(size[0] * GB, size[1] * GB, 0.0)
    return TwinJob(f"j{index}", arrival / 8 + own, need, iterations, seconds, away)


SIZES = st.tuples(st.integers(0, 3), st.integers(1, 6))
#: Of each job: arrival (1/8 s), memory (GB), iterations, the length of one (1/64 s), the gap between two (1/1024 s).
ROW = st.tuples(st.integers(0, 24), SIZES, st.integers(1, 6), st.integers(1, 48), st.integers(0, 12))
JOBS = st.lists(ROW, max_size=5)


def same(jobs: list[TwinJob], name: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> History:
    """The history of a trace, after asserting that both sides have it."""
    real, modelled = by_gates(jobs, name, directory, monkeypatch), by_twin(jobs, name, monkeypatch)
    assert [row[:2] for row in real] == [row[:2] for row in modelled]
    for ours, theirs in zip(real, modelled, strict=True):
        assert ours[2:] == pytest.approx(theirs[2:], abs=1e-9)
    return real


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(POLICIES)), JOBS)
def test_gates_and_twin_have_the_same_turns_and_charges(directory, name, rows) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        same([job(index, *row) for index, row in enumerate(rows)], name, directory, monkeypatch)
