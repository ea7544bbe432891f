"""The twin: whole workloads on the virtual clock."""

from __future__ import annotations

import pytest

from benchmarks.shared_cluster.apps import SWITCH_S, Spec, TwinApp
from benchmarks.shared_cluster.baselines import BASELINES
from benchmarks.shared_cluster.simulate import Setup, simulate
from benchmarks.shared_cluster.workloads import TESTBED_64, machines, tuning_apps
from tests.themis.cluster import claim
from themis_bridge import JobInfo
from themis_bridge.app_record import WORK_POWER, WORK_SLACK, AppRecord
from themis_bridge.locality import Gpu


def app(name: str, *phases: int) -> Spec:
    """An app with one single-GPU job in each phase. ``phases``: seconds of each."""
    return Spec(name, 0.0, [[JobInfo(seconds, 1.0)] for seconds in phases])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("policy", ["themis", "paper", *BASELINES])
def test_apps_that_end_at_the_same_moment_all_end(policy: str) -> None:
    # The end of the first app starts a round, in which the other two are found to have ended, too.
    gpus = [Gpu(f"g{i}", f"m{i}") for i in range(3)]
    run = simulate([app("a", 500, 500), app("b", 500, 500), app("c", 1000)], gpus, Setup(policy=policy))
    # Under some policies the apps change places, which costs time.
    assert run.jct.keys() == {"a", "b", "c"}
    assert all(1000 + SWITCH_S - 1e-6 <= jct <= 1000 + 5 * SWITCH_S for jct in run.jct.values())


def test_an_app_that_claims_less_work_than_it_has_is_found_out() -> None:
    found, here = {}, {1: Gpu("g", "m"), 2: Gpu("h", "m")}
    for part in (0.5, 1.0):
        book = AppRecord("s", 0.0, 0.0)
        for _ in range(100):
            # It holds both GPUs of a cluster of its own, and does 1 % of its 1,000 s between two reports.
            left = (1000.0 - book.served) * part
            book.take_report(claim(2 * left, 2 * (1000.0 * part - left)), here, 2, book.served, 1.0)
            book.served += 10.0 * book.speed
        found[part] = book.doubt
    assert found[1.0] == 1.0
    assert found[0.5] == pytest.approx((1.99 / WORK_SLACK) ** WORK_POWER)


def doubted(lie: float, error: float, *places: list[Gpu]) -> float:
    """The arbiter's doubt about an app of one job of two GPUs that spends ten minutes in each of the places in turn."""
    spec = Spec("a", 0.0, [[JobInfo(10000, 1.0, 2)]], (1.3, 1.6))
    app, book = TwinApp(spec, error=error, lie=lie), AppRecord("s", 0.0, 0.0)
    for number, place in enumerate(places, 1):
        for gpu in list(app.held):
            app.lose_gpu(gpu)
        for gpu in place:
            app.gain_gpu(gpu)
        leases = {10 * number + i: gpu for i, gpu in enumerate(place)}
        # The first report comes when the switch to the GPUs is over.
        for now in range(600 * number - 500, 600 * number, 60):
            app.advance(float(now))
            book.take_report(app.report(), leases, 2, float(now), 1.0)
    return book.doubt


TOGETHER = [Gpu("g", "m"), Gpu("h", "m")]
APART = [Gpu("g", "m"), Gpu("i", "n", "r")]


@pytest.mark.parametrize("places", [[APART], [TOGETHER, APART], [APART, TOGETHER]])
@pytest.mark.parametrize("lie", [0.1, 0.2])
def test_an_app_that_overstates_what_placements_cost_it_is_found_out(places: list[list[Gpu]], lie: float) -> None:
    assert doubted(lie, 1.0, *places) == pytest.approx((1 + lie) ** 2)


@pytest.mark.parametrize("places", [[APART], [TOGETHER], [TOGETHER, APART], [APART, TOGETHER]])
def test_an_honest_app_is_not_doubted(places: list[list[Gpu]]) -> None:
    assert doubted(0.0, 1.0, *places) == 1.0
    # An app that errs about its work is slower or faster than it says on all GPUs alike.
    if TOGETHER in places:
        assert doubted(0.0, 1.1, *places) == 1.0


@pytest.mark.slow
def test_nobody_starves_where_apps_outnumber_gpus() -> None:
    # Two apps bid for two GPUs and pay with all that they win. When leftovers went by work left, it was 17.6.
    apps = tuning_apps(30, 2, days=0.1, between_s=240.0)
    assert simulate(apps, machines(TESTBED_64)[:16], Setup()).worst < 2.5
