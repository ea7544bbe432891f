"""What the engine refuses, what it ignores, and what its views say."""

import pytest

from fluidtune.engine import Engine, EngineError
from fluidtune.engine import messages as m
from tests.engine.helpers import Bench, all_views, elastic, holders, plain, release, resize, start
from tests.engine.invariants import check_engine


@pytest.mark.parametrize(
    "event, named",
    [
        (m.Result("x", 1.0, 1), "'x'"),
        (m.TrialEnded("x", "stopped"), "'x'"),
        (m.TrialAdded("a", "nowhere"), "'nowhere'"),
        (m.TrialAdded("run", "g"), "running"),
        (m.TrialAdded("wait", "g"), "waiting"),
        (m.TrialAdded("a", "g", share=0), "share is 0"),
        (m.TrialAdded("a", "g", share=1.5), "share is 1.5"),
        (m.TrialAdded("a", "g", iterations=-1), "iterations is -1"),
        (m.BudgetChanged("run", float("nan")), "nan"),
        (m.Result("wait", 1.0, 1), "never started"),
        (m.Result("run", 0.0, 1), "0.0"),
        (m.Result("run", 1.0, 0), "width=0"),
        (m.WorkerLost("wait"), "never started"),
        (m.WorkerLost("run", left=(0,)), "expected some of those"),
        (m.WorkerLost("run", left=(5,)), "(5,)"),
        (m.Resized("run", (0,)), "told to change to None"),
        (m.ResizeFailed("run", (0, 5)), "(0, 5)"),
        (m.DeviceGained(0), "device 0 was gained twice"),
        (m.DeviceLost(7), "device 7"),
        (m.DeviceLeaving(7), "device 7"),
        (m.GroupAnnounced("g", synchronous=False), "'g'"),
        (m.GroupAnnounced("h", concurrency=0), "concurrency 0"),
        ("nonsense", "nonsense"),
    ],
)
def test_an_event_that_cannot_be_true_is_refused_by_name_and_changes_nothing(event, named):
    bench = Bench(1)
    bench(plain("run", 200), plain("wait"))
    before = all_views(bench.engine), holders(bench.engine)
    with pytest.raises(EngineError) as error:
        bench.engine.handle(event, now=9)
    assert named in str(error.value)
    check_engine(bench.engine)
    assert (all_views(bench.engine), holders(bench.engine)) == before


@pytest.mark.parametrize("setting", [{"max_packing": 0}, {"max_workers": 0}])
def test_settings_that_cannot_work_are_refused(setting):
    with pytest.raises(EngineError, match=next(iter(setting))):
        Engine(**setting)


def test_what_follows_from_events_before_a_refused_one_is_not_lost():
    bench = Bench(1)
    bench(plain("a"), plain("b"))
    with pytest.raises(EngineError):
        bench(m.TrialEnded("a", "stopped"), m.Result("x", 1.0, 1), m.TrialEnded("b", "stopped"))
    assert bench() == [release("a", (0,)), start("b", (0,), 1.0)]


def test_a_worker_that_the_shell_has_on_a_device_which_the_trial_has_lost_meanwhile_is_called_back():
    bench = Bench(4)
    assert bench(elastic("a")) == [start("a", (0, 1, 2, 3), 1.0)]
    out = bench(m.DeviceLost(1), m.WorkerLost("a", left=(0, 2)))
    assert out == [release("a", (2, 3)), resize("a", (0,))]
    assert bench(m.Resized("a", (0,))) == []


def test_an_unknown_budget_is_estimated_from_finished_trials_then_from_iterations_done():
    bench = Bench(2)
    bench(plain("a", None), plain("b", None))
    bench.results("b", 1.0, 3)
    assert bench.engine.trial("b").height == 3.0
    bench.results("a", 1.0, 10)
    bench(m.TrialEnded("a", "stopped"))
    assert bench.engine.trial("b").height == 7.0
    bench.results("b", 1.0, 9)
    assert bench.engine.trial("b").height == 12.0


def test_a_group_may_change_its_concurrency():
    bench = Bench(2)
    bench(m.GroupAnnounced("n", False, 1), plain("a", group="n"), plain("b", group="n"))
    assert bench(m.GroupAnnounced("n", False, 2)) == [start("b", (1,), 1.0)]


def test_a_trial_that_waits_for_concurrency_leaves_idle_devices_to_growth():
    bench = Bench(2)
    bench(m.GroupAnnounced("n", False, 1), elastic("a", 50, "n"), elastic("b", 50, "n"))
    assert bench(m.Result("a", 1.0, 1)) == [resize("a", (0, 1))]
