"""What the engine could use beyond what its trials hold. Pure."""

from __future__ import annotations

from fluidtune.engine import DeviceDemand, with_arrivals
from fluidtune.engine import messages as m
from tests.engine.helpers import Bench, elastic, plain, resize, suspend


def growing(**settings: int) -> Bench:
    """A trial that can grow, measured on the only device."""
    bench = Bench(1, **settings)
    bench(elastic("a"))
    assert bench.engine.demand(8).growing == 0, "nothing is known of it"
    bench.results("a", 10.0, 4)
    return bench


def test_a_trial_that_must_keep_to_one_worker_is_no_demand() -> None:
    # Seen: a job on demand kept one device more than it could use for each such trial.
    bench = growing()
    assert bench.engine.demand(8).growing == 1 and bench.engine.demand(0).growing == 0
    bench(m.GrowthEnded("a", stays=True))
    assert bench.engine.demand(8) == DeviceDemand()
    assert bench(m.DeviceGained(1)) == []


def test_what_the_demand_says_is_what_the_engine_does_with_it() -> None:
    bench, devices = growing(), 1
    for _ in range(3):
        growing_now = bench.engine.demand(4).growing
        (resize,) = bench(*(m.DeviceGained(devices + k) for k in range(growing_now)))
        devices += growing_now
        assert growing_now and len(resize.devices) == devices, "every device that was asked for is used"
        assert bench.engine.demand(4).grown == tuple(range(1, devices)), "promised devices count"
        bench(m.Resized("a", resize.devices))
        bench.results("a", 10.0 / devices, 4, width=devices)
    assert bench.engine.demand(4).grown == tuple(range(1, devices))


def test_nothing_grows_while_a_trial_waits() -> None:
    bench = growing()
    bench(plain("b"))
    assert bench.engine.demand(8) == DeviceDemand({1: 1})


def test_max_workers_limits_growth() -> None:
    bench = growing(max_workers=2)
    assert bench(m.DeviceGained(1)) == [resize("a", (0, 1))]
    bench(m.Resized("a", (0, 1)))
    bench.results("a", 5.0, 4, width=2)
    assert bench.engine.demand(8).growing == 0


def test_a_trial_that_is_on_its_way_to_an_idle_device_has_a_claim_to_it() -> None:
    bench, a = Bench(1, max_packing=2), m.TrialAdded("a", "g", "checkpointing", 100)
    bench(a)
    bench.results("a", 10.0, 4)
    bench(plain("b"))
    bench.results("a", 20.0, 4, width=0.5)
    bench.results("b", 20.0, 4, width=0.5)
    assert bench.engine.demand(8).claimed == 0
    assert bench(m.DeviceGained(1)) == [suspend("a")]
    assert bench.engine.is_free(1) and bench.engine.demand(8) == DeviceDemand(claimed=1)
    assert with_arrivals(bench.engine.demand(8), [1.0]).claimed == 1
    bench(m.TrialEnded("a", "paused"), a)
    assert not bench.engine.is_free(1) and bench.engine.demand(8).claimed == 0


def test_trials_that_arrive_are_counted_before_the_engine_hears_of_them() -> None:
    demand = DeviceDemand({1: 1}, 0, (3,))
    assert with_arrivals(demand, []) is demand
    assert with_arrivals(demand, [1.0, 1.0, 2.0]) == DeviceDemand({1: 3, 2: 1}, 0, (3,))
    assert with_arrivals(DeviceDemand({}, growing=2), [0.5, 0.5, 0.5]) == DeviceDemand({1: 2})
    assert with_arrivals(DeviceDemand(), [1 / 3] * 3) == DeviceDemand({1: 1})
