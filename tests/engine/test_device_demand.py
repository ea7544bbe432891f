"""What the engine could use beyond what its trials hold. Pure."""

from __future__ import annotations

from typing import Any

from fluidtune.engine import DeviceDemand, Engine, with_arrivals
from fluidtune.engine import messages as m
from tests.engine.helpers import resize, suspend


def engine_with(devices: int, *trials: m.TrialAdded, **group: Any) -> Engine:
    engine = Engine()
    engine.handle(*(m.DeviceGained(device) for device in range(devices)), m.GroupAnnounced("g", **group), now=0.0)
    engine.handle(*trials, now=0.0)
    return engine


def added(
    *names: str, kind: m.Kind = "plain", share: float = 1.0, iterations: float = 100.0, growable: bool = False
) -> list[m.TrialAdded]:
    return [m.TrialAdded(name, "g", kind, iterations, share, growable=growable) for name in names]


def measured(engine: Engine, trial: str, seconds: float = 10.0, width: float = 1.0, results: int = 4) -> None:
    for _ in range(results):
        engine.handle(m.Result(trial, seconds, width), now=1.0)


def test_a_trial_that_must_keep_to_one_worker_is_no_demand():
    # Seen: a job on demand kept one device more than it could use for each such trial.
    engine = engine_with(1, *added("a", kind="elastic", growable=True))
    assert engine.demand(8).growing == 0, "nothing is known of it"
    measured(engine, "a")
    assert engine.demand(8).growing == 1 and engine.demand(0).growing == 0
    engine.handle(m.GrowthEnded("a", stays=True), now=2.0)
    assert engine.demand(8) == DeviceDemand()
    assert engine.handle(m.DeviceGained(1), now=3.0) == []


def test_what_the_demand_says_is_what_the_engine_does_with_it() -> None:
    engine = engine_with(1, *added("a", kind="elastic", growable=True))
    measured(engine, "a")
    devices = 1
    for _ in range(3):
        growing = engine.demand(4).growing
        out = engine.handle(*(m.DeviceGained(devices + k) for k in range(growing)), now=2.0)
        (resize,) = [each for each in out if isinstance(each, m.Resize)]
        devices += growing
        assert growing and len(resize.devices) == devices, "every device that was asked for is used"
        assert engine.demand(4).grown == tuple(range(1, devices)), "promised devices count"
        engine.handle(m.Resized("a", resize.devices, 0.1), now=3.0)
        measured(engine, "a", 10.0 / devices, float(devices))
    assert engine.demand(4).grown == tuple(range(1, devices))


def test_nothing_grows_while_a_trial_waits() -> None:
    engine = engine_with(1, *added("a", kind="elastic", growable=True))
    measured(engine, "a")
    engine.handle(*added("b"), now=2.0)
    assert engine.demand(8) == DeviceDemand({1: 1})


def test_max_workers_limits_growth() -> None:
    engine = Engine(max_workers=2)
    engine.handle(m.DeviceGained(0), m.GroupAnnounced("g"), *added("a", kind="elastic", growable=True), now=0.0)
    measured(engine, "a")
    out = engine.handle(m.DeviceGained(1), now=1.0)
    assert out == [resize("a", (0, 1))]
    engine.handle(m.Resized("a", (0, 1), 0.1), now=1.0)
    measured(engine, "a", 5.0, 2.0)
    assert engine.demand(8).growing == 0


def test_a_trial_that_is_on_its_way_to_an_idle_device_has_a_claim_to_it() -> None:
    engine = Engine(max_packing=2)
    engine.handle(m.DeviceGained(0), m.GroupAnnounced("g"), *added("a", kind="checkpointing"), now=0.0)
    measured(engine, "a")
    engine.handle(*added("b"), now=1.0)
    measured(engine, "a", 20.0, 0.5)
    measured(engine, "b", 20.0, 0.5)
    assert engine.demand(8).claimed == 0
    assert engine.handle(m.DeviceGained(1), now=2.0) == [suspend("a")]
    assert engine.is_free(1) and engine.demand(8) == DeviceDemand(claimed=1)
    assert with_arrivals(engine.demand(8), [1.0]).claimed == 1
    engine.handle(m.TrialEnded("a", "paused"), *added("a", kind="checkpointing"), now=9.0)
    assert not engine.is_free(1) and engine.demand(8).claimed == 0


def test_trials_that_arrive_are_counted_before_the_engine_hears_of_them() -> None:
    demand = DeviceDemand({1: 1}, 0, (3,))
    assert with_arrivals(demand, []) is demand
    assert with_arrivals(demand, [1.0, 1.0, 2.0]) == DeviceDemand({1: 3, 2: 1}, 0, (3,))
    assert with_arrivals(DeviceDemand({}, growing=2), [0.5, 0.5, 0.5]) == DeviceDemand({1: 2})
    assert with_arrivals(DeviceDemand(), [1 / 3] * 3) == DeviceDemand({1: 1})
