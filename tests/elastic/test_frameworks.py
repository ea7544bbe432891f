"""What a framework calls that owns its loop: the same in a rehearsal's turns and in groups of 1, 2 and 3 workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fluidtune import elastic
from fluidtune.elastic import ElasticSession
from fluidtune.elastic.checks.in_turns import InTurns, TurnBackend
from fluidtune.elastic.checks.rehearsal import rehearse
from fluidtune.elastic.errors import CannotDivide
from tests.contracts.processes import PeerProcess, peer_processes, until

from . import framework_trials, groups, trials
from .driving import Driver, run


def expected(rank: int, width: int) -> dict[str, Any]:
    """What `framework_trials.everything` must give there, by hand."""
    total = float(sum(range(1, width + 1)))
    return {
        "rank": rank,
        "width": width,
        "reduced": {
            "sum": [[total, -2 * total]],
            "mean": [[total / width, -2 * total / width]],
            "min": [[1.0, -2.0 * width]],
            "max": [[1.0 * width, -2.0]],
        },
        "integers": [torch.tensor(int(total)), torch.tensor(total / width), torch.tensor(width)],
        "gathered": [[[1.0 * (r + 1), -2.0 * (r + 1)]] for r in range(width)],
        "flags": [[r == 0, True] for r in range(width)],
        "columns": [[[r, 3 + r], [1 + r, 4 + r], [2 + r, 5 + r]] for r in range(width)],
        "heard": {"from": 0},
        "agreed": [width == 1, True, True, True, False, False],
        "scalar": False,
    }


def in_turns(width: int, fn: Any) -> list[Any]:
    """``fn()`` as each of ``width`` workers of a trial, in this process."""
    turns = InTurns(width)

    def play(rank: int) -> Any:
        backend = TurnBackend(turns, rank, "cpu")
        session = ElasticSession(trial="t", worker=f"w{rank}", leader=rank == 0, backend=backend)
        with turns.as_session(session):
            return fn()

    return turns.run(play)


def test_without_a_session_they_give_what_one_process_needs() -> None:
    assert framework_trials.everything() == expected(0, 1)
    assert [elastic.boundary(epoch, 3) for epoch in range(4)] == [0, 1, 2, 3]
    elastic.one_worker("it has one")


@pytest.mark.parametrize("width", [1, 2, 3])
def test_each_worker_of_a_rehearsal_gets_the_same(width: int) -> None:
    assert in_turns(width, framework_trials.everything) == [expected(rank, width) for rank in range(width)]


def test_a_word_that_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match="op='median'"):
        elastic.reduce(torch.zeros(1), "median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="by='most'"):
        elastic.agreed(True, "most")  # type: ignore[arg-type]


def test_workers_that_call_different_functions_are_told() -> None:
    def apart() -> None:
        if elastic.rank() == 0:
            elastic.barrier()
        else:
            elastic.agreed(True)

    with pytest.raises(CannotDivide, match="and worker 0 does not"):
        in_turns(2, apart)


def test_a_rehearsal_ends_at_the_second_boundary(one_thread: None) -> None:
    reports: list[float] = []
    assert rehearse(lambda: framework_trials.owned({}, reports.append)).kind == "same"
    assert len(reports) <= 3  # of each run one at most


@pytest.fixture(scope="module")
def pool() -> Iterator[list[PeerProcess]]:
    with peer_processes(3) as processes:
        yield processes


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 2, 3])
def test_each_worker_of_a_group_gets_the_same(pool: list[PeerProcess], width: int) -> None:
    given = groups.on_all(pool[:width], framework_trials.everything)
    assert given == [expected(rank, width) for rank in range(width)]


KINDS = ("bool", "uint8", "int16", "uint16", "int32", "float16", "bfloat16", "float8_e4m3fn", "complex64")


def of_every_type() -> dict[str, list[Any]]:
    """What a rank's 1 or 0 becomes in each type, by `elastic.reduce` and `elastic.gather`."""
    found: dict[str, list[Any]] = {}
    for name in KINDS:
        one = torch.tensor(1 - elastic.rank(), dtype=torch.int32).to(getattr(torch, name))
        ways = [elastic.reduce(one)] + ([] if name == "complex64" else [elastic.reduce(one, "max")])
        assert all(each.dtype == one.dtype for each in ways)
        rows = elastic.gather(one)
        found[name] = [*(float(each.real) for each in ways), rows.real.float().tolist()]
    return found


