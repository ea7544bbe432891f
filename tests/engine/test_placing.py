"""Which trials start, where and in which order."""

import pytest

from fluidtune.engine import EngineError
from fluidtune.engine import messages as m
from tests.engine.helpers import Bench, book, elastic, plain, release, resume, start


def test_figure_3_5_five_devices_widths_3_1_and_two_halves():
    bench = Bench(5, max_packing=2)
    out = bench(elastic("a", 4), elastic("b", 4), elastic("c", 12), elastic("d", 30))
    assert out == [
        start("d", (0, 1, 2), 1.0),
        start("c", (3,), 1.0),
        start("a", (4,), 0.5),
        start("b", (4,), 0.5),
    ]


def test_a_synchronous_group_starts_largest_first_and_ties_in_order_added():
    bench = Bench(2)
    out = bench(plain("s", 5), plain("l", 9), plain("m1", 7), plain("m2", 7))
    assert out == [start("l", (0,), 1.0), start("m1", (1,), 1.0)]
    assert bench.engine.waiting == ("m2", "s")
    assert bench(m.TrialEnded("l", "stopped")) == [release("l", (0,)), start("m2", (0,), 1.0)]


def test_a_batch_that_its_algorithm_orders_starts_in_turn_whatever_was_measured():
    bench = Bench(1)
    bench(*[m.TrialAdded(name, "g", iterations=1 + turn, turn=turn) for name, turn in {"c": 3, "a": 1, "b": 2}.items()])
    bench.results("a", 1.0, 2)
    assert bench.engine.tenants(0) + bench.engine.waiting == ("a", "b", "c")


def test_an_asynchronous_group_is_served_in_order_of_arrival_one_trial_per_device():
    bench = Bench(2, synchronous=False)
    out = bench(plain("s", 5), plain("l", 9), plain("m", 7))
    assert out == [start("s", (0,), 1.0), start("l", (1,), 1.0)]
    assert bench.engine.waiting == ("m",)


def test_a_concurrency_below_the_number_of_devices_limits_and_one_above_it_packs():
    bench = Bench(2)
    bench(m.GroupAnnounced("few", False, concurrency=1))
    assert bench(plain("a", group="few"), plain("b", group="few")) == [start("a", (0,), 1.0)]
    assert bench(m.TrialEnded("a", "stopped")) == [release("a", (0,)), start("b", (0,), 1.0)]
    bench = Bench(2, concurrent_packing=2)
    bench(m.GroupAnnounced("many", False, concurrency=3))
    assert bench(*[plain(name, group="many") for name in "abcd"]) == [
        start("a", (0,), 0.5),
        start("b", (1,), 0.5),
        start("c", (0,), 0.5),
    ]


def test_concurrency_does_not_exceed_a_given_packing_limit():
    bench = Bench(1, max_packing=2)
    bench(m.GroupAnnounced("many", False, concurrency=4))
    assert bench(*[plain(name, group="many") for name in "abcd"]) == [
        start("a", (0,), 0.5),
        start("b", (0,), 0.5),
    ]


def test_a_share_below_one_packs_without_max_packing_unless_a_device_is_idle():
    bench = Bench(2)
    out = bench(*[plain(name, share=0.5) for name in "abcde"])
    assert out == [
        start("a", (0,), 0.5),
        start("b", (1,), 0.5),
        start("c", (0,), 0.5),
        start("d", (1,), 0.5),
    ]
    assert bench.engine.waiting == ("e",)
    assert Bench(1)(*[plain(name, share=0.3) for name in "abcd"]) == [start(name, (0,), 1 / 3) for name in "abc"]


def test_trials_that_turn_out_to_need_several_devices_get_them_at_once_or_wait():
    bench = Bench(4)
    assert bench(*[plain(name) for name in "abcde"]) == [start(name, (at,), 1.0) for at, name in enumerate("abcd")]
    # All four begin workers of their own at the same moment: without gangs none would get its second and third device.
    found = [m.GangFound(name, 3) for name in "abcde"]
    lost = [m.WorkerLost(name) for name in "abcd"]
    out = bench(*lost, *found)
    assert [each for each in out if isinstance(each, m.Start)] == [resume("a", (0, 1, 2), 1.0)]
    assert bench(m.GangFound("a", 4)) == [], "it holds three, and must lose them first"
    out = bench(m.TrialEnded("a", "stopped"))
    assert [type(each) for each in out] == [m.Release, m.Resume] and len(out[1].devices) == 3
    with pytest.raises(EngineError, match="at least 2"):
        bench(m.GangFound("e", 1))


def test_a_trial_that_lost_its_worker_goes_first_and_resumes():
    bench = Bench(1)
    bench(plain("a", 10), plain("b", 99))
    assert bench(m.WorkerLost("b")) == [release("b", (0,)), resume("b", (0,), 1.0)]
    bench(m.TrialEnded("b", "stopped"), plain("c", 1000))
    assert tuple(bench.engine.held_devices()) == ("c",)
    assert bench.engine.waiting == ("a",)
    # The trial that lost its worker goes before the taller one.
    assert bench(plain("d", 5000), m.WorkerLost("c")) == [release("c", (0,)), resume("c", (0,), 1.0)]


def test_a_paused_trial_that_is_added_again_resumes_with_what_was_found():
    bench = Bench(1)
    bench(elastic("a", 5))
    bench(m.Result("a", 2.0, 1))
    assert bench(m.TrialEnded("a", "paused")) == [release("a", (0,))]
    assert bench(m.TrialAdded("a", "g", "plain", 3)) == [resume("a", (0,), 1.0)]
    view, known = bench.engine.trial("a"), book(bench.engine, "a")
    assert (known.kind, known.iterations, view.height, known.done) == ("elastic", 3, 6.0, 1)


def test_a_group_that_is_passed_over_too_often_comes_first():
    bench = Bench(1)
    bench(m.GroupAnnounced("async", False), plain("first", 50))
    bench(plain("patient", group="async"))
    current = "first"
    for turn in range(20):
        out = bench(plain(f"tall{turn}", 1000), m.TrialEnded(current, "stopped"))
        current = out[-1].trial
        if current == "patient":
            break
    assert current == "patient" and turn == 4


def test_wide_starts_leave_one_device_for_each_of_their_group():
    bench = Bench(6)
    bench(m.GroupAnnounced("other"), plain("x", 1, group="other"), plain("y", 1, group="other"))
    # StaticFluid on six devices gives widths 2, 2, 1, but only four devices are idle.
    assert bench(elastic("a", 40), elastic("b", 39), elastic("c", 21)) == [
        start("a", (2, 3), 1.0),
        start("b", (4,), 1.0),
        start("c", (5,), 1.0),
    ]


def test_a_trial_that_devices_are_held_for_keeps_its_place_in_the_concurrency():
    bench = Bench(4, per_node=2)
    bench(plain("x"), plain("y"), plain("z"))
    bench(m.TrialEnded("y", "stopped"), m.GroupAnnounced("one", False, 1), plain("w", group="one"))
    bench(m.TrialEnded("w", "stopped"))
    assert bench(plain("gang", share=2, group="one"), plain("s", group="one")) == []
    assert bench(m.TrialEnded("z", "stopped")) == [release("z", (2,)), start("gang", (2, 3), 1.0)]


def test_the_trial_with_the_longest_path_goes_first() -> None:
    bench = Bench(1)
    bench(m.GroupAnnounced("early", tail=8.5))
    assert bench(plain("long", 9), plain("short", 1, group="early")) == [start("short", (0,), 1.0)]
