"""Which trials change their width while they run."""

import pytest

from fluidtune.engine import messages as m
from tests.engine.helpers import Bench, alone, book, elastic, grows, holders, plain, release, resize, start


def test_a_trial_doubles_its_width_until_its_scaling_is_known():
    bench = alone(8)
    assert bench(m.Result("a", 1.0, 1)) == [resize("a", (0, 1))]
    assert bench(m.Resized("a", (0, 1))) == []
    assert bench.results("a", 0.61, 2, width=2) == []
    assert bench(m.Result("a", 0.61, 2)) == [resize("a", (0, 1, 2, 3, 4))]  # beta 1.22 pays up to 5


def test_a_trial_that_cannot_grow_or_has_little_left_does_not_grow():
    assert alone(iterations=2).results("a", 1.0, 1) == []
    assert alone().results("a", 0.003, 5) == []
    bench = Bench(2)
    bench(plain("a"))
    assert bench(m.KindFound("a", "elastic"), m.Result("a", 1.0, 1)) == []
    assert bench(m.CanGrow("a")) == [resize("a", (0, 1))]


def test_a_plain_trial_that_can_grow_grows_and_leaves_a_device_that_is_not_its_first():
    bench = Bench(2)
    bench(plain("a"))
    assert bench(m.CanGrow("a"), m.Result("a", 1.0, 1)) == [resize("a", (0, 1))]
    assert bench(m.Resized("a", (0, 1))) == []
    assert bench(m.GrowthEnded("a", stays=True)) == [], "it keeps what it has"
    assert bench(m.DeviceLeaving(1)) == [resize("a", (0,))]
    assert bench(m.Resized("a", (0,))) == [release("a", (1,))]
    assert bench(m.DeviceLeaving(0)) == [], "it would begin anew"


def test_an_iteration_during_which_the_width_changed_measures_nothing():
    bench = alone()
    assert bench(m.Result("a", 1.0, None)) == [], "its speed on one device is not known yet"
    assert book(bench.engine, "a").done == 1 and not book(bench.engine, "a").speed.measured
    assert bench(m.Result("a", 1.0, 1)) == [resize("a", (0, 1))]


def test_a_new_budget_is_a_reason_to_grow():
    bench = alone(iterations=2)
    assert bench(m.Result("a", 1.0, 1)) == []
    assert bench(m.BudgetChanged("a", 50)) == [resize("a", (0, 1))]


def test_devices_are_kept_for_a_trial_that_is_not_measured_yet():
    bench = Bench(4)
    bench(plain("a"), plain("b"))
    bench(*grows("a"), *grows("b"))
    assert bench(m.Result("a", 1.0, 1)) == [resize("a", (0, 2))]
    assert bench(m.Result("b", 1.0, 1)) == [resize("b", (1, 3))]


def test_a_failed_resize_is_tried_again_after_three_results():
    bench = alone(2)
    bench(m.Result("a", 1.0, 1))
    assert bench(m.ResizeFailed("a", (0,))) == [release("a", (1,))]
    assert bench.results("a", 1.0, 2) == []
    assert bench(m.Result("a", 1.0, 1)) == [resize("a", (0, 1))]


def test_trials_that_turn_out_slower_shrink_in_the_order_of_their_results():
    """Not in the order of a set of names, which differs from one Python process to the next."""
    names = [f"t{k}" for k in range(6)]
    bench = Bench(6)
    bench(*map(elastic, names))
    bench(*[m.Result(name, 1.0, 1) for name in names])
    grown = bench(*[m.DeviceGained(device) for device in range(6, 12)])
    bench(*[m.Resized(instruction.trial, instruction.devices) for instruction in grown])
    for width in (2, 2):  # a warm-up, and one sample: not yet enough to shrink
        assert bench(*[m.Result(name, 9.0, width) for name in names]) == []
    order = [names[k] for k in (4, 1, 5, 0, 3, 2)]
    out = bench(*[m.Result(name, 9.0, 2) for name in order])
    assert [instruction.trial for instruction in out] == order


def test_bad_scaling_of_one_trial_keeps_others_from_growing_but_one_sample_does_not():
    bench = alone(2)
    bench.results("a", 1.0, 1)
    bench(m.Resized("a", (0, 1)))
    bench.results("a", 2.0, 2, width=2)  # a warm-up and one sample
    bench(m.TrialEnded("a", "stopped"))
    bench(plain("b"))
    bench(*grows("b"))
    assert bench(m.Result("b", 1.0, 1)) == [resize("b", (0, 1))]
    bench(m.Resized("b", (0, 1)))
    assert bench.results("b", 2.0, 3, width=2) == [resize("b", (0,))]
    bench(m.Resized("b", (0,)))
    bench(m.TrialEnded("b", "stopped"), plain("c"))
    assert bench(*grows("c"), m.Result("c", 1.0, 1)) == []
    # The next rung is another group of the same job and knows the same.
    bench(m.TrialEnded("c", "stopped"), m.GroupAnnounced("rung2"))
    assert bench(m.TrialAdded("d", "rung2", "elastic", 100, growable=True)) == [start("d", (0,), 1.0)]
    assert bench.results("d", 1.0, 5) == []
    assert book(bench.engine, "b").group.speed.beta == pytest.approx(4.0)


