"""What lies to the arbiter change: rho is its own count, so that false reports of it are not believed."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest

from benchmarks.shared_cluster.apps import Spec, TwinApp
from benchmarks.shared_cluster.liars import TRUTH, Liar, Lie, come_back, split
from benchmarks.shared_cluster.simulate import Setup, Simulation, simulate
from benchmarks.shared_cluster.workloads import TESTBED_64, machines, tuning_apps
from themis_bridge import Bid, JobInfo, ThemisError
from themis_bridge import messages as m
from themis_bridge.app_record import MOST_SLOWDOWN, MOST_WRONG, PLACEMENT_POWER, WORK_POWER, AppRecord
from themis_bridge.locality import Gpu

HERE = [Gpu("g", "m"), Gpu("h", "m")]


def rhos(lie: Lie, reports: int, held: int = 1) -> list[float]:
    """An app's rho by the arbiter at each of its reports, one a minute, on ``held`` of the two GPUs that it can use."""
    app, book = TwinApp(Spec("a", 0.0, [[JobInfo(10000, 1.0, 2)]])), AppRecord("s", 0.0, 0.0)
    agent = Liar("a", "s", app, "", lie)
    for gpu in HERE[:held]:
        app.gain_gpu(gpu)
    views = tuple(m.LeaseView(gpu, number, 1e6) for number, gpu in enumerate(HERE[:held], 1))
    agent.handle(m.Leases("a", "s", (0, 1), views))
    found = []
    for number in range(1, 1 + reports):
        now = 60.0 * number
        app.advance(now)
        ((answer,), _) = agent.handle(m.AskRho("a", "s", number, 2.0, 2))
        assert isinstance(answer, m.RhoAnswer)
        book.take_report(answer.report, [view.token for view in views], 2, now, 2.0)
        book.serve(60.0, held)
        assert book.rho is not None
        found.append(book.rho)
    return found


def test_t_id_is_the_arbiters_own() -> None:
    # Twenty seconds of work were done when it first reports, on one of two GPUs of which it has one as its share.
    assert rhos(TRUTH, 1) == [pytest.approx((60 + 9980) / 9980)]
    assert rhos(Lie(shorter=4.0), 5) == rhos(TRUTH, 5)


def test_who_says_that_it_is_far_behind_is_believed_only_until_its_end_comes_closer_too_fast() -> None:
    told, true = rhos(Lie(behind=3.0), 5, held=2), rhos(TRUTH, 5, held=2)
    assert told[0] < true[0] * MOST_SLOWDOWN * 1.01
    assert told[2:] == pytest.approx(true[2:], rel=0.05)


def test_an_elapsed_time_that_is_too_long_is_not_believed() -> None:
    book = AppRecord("s", 0.0, 0.0)
    report = m.Report(100.0, 2, left=100.0, whole=100.0, fair=100.0, ends=100.0, demand=2)
    book.take_report(report, [1, 2], 2, 50.0, 1.0)
    assert book.rho == pytest.approx(1.5)
    # Without `ends`, as an agent of an earlier version reports, rho and T_id say when it ends.
    old = AppRecord("s", 0.0, 0.0)
    old.take_report(replace(report, rho=1.5, ends=None), [1, 2], 2, 50.0, 1.0)
    assert old.rho == pytest.approx(1.5)


def test_a_smaller_demand_than_it_uses_is_not_believed() -> None:
    book = AppRecord("s", 0.0, 0.0)
    book.take_report(m.Report(1.0, 2, left=100.0, whole=100.0, fair=100.0, ends=100.0, demand=1), [1, 2], 2, 0.0, 2.0)
    # Its share is one GPU, on which it takes twice as long as on the two that it has.
    assert book.rho == pytest.approx(0.5)


def test_a_bid_is_believed_row_by_row_as_far_as_a_report() -> None:
    book = AppRecord("s", 0.0, 0.0)
    report = m.Report(1.5, 2, left=100.0, whole=100.0, fair=200.0, ends=200.0, demand=2)
    book.take_report(report, [1], 4, 100.0, 2.0)
    none, one = frozenset[str](), frozenset({"g"})
    # It keeps one GPU. With that it would end in 200 s, and with two in 100 s. Its share is two GPUs: T_id is 100 s.
    honest = Bid("a", {none: 1.5, one: 1.0})
    assert book.own_bid(honest, report, 1, 4, 100.0, 2.0).rho == pytest.approx({none: 3.0, one: 2.0})
    # It claims that without the second GPU it would take a hundred times as long. Believed is MOST_SLOWDOWN.
    liar = Bid("a", {none: 100.5, one: 1.0})
    most = (100.0 + MOST_SLOWDOWN * 200.0) / 100.0
    assert book.own_bid(liar, report, 1, 4, 100.0, 2.0).rho == pytest.approx({none: most, one: 2.0})
    # A T_id that is too short, or a time that is too long, changes no row.
    shorter, longer = replace(report, rho=6.0, fair=50.0), replace(report, rho=3.0)
    for told, rows in ((shorter, {none: 6.0, one: 4.0}), (longer, {none: 3.0, one: 2.5})):
        assert book.own_bid(Bid("a", rows), told, 1, 4, 100.0, 2.0).rho == pytest.approx({none: 3.0, one: 2.0})


