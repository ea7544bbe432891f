"""What lies to the arbiter change: rho is its own count, so that false reports of it are not believed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.shared_cluster.apps import Spec, TwinApp
from benchmarks.shared_cluster.liars import TRUTH, Liar, Lie
from benchmarks.shared_cluster.simulate import Setup, Simulation
from benchmarks.shared_cluster.workloads import TESTBED_64, machines, tuning_apps
from tests.themis.cluster import claim
from themis_bridge import JobInfo
from themis_bridge import messages as m
from themis_bridge.app_record import MOST_WRONG, PLACEMENT_POWER, WORK_POWER, AppRecord
from themis_bridge.locality import Gpu
from themis_bridge.messages import MOST_GPUS
from themis_bridge.plain import MOST_NUMBER

#: Two GPUs of one machine, by the tokens of their leases.
HERE = {1: Gpu("g", "m"), 2: Gpu("h", "m")}


def rhos(lie: Lie, reports: int, held: int = 1) -> list[float]:
    """An app's rho by the arbiter at each of its reports, one a minute, on ``held`` of the two GPUs that it can use."""
    app, book = TwinApp(Spec("a", 0.0, [[JobInfo(10000, 1.0, 2)]])), AppRecord("s", 0.0, 0.0)
    agent, leases = Liar("a", "s", app, "", lie), dict(list(HERE.items())[:held])
    for gpu in leases.values():
        app.gain_gpu(gpu)
    found = []
    for number in range(1, 1 + reports):
        app.advance(60.0 * number)
        book.take_report(agent.heartbeat().report, leases, 2, 60.0 * number, 2.0)
        book.serve(60.0, held)
        assert book.rho is not None
        found.append(book.rho)
    return found


def test_t_id_is_the_arbiters_own() -> None:
    # Twenty seconds of work were done when it first reports, on one of two GPUs of which it has one as its share.
    assert rhos(TRUTH, 1) == [pytest.approx((60 + 9980) / 9980)]
    assert rhos(Lie(done=0.25), 5) == rhos(TRUTH, 5)


@pytest.mark.parametrize("held", [1, 2])
@pytest.mark.parametrize("lie", [Lie(behind=3.0), Lie(always=1e9)])
def test_who_claims_more_work_than_he_has_is_no_further_behind(lie: Lie, held: int) -> None:
    for told, true in zip(rhos(lie, 5, held), rhos(TRUTH, 5, held), strict=True):
        assert told < true * 1.01


def test_a_smaller_demand_than_it_uses_is_not_believed() -> None:
    book = AppRecord("s", 0.0, 0.0)
    book.take_report(claim(100.0, width=1), HERE, 2, 0.0, 2.0)
    # It counts as one that can use the two GPUs that it holds, and its share is one.
    assert book.rho == pytest.approx(0.5)


NUMBERS = st.one_of(st.floats(0, MOST_NUMBER), st.sampled_from([0.0, 5e-324, 1e-300, 1.0, MOST_NUMBER]))
REPORTS = st.one_of(
    st.builds(claim, NUMBERS, NUMBERS, st.integers(1, MOST_GPUS), st.floats(1, MOST_NUMBER)),
    st.builds(lambda wanted: m.Report(endless=wanted), st.integers(1, MOST_GPUS)),
)


@settings(deadline=None)
@given(st.lists(st.tuples(REPORTS, st.integers(0, 2), st.floats(0, 1e9)), min_size=1, max_size=6))
def test_whatever_a_report_says_numbers_follow_from_it(told: list[tuple[m.Report, int, float]]) -> None:
    book, now = AppRecord("s", 0.0, 0.0), 0.0
    for report, held, seconds in told:
        now += seconds
        book.serve(seconds, held)
        plain = m.plain_heartbeat(m.Heartbeat("a", "s", 1, report)).report
        book.take_report(plain, dict(list(HERE.items())[:held]), 2, now, 1.5)
        numbers = (book.rho, book.best, book.served, book.speed, book.distrust, *book.held_up, *book.free)
        assert all(map(math.isfinite, numbers)) and min(book.rho or 0.0, book.best) >= 0
        assert 1.0 <= book.distrust <= MOST_WRONG ** (WORK_POWER + PLACEMENT_POWER)
        assert book.worth(plain, held, 2, now, 1.5).rho(HERE.values()) >= 0
    assert all(map(math.isfinite, book.leave()))


def test_who_says_now_and_then_that_it_never_ends_is_doubted_all_the_same() -> None:
    book = AppRecord("s", 0.0, 0.0)
    for minute in range(8):  # It has always a minute of work left, and claims each time that this is all.
        book.take_report(m.Report(endless=2) if minute % 2 else claim(120.0), HERE, 2, 60.0 * minute, 1.0)
        book.serve(60.0, 2)
    assert book.served == 420.0 and book.leave()[0] > 100


def test_gpus_that_change_hands_raise_no_doubt() -> None:
    # Apps of a few minutes: moving to GPUs is a large part of their lives.
    run = Simulation(tuning_apps(8, 8, days=0.02, between_s=150.0), machines(TESTBED_64)[:8], Setup())
    run.run()
    assert run.doubted == 1.0


def test_gpus_that_are_gained_and_slow_raise_no_doubt() -> None:
    book = AppRecord("s", 0.0, 0.0)
    four = {number: Gpu(f"g{number}", "m") for number in range(4)}
    # It has 4,000 GPU seconds of work for up to 40 GPUs, and holds four on one machine.
    book.take_report(claim(4000.0, width=40, across=2.0), four, 40, 0.0, 1.0)
    assert book.speed == 1.0
    # Then it gets sixteen more on other machines, where it is half as fast. It reports again after 300 s.
    book.serve(300.0, 20)
    far = {number: Gpu(f"g{number}", f"m{number}") for number in range(4, 20)}
    book.take_report(claim(1000.0, 3000.0, width=40, across=2.0), four | far, 40, 300.0, 1.0)
    assert book.speed == 0.5
    assert (book.served, book.doubt) == (75.0, 1.0)
