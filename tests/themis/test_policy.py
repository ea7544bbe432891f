"""Themis as a policy: which apps bid, and which get the GPUs that no app has won."""

from __future__ import annotations

from collections import Counter

from themis_bridge.auction import Bid, clear_auction
from themis_bridge.locality import Gpu
from themis_bridge.policy import (
    LONG_WAIT,
    Need,
    Situation,
    Themis,
    share_leftover,
    tie_break,
    whole,
    worst_first,
)


def bidders(needs: dict[str, Need], held: dict[str, tuple[Gpu, ...]], holder: dict[str, str], f: float) -> list[str]:
    offer = {"g0": Gpu("g0", "m"), "g1": Gpu("g1", "m")}
    everybody = {app: held.get(app, ()) for app in needs}
    return Themis(f).bidders(Situation(needs, everybody, offer, holder, {}))


def test_the_worst_rho_bids():
    needs = {"a": Need(1.0, 2), "b": Need(3.0, 2), "c": Need(2.0, 2), "done": Need(9.0, 1)}
    held = {app: (Gpu(f"of {app}", "m"),) for app in needs}
    assert bidders(needs, held, {}, 1.0) == ["b"]
    assert bidders(needs, held, {}, 0.5) == ["b", "c"]


def test_no_more_apps_bid_than_it_takes_to_use_the_offer():
    small = {f"a{i}": Need(10.0 - i, 1, best=10.0 - i) for i in range(9)}
    assert bidders(small, {}, {}, 0.0) == ["a0", "a1"]
    large = {name: Need(need.rho, 8, best=need.best) for name, need in small.items()}
    assert bidders(large, {}, {}, 0.0) == ["a0"]


def test_among_apps_without_a_gpu_the_one_that_waited_longest_bids_first():
    # "starved" has done half of its work and held nothing since: its rho is half that of an app that has just joined.
    needs = {"new": Need(100.0, 1, best=1.0), "starved": Need(53.0, 1, best=3.5), "rich": Need(60.0, 4)}
    held = {"rich": (Gpu("of rich", "m"),)}
    assert bidders(needs, held, {}, 0.0) == ["starved", "new"]


def leftover(
    needs: dict[str, Need], held: dict[str, tuple[Gpu, ...]], offer: list[Gpu], holder: dict[str, str]
) -> dict[str, str]:
    everybody = {app: held.get(app, ()) for app in needs}
    there = {gpu.id: gpu for gpu in offer}
    return share_leftover(Situation(needs, everybody, there, holder, {}), {}, {})


def test_leftovers_go_first_to_the_app_with_most_work_left():
    offer = [Gpu(f"g{i}", "m") for i in range(4)]
    needs = {"short": Need(2.0, 3, left=5.0), "long": Need(1.0, 3, left=90.0)}
    assert sorted(leftover(needs, {}, offer, {}).values()) == ["long", "long", "long", "short"]
    # Apps that have bid come last, whatever work they have left.
    bids = {"long": Bid("long", {frozenset(): 1.0})}
    situation = Situation(needs, dict.fromkeys(needs, ()), {g.id: g for g in offer}, {}, {})
    assert sorted(share_leftover(situation, {}, bids).values()) == ["long", "short", "short", "short"]


def test_a_scattered_app_moves_together_lease_by_lease():
    at = {"a": (Gpu("first", "m1"), Gpu("second", "m2"))}
    needs = {"a": Need(1.0, 3, 4, left=9.0)}
    # Its third lease, on m3, is on offer; a GPU beside another one of its GPUs is free.
    offer = [Gpu("own", "m3"), Gpu("free", "m1"), Gpu("far", "m4")]
    assert leftover(needs, at, offer, {"own": "a"}) == {"free": "a"}
    # It does not move if nothing is gained.
    assert leftover(needs, at, [Gpu("own", "m1"), Gpu("free", "m2")], {"own": "a"}) == {"own": "a"}
    assert leftover(needs, {}, [Gpu("own", "m3"), Gpu("free", "m1")], {"own": "a"}).keys() == {"own", "free"}