@pytest.mark.parametrize("least", [1e-300, 1e-20, 5e-324])
@pytest.mark.parametrize("whole", [1.0, 1e308])
def test_who_claims_next_to_no_work_is_doubted_most(least: float, whole: float) -> None:
    book, ends = AppRecord("s", 0.0, 0.0), 1e308
    for minute in range(6):
        report = m.Report(1e308, 2, left=least, whole=whole, leases=(1, 2), ends=ends, fair=least, demand=2)
        book.take_report(report, [1, 2], 2, 60.0 * minute, 1.0)
        book.serve(60.0, 2)
        ends = least if minute > 3 else ends
    assert MOST_WRONG**WORK_POWER <= book.distrust <= MOST_WRONG ** (WORK_POWER + PLACEMENT_POWER)
    book.leave()


@pytest.mark.parametrize(
    "figures",
    [
        {"rho": 1e200, "fair": 1e200, "ends": None},
        {"rho": 1e200, "fair": 1e200, "ends": None, "left": 1e308},
        {"left": 5e-324, "whole": 5e-324, "ends": 5e-324},
        {"whole": 5e-324},
        {"ends": -1e308},
    ],
)
def test_a_report_from_which_no_numbers_follow_is_noted_whole_or_not_at_all(figures) -> None:
    book = AppRecord("s", 0.0, 0.0)
    honest = m.Report(1.0, 2, left=6000.0, whole=6000.0, leases=(1, 2), ends=6000.0, fair=6000.0, demand=2)
    book.take_report(replace(honest, ends=1e308), [1, 2], 2, 0.0, 1.0)
    book.spent = book.idle = 0.0
    before = asdict(book)
    with pytest.raises(ThemisError, match="too large or too small"):
        for elapsed in (60.0, 120.0):
            book.take_report(replace(honest, **figures), [1, 2], 2, elapsed, 1.0)
            before = asdict(book)
    assert asdict(book) == before
    assert all(map(math.isfinite, (*book.held_up, *book.free, book.least, book.doubt)))


def test_who_says_now_and_then_that_it_never_ends_is_doubted_all_the_same() -> None:
    book = AppRecord("s", 0.0, 0.0)
    claim = m.Report(1.0, 2, left=60.0, whole=60.0, leases=(1, 2), ends=60.0, fair=60.0, demand=2)
    for minute in range(8):  # It has always a minute of work left, and claims each time that this is all.
        report = m.Report(1.0, 2, endless=True) if minute % 2 else claim
        book.take_report(report, [1, 2], 2, 60.0 * minute, 1.0)
        book.serve(60.0, 2)
    assert book.served == 420.0 and book.leave()[0] > 100


def test_gpus_that_change_hands_raise_no_doubt() -> None:
    # Apps of a few minutes: moving to GPUs is a large part of their lives.
    run = Simulation(tuning_apps(8, 8, days=0.02, between_s=150.0), machines(TESTBED_64)[:8], Setup())
    run.run()
    assert run.doubted == 1.0


def test_gpus_that_are_gained_and_slow_raise_no_doubt() -> None:
    book = AppRecord("s", 0.0, 0.0)
    # It has 4,000 GPU seconds of work for up to 40 GPUs, and holds four on one machine.
    book.take_report(m.Report(1.0, 40, left=100.0, whole=100.0, leases=(1,), ends=1000.0), range(4), 40, 0.0, 1.0)
    assert book.speed == 1.0
    # Then it gets sixteen more on other machines, where it is half as fast. It reports again after 300 s.
    book.serve(300.0, 20)
    left = 100.0 - 300.0 * 20 / 40 / 2
    book.take_report(m.Report(1.0, 40, left=left, whole=100.0, leases=(2,), ends=4 * left), range(20), 40, 300.0, 1.0)
    assert book.speed == 0.5
    assert (book.served, book.doubt) == (75.0, 1.0)


def test_the_parts_of_an_app_have_its_work() -> None:
    for spec in tuning_apps(6, 3):
        for parts in (split(spec), come_back(spec)):
            assert sum(part.budget for part in parts) == pytest.approx(spec.budget)
            assert {part.user for part in parts} == {spec.name}


def test_an_app_that_comes_back_arrives_when_it_has_left() -> None:
    spec = Spec("a", 100.0, [[JobInfo(4000, 1.0, 4)]])
    run = simulate(come_back(spec), machines(((1, 4, 1),)), Setup())
    assert list(run.jct.values()) == [pytest.approx(290)] * 4
    assert run.makespan == pytest.approx(4 * 290)