@pytest.mark.slow
def test_tensors_of_every_type_are_reduced_and_gathered(pool: list[PeerProcess]) -> None:
    for found in groups.on_all(pool[:2], of_every_type):
        for name in KINDS:
            assert found[name] == [1.0] * (len(found[name]) - 1) + [[1.0, 0.0]], name


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 2, 2), (1, 2, 1), (2, 3, 1), (1, 1, 2)])
def test_a_loop_with_boundaries_has_the_results_of_one_with_epochs(
    pool: list[PeerProcess], widths: tuple[int, ...]
) -> None:
    expected, _ = trials.plain(trials.mlp, {})
    reports, endings = run(pool, framework_trials.owned, {}, widths)
    assert reports == pytest.approx(expected, rel=1e-5)
    had = [(0, epoch, width) for epoch, width in enumerate((1, *widths))]
    assert endings[0]["ran"] == had
    for number, ending in enumerate(endings[1:], start=1):
        assert ending["ran"] == [entry for entry in had if entry[2] > number]


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 2, 2), (1, 2, 1), (3, 2, 3)])
def test_a_loop_that_says_what_it_works_on_may_fetch_ahead(pool: list[PeerProcess], widths: tuple[int, ...]) -> None:
    expected, ending = trials.plain(framework_trials.ahead, {})
    reports, endings = run(pool, framework_trials.ahead, {}, widths)
    assert reports == pytest.approx(expected, rel=1e-5)
    for ours in endings:
        for name, value in ending.items():
            assert name == "divided" or torch.allclose(ours[name], value, rtol=1e-4, atol=1e-6), name
    if widths[0] == 2:  # after the batches that are compared, in the same epoch
        assert endings[0]["divided"] == [False] * 12 + [True] * 4 + 2 * ([False] * 2 + [True] * 6)


@pytest.mark.slow
def test_a_worker_that_joins_the_second_loop_runs_no_epoch_of_the_first(pool: list[PeerProcess]) -> None:
    config = {"loops": 2, "stop": 2}
    expected, _ = trials.plain(framework_trials.owned, config)
    reports, endings = run(pool, framework_trials.owned, config, (1, 1, 2))
    assert reports == pytest.approx(expected, rel=1e-5)
    assert endings[1]["ran"] == [(1, 1, 2)]


@pytest.mark.slow
def test_a_loop_that_ends_early_has_a_last_boundary(pool: list[PeerProcess]) -> None:
    config = {"early": 2}
    expected, _ = trials.plain(framework_trials.owned, config)
    reports, endings = run(pool, framework_trials.owned, config, (2,))
    assert reports == pytest.approx(expected, rel=1e-5) and len(reports) == 2
    assert endings[1]["ran"] == [(0, 1, 2)]


@pytest.mark.slow
def test_a_restarted_loop_goes_on_from_its_commit(pool: list[PeerProcess], tmp_path: Any) -> None:
    config = {"commits": str(tmp_path)}
    expected, _ = trials.plain(framework_trials.owned, config)
    driver = Driver(pool, framework_trials.owned, config)
    driver.turn(1)
    pool[0].call(trials.allow)
    driver.turn(2)
    pool[0].call(trials.leave)
    pool[0].call(trials.allow)
    assert pool[0].call(trials.outcome)[0] == "left"
    reports, endings = run(pool, framework_trials.owned, config, (2,))
    assert reports == pytest.approx(expected[2:], rel=1e-5)
    assert endings[0]["ran"] == [(0, 2, 1), (0, 3, 2)]


@pytest.mark.slow
def test_a_loop_inside_epochs_stays_at_one_worker_and_says_why(pool: list[PeerProcess]) -> None:
    driver = Driver(pool, framework_trials.inside, {"stop": 3})
    driver.turn(1)
    pool[0].call(trials.allow, 3)
    assert pool[0].call(trials.outcome)[0] == "returned"
    assert "inside elastic.epochs()" in pool[0].call(trials.refused)[1]


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 2])
def test_a_trial_that_must_have_one_worker_says_why(pool: list[PeerProcess], at: int) -> None:
    driver = Driver(pool, framework_trials.refusing, {"stop": 4, "at": at})
    driver.turn(1)
    if at:
        driver.resize(2)
        pool[0].call(trials.allow, 4)
        ends = [worker.call(trials.outcome) for worker in pool[:2]]
        assert [kind for kind, _ in ends] == ["lost", "lost"]
        assert all("its layers are on several devices" in text for _, text in ends)
    else:
        pool[0].call(trials.allow, 4)
        assert pool[0].call(trials.outcome)[0] == "returned"
        assert pool[0].call(trials.refused)[1] == "its layers are on several devices"
    until(lambda: pool[0].call(trials.outcome)[0] != "runs")