def test_an_app_that_has_waited_long_for_its_first_gpu_comes_before_the_one_with_most_work():
    offer = {f"g{i}": Gpu(f"g{i}", "m") for i in range(4)}
    needs = {
        "long": Need(1.0, 4, left=90.0, best=0.9),
        "worst": Need(90.0, 4, gang=2, left=2.0, best=3.0),
        "waited": Need(80.0, 4, left=1.0, best=LONG_WAIT),
        "new": Need(99.0, 4, left=1.0, best=LONG_WAIT / 2),
    }
    held = {**dict.fromkeys(needs, ()), "long": (Gpu("of long", "m"),)}
    # An app that can use a single GPU bids beside a larger one: it wins a GPU and pays with all of it.
    small = {**needs, "worst": Need(90.0, 1, left=2.0, best=3.0)}
    situation = Situation(small, held, dict(list(offer.items())[:2]), {}, {})
    rows = [(), ("g0",), ("g0", "g1")]
    bids = {
        app: Bid(app, {frozenset(row): 100.0 / (len(row) or 0.01) for row in rows[: size + 1]})
        for app, size in (("worst", 1), ("waited", 2))
    }
    grants = Themis(0.0).decide(situation, bids)
    assert Themis(0.0).bidders(situation)[:2] == ["worst", "waited"]
    assert not clear_auction(bids.values(), situation.offer).allocation["worst"]
    assert sorted(grants.values()) == ["waited", "worst"]
    # Each of them gets one gang; the rest goes by work left.
    given = share_leftover(Situation(needs, held, offer, {}, {}), {}, {})
    assert sorted(given.values()) == ["long", "waited", "worst", "worst"]


def test_half_a_gang_changes_no_hands():
    offer = {"g0": Gpu("g0", "m"), "g1": Gpu("g1", "m")}
    needs = {"gang": Need(9.0, 2, gang=2, together=2), "holder": Need(1.0, 1)}
    situation = Situation(needs, dict.fromkeys(needs, ()), offer, {"g0": "holder"}, {})
    torn, both = {"g0": "gang"}, dict.fromkeys(offer, "gang")
    assert whole(situation, torn) == {"g0": "holder"}
    assert whole(situation, both) == both


# Ties

NAMES = ("a", "b", "c", "zz")


def equals(number: int, joined: dict[str, float] | None = None) -> Situation:
    ties = {name: tie_break(name, (joined or {}).get(name, 0.0), number) for name in NAMES}
    needs = {name: Need(2.0, 1, best=1.0, left=9.0, tie=tie) for name, tie in ties.items()}
    return Situation(needs, dict.fromkeys(NAMES, ()), {"g": Gpu("g", "m")}, {}, {})


def test_no_name_wins_ties():
    first = Counter(worst_first(equals(number))[0] for number in range(400))
    given = Counter(share_leftover(equals(number), {}, {})["g"] for number in range(400))
    # Each would be 100 if lots were drawn, and 400 for one of them if a name decided.
    assert all(60 < first[name] < 140 and 60 < given[name] < 140 for name in NAMES)


def test_among_equals_the_one_that_came_first_comes_first():
    joined = {name: -float(number) for number, name in enumerate(NAMES)}
    for number in range(20):
        assert worst_first(equals(number, joined)) == sorted(NAMES, reverse=True)


def test_a_name_cannot_be_chosen_for_its_lots():
    # The best of many names at one time of arrival is an ordinary one a microsecond later.
    names = [f"app{number}" for number in range(1000)]
    best = min(names, key=lambda name: tie_break(name, 10.0, 7))
    others = [tie_break(name, 10.000001, 7) < tie_break(best, 10.000001, 7) for name in names]
    assert sum(others) > 10
