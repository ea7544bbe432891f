"""`Engine(lanes=...)`: which trials share a device by memory, and what part of it each gets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidtune.engine import EngineError
from fluidtune.engine import messages as m
from salus_share import Need, SalusError
from salus_share.lanes import outgrown
from tests.engine.helpers import Bench, book, elastic, holders, plain


def bench(devices: int = 1, policy: str = "FAIR", c: int = 4, **more: object) -> Bench:
    return Bench(devices, lanes=policy, max_packing=c, **more)


def starts(instructions: list) -> dict[str, tuple[int, ...]]:
    return {i.trial: i.devices for i in instructions if isinstance(i, m.Start)}


def needs(trial: str, memory: float, ephemeral: float = 0.0, compute: float | None = None) -> m.Result:
    return m.Result(trial, 1.0, 0.25, memory, ephemeral, compute)


def need_of(bench: Bench, trial: str) -> tuple[float, float]:
    need = bench.engine._state.sharing.need_of(book(bench.engine, trial))
    return float(need.persistent), float(need.ephemeral)


def test_while_needs_are_unknown_each_trial_has_a_device_alone():
    b = bench()
    assert starts(b(*[plain(f"t{k}") for k in range(4)])) == {"t0": (0,)}
    assert b(m.Result("t0", 1.0, 0.25)) == []
    assert starts(b(needs("t0", 0.3))) == {"t1": (0,), "t2": (0,)}


def test_the_smaller_limit_of_speed_and_memory_counts():
    for memory, fit in ((0.6, 1), (0.5, 2), (0.3, 3), (0.1, 4)):
        b = bench()
        b(*[plain(f"t{k}") for k in range(6)])
        b(needs("t0", memory))
        assert len(b.engine.tenants(0)) == fit, memory


def test_a_share_that_the_script_asks_for_is_believed_until_it_is_measured():
    b = bench(c=1)
    assert len(starts(b(*[plain(f"t{k}", share=0.5) for k in range(3)]))) == 2
    assert need_of(b, "t0") == (0.5, 0.0)
    # Less persistent and more ephemeral memory is another part of the same half.
    b(needs("t0", 0.4, 0.1))
    assert b.engine.place_in_lanes("t0").persistent == pytest.approx(0.3)
    # Both turned out to need more. When one has left, no other trial may take its place.
    b(needs("t0", 0.8), needs("t1", 0.8))
    assert starts(b(m.TrialEnded("t0", "stopped"))) == {}
    assert b.engine.tenants(0) == ("t1",)


def test_a_trial_that_needs_more_than_expected_waits_for_a_device_with_room():
    b = bench(devices=2, c=2)
    b(*[plain(name) for name in "abcd"])
    b(needs("a", 0.3), needs("b", 0.3))
    assert sorted(map(len, holders(b.engine).values())) == [2, 2]
    out = b(m.NeedFound("c", 0.9, 0.5), m.WorkerLost("c"))
    assert starts(out) == {}
    assert b.engine.waiting == ("c",)
    home = b.engine.trial("a").devices[0]
    out = b(m.TrialEnded("a", "stopped"))
    assert starts(out) == {"c": (home,)}


def test_memory_that_a_trial_lacked_is_kept_for_it_later():
    b = bench()
    b(*[plain(f"t{k}") for k in range(4)])
    b(needs("t0", 0.2, 0.1))
    b(m.NeedFound("t0", 0.7, 0.6), m.WorkerLost("t0"))
    assert need_of(b, "t0") == pytest.approx((0.1, 0.6))
    b(*[m.TrialEnded(f"t{k}", "stopped") for k in (1, 2, 3)])
    b(needs("t0", 0.3, 0.1, 0.5))
    assert need_of(b, "t0") == pytest.approx((0.2, 0.6))


def test_each_trial_has_its_lane_and_a_promise_that_follows_its_need():
    b = bench(c=2)
    b(plain("a"), plain("b"))
    assert b.engine.place_in_lanes("a") is None, "it is alone"
    b(needs("a", 0.3, 0.1))
    before = b.engine.place_in_lanes("b")
    assert b.engine.place_in_lanes("a").lane != before.lane
    for memory, ephemeral, promised in ((0.6, 0.2, (0.4, 0.2)), (0.2, 0.1, (0.1, 0.1)), (0.9, 0.1, (0.1, 0.1))):
        b(needs("b", memory, ephemeral))
        place = b.engine.place_in_lanes("b")
        assert place.lane == before.lane
        assert (float(place.persistent), float(place.ephemeral)) == pytest.approx(promised), memory


def test_a_trial_joins_the_fullest_device_that_it_does_not_slow_down():
    b = bench(devices=3, c=2)
    b(*[plain(name) for name in ("busy", "small", "large", "x", "y", "z")])
    found = b(needs("busy", 0.6, 0.0, 0.9), needs("small", 0.2, 0.0, 0.4), needs("large", 0.4, 0.0, 0.4))
    home = {name: b.engine.trial(name).devices for name in ("busy", "small", "large")}
    # Each is taken to need the median: 0.4 of the memory, 0.4 of the compute. In the end only the busy
    # device has room. Its trials are slowed down, but no trial waits for that reason.
    assert list(starts(found).items()) == [("x", home["large"]), ("y", home["small"]), ("z", home["busy"])]


def test_a_promoted_trial_goes_first_and_equals_share():
    b = bench(policy="HPT")
    b(m.GroupAnnounced("rung1"), *[plain(name, 10) for name in "abc"])
    b(needs("a", 0.7, 0.6))
    assert b.engine.trial("a").rung == 0
    assert [b.engine.trial(name).width for name in "abc"] == pytest.approx([1 / 3] * 3)
    b(m.BudgetChanged("b", 30))
    assert b.engine.trial("b").rung == 1
    assert [b.engine.trial(name).width for name in "abc"] == [0.0, 1.0, 0.0]
    # The seconds of the trials that it passes do not count, since their width is not known.
    before = b.engine.trial("c").seconds
    b(needs("b", 0.7, 0.6), needs("c", 0.7, 0.6))
    assert b.engine.trial("c").seconds == before
    # Paused and promoted into the next rung, as HyperBand does.
    b(m.TrialEnded("c", "paused"), m.TrialAdded("c", "rung1", iterations=30))
    assert b.engine.trial("c").rung == 1
    assert [b.engine.trial(name).width for name in "abc"] == pytest.approx([0.0, 0.5, 0.5])


def test_a_repeated_or_shortened_budget_is_no_promotion():
    b = bench()
    b(plain("a", 10))
    b(m.Result("a", 1.0, 1), *(m.BudgetChanged("a", left) for left in (9, 4, None, 8)))
    assert b.engine.trial("a").rung == 0


def test_impossible_memory_figures_are_refused():
    b = bench()
    b(plain("a"))
    for memory, ephemeral in ((-0.1, 0.0), (0.2, 0.3), (0.2, -0.1), (float("nan"), 0.0)):
        with pytest.raises(EngineError, match="memory"):
            b(m.NeedFound("a", memory, ephemeral))
        with pytest.raises(EngineError, match="memory"):
            b(needs("a", memory, ephemeral))
    with pytest.raises(SalusError, match="policy"):
        bench(policy="RANDOM")


def promised(places) -> float:
    """What trials in these lanes may hold at once."""
    lanes = {one.lane: max(other.ephemeral for other in places if other.lane == one.lane) for one in places}
    return sum(one.persistent for one in places) + sum(lanes.values())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from(["FAIR", "PACK", "SRTF", "HPT"]),
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50), st.integers(1, 6)), min_size=1, max_size=12),
)
def test_trials_that_share_a_device_fit_it_and_every_trial_ends(devices, c, policy, works):
    b = bench(devices, policy, c)
    size = {f"t{k}": (persistent / 100, ephemeral / 100) for k, (persistent, ephemeral, _) in enumerate(works)}
    left = {f"t{k}": count for k, (_, _, count) in enumerate(works)}
    b(*[plain(name, left[name]) for name in left])
    # As its process says, a trial that needs more than it is promised beside the others goes back to the queue.
    for _ in range(1000):
        if not left:
            break
        assert b.engine.held_devices(), "trials wait and no device is used"
        for name in b.engine.held_devices():
            if b.engine.trial(name).status != "running":
                continue
            p, e = size[name]
            b(m.Result(name, 1.0, 0.5, p + e, e))
            places = [b.engine.place_in_lanes(each) for each in b.engine.tenants(b.engine.trial(name).devices[0])]
            assert len(places) == 1 or promised(places) <= 1
            place = b.engine.place_in_lanes(name)
            if place is not None and outgrown(place, Need(p, e)):
                b(m.NeedFound(name, p + e, e), m.WorkerLost(name))
                continue
            left[name] -= 1
            if not left[name]:
                del left[name]
                b(m.TrialEnded(name, "stopped"))
    assert not left


def test_a_trial_that_goes_first_on_its_device_is_not_taken_to_be_alone_there():
    b = bench(devices=3, policy="SRTF", c=2)
    b(*[elastic(name, 40 + k) for k, name in enumerate("abcdef")])
    for _ in range(4):
        for name in b.engine.held_devices():
            b(m.Result(name, 1.0, 1, 0.3))
    pairs = [tenants for tenants in holders(b.engine).values() if len(tenants) == 2]
    assert pairs
    for name in [name for name in b.engine.held_devices() if name not in pairs[0]]:
        b(m.TrialEnded(name, "stopped"))
    for _ in range(4):
        for name in b.engine.held_devices():
            b(m.Result(name, 1.0, 1, 0.3))
    assert all(len(b.engine.trial(name).devices) == 1 for name in pairs[0])