def wide_trial(iterations: float | None) -> Bench:
    bench = alone(2, iterations)
    bench.results("a", 1.0, 1)
    bench(m.Resized("a", (0, 1)), m.DeviceGained(2, "node0"), m.DeviceGained(3, "node0"))
    bench.results("a", 0.5, 3, width=2)
    bench(m.Resized("a", (0, 1, 2, 3)))
    return bench


def test_a_waiting_trial_shrinks_a_wide_one_only_where_that_pays():
    bench = wide_trial(1000)
    bench.results("a", 0.25, 3, width=4)  # it scales perfectly: shrinking it gains nothing
    assert bench(elastic("b")) == []
    bench.results("a", 0.5, 6, width=4)  # half of the devices' time is lost
    assert book(bench.engine, "a").resizing_to == (0, 1, 2)
    assert bench(plain("c"), plain("d"), plain("e")) == []
    assert bench(m.Resized("a", (0, 1, 2)))[:2] == [release("a", (3,)), start("b", (3,), 1.0)]


def test_a_wide_trial_without_a_known_end_makes_room():
    bench = wide_trial(None)
    bench.results("a", 0.25, 3, width=4)
    assert bench(plain("b", 5)) == [resize("a", (0, 1, 2))]
    assert bench(m.Resized("a", (0, 1, 2))) == [release("a", (3,)), start("b", (3,), 1.0)]


def test_a_wide_trial_frees_what_a_gang_lacks_beside_the_idle_devices():
    bench = wide_trial(None)
    bench.results("a", 0.25, 3, width=4)
    assert bench(m.DeviceGained(4, "node0"), plain("gang", 5, share=2)) == [resize("a", (0, 1, 2))]
    assert bench(m.Resized("a", (0, 1, 2))) == [release("a", (3,)), start("gang", (3, 4), 1.0)]


def test_alone_on_a_packed_device_a_trial_has_width_one_and_may_grow():
    bench = Bench(2, max_packing=2)
    bench(*[elastic(name, 50) for name in "abcd"])
    assert holders(bench.engine) == {0: ("a", "c"), 1: ("b", "d")}
    bench(m.Result("c", 1.0, 0.5), m.Result("a", 1.0, 0.5))
    assert bench(m.TrialEnded("b", "stopped"), m.TrialEnded("d", "stopped"), m.TrialEnded("c", "stopped"))[-1] == (
        release("c", (0,))
    )
    assert bench(m.Result("a", 0.5, 0.5)) == [resize("a", (0, 1))]
    assert bench.engine.trial("a").seconds == {0.5: 1.0, 1: 0.5}
    assert book(bench.engine, "a").share == 1.0


def test_a_packed_trial_is_moved_where_it_may_then_grow():
    bench = Bench(3, max_packing=2)
    bench(elastic("scales", 60))
    bench.results("scales", 1.0, 3)
    bench(m.Resized("scales", (0, 1)))
    bench.results("scales", 0.55, 4, width=2)
    bench(m.TrialEnded("scales", "stopped"))
    bench(*[elastic(name, 20) for name in "abcdef"])
    for name in "abcdef":
        bench.results(name, 1.05, 3, width=0.5)
    assert sorted(map(len, holders(bench.engine).values())) == [2, 2, 2]
    # On one device each they take 17 s instead of 17.85 s, which is not worth 1 s; on two devices each, 9.35 s.
    out = bench(*[m.TrialEnded(name, "stopped") for name in "bcef"])
    assert [i.trial for i in out if isinstance(i, m.Suspend)] == ["a"]


def test_a_trial_that_gets_ten_times_slower_halfway_is_estimated_anew():
    bench = Bench(2)
    bench(elastic("a", 40), elastic("b", 40))
    bench.results("a", 1.0, 20)
    bench.results("b", 1.0, 36)
    assert bench.engine.trial("a").height == 20.0
    bench.results("a", 10.0, 4)
    assert bench.engine.trial("a").height == 160.0, "four results are the majority of the last seven"
    assert bench.engine.trial("b").height == 4.0, "its neighbour is not taken for slow"
    assert bench(m.TrialEnded("b", "stopped")) == [release("b", (1,)), resize("a", (0, 1))]


def test_with_an_unknown_budget_growing_is_considered_again_as_the_trial_goes_on():
    bench = alone(2, None)
    assert bench.results("a", 0.1, 3) == [], "as many again are 0.3 s, of which a resize takes 0.2"
    assert bench.results("a", 0.1, 13) == [resize("a", (0, 1))]


def test_where_many_trials_run_an_idle_device_is_given_out_within_a_thirty_second_of_their_iterations():
    bench = Bench(96)
    names = [f"t{k}" for k in range(96)]
    bench(*(elastic(name, 1000) for name in names))
    for name in names:
        bench.results(name, 1.0, 2)
    told = []
    for events in range(1, 10):
        told += bench(*([m.DeviceGained(96)] if events == 1 else []), m.Result(names[events], 1.0, 1))
        if told:
            break
    assert [len(instruction.devices) for instruction in told] == [2] and 96 in told[0].devices
    assert events <= 96 / 32 + 1
