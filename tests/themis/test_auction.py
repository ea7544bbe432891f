"""The partial-allocation auction: compared with brute force, and properties that hold for any clearing."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.auction import relaxed_value
from tests.themis.brute import clear, kinds_in, random_bids
from themis_bridge import Bid, JobInfo, ThemisError, clear_auction
from themis_bridge.auction import Shaped
from themis_bridge.bids import Valuation, make_bid
from themis_bridge.fairness import kinds_of
from themis_bridge.locality import Gpu, Phase

NONE = frozenset()


def test_brute_force_on_1000_instances():
    rng = random.Random(7)
    for _ in range(1000):
        gpus = [f"g{i}" for i in range(rng.randint(1, 6))]
        bids = random_bids(rng, rng.randint(1, 4), gpus)
        # Where no two GPUs are of one kind, a row stands for its own GPUs alone.
        unlike = rng.random() < 0.5
        where = {gpu: Gpu(gpu, "m", kind=gpu if unlike else rng.choice(["h100", "t4"])) for gpu in gpus}
        clearing = clear_auction(bids, where)
        proportional, payments = clear(bids, where)
        won = {app: kinds_in(row, where) for app, row in clearing.proportional.items()}
        assert won == {app: kinds_in(row, where) for app, row in proportional.items()}
        assert clearing.payment == pytest.approx(payments, rel=1e-9)
        assert clearing.exact


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({NONE: 2.0, frozenset({9}): 1.0}, "not on offer"),
        ({NONE: math.nan}, "nan"),
        ({NONE: 0.0}, "0.0"),
        ({NONE: "2"}, "'2'"),
        ({frozenset({1}): 1.0}, "empty set"),
    ],
)
def test_bad_bids_are_refused_by_name(table, why):
    good = Bid("good", {NONE: 1.0})
    with pytest.raises(ThemisError, match=r"'evil'") as error:
        clear_auction([good, Bid("evil", table)], {1: Gpu("1", "m"), 2: Gpu("2", "m")})
    assert why in str(error.value)


def test_two_bids_of_one_app_are_refused():
    with pytest.raises(ThemisError, match="'twin' has 2 bids"):
        clear_auction([Bid("twin", {NONE: 1.0}), Bid("twin", {NONE: 1.0})], {1: Gpu("1", "m")})


# --- shapes


def machines(*sizes: int) -> dict[str, Gpu]:
    gpus = [Gpu(f"m{m}g{i}", f"m{m}", f"r{m % 2}") for m, size in enumerate(sizes) for i in range(size)]
    return {gpu.id: gpu for gpu in gpus}


APP = st.tuples(st.integers(1, 8), st.sampled_from([1, 1, 2, 3, 4, 8]), st.floats(1.0, 100.0), st.floats(0.0, 5000.0))


@settings(max_examples=60, deadline=None)
@given(st.lists(APP, min_size=1, max_size=5), st.lists(st.integers(1, 8), min_size=1, max_size=5))
def test_any_auction_among_real_apps(apps, sizes):
    where = machines(*sizes)
    bids, values = [], {}
    for number, (jobs, width, seconds, elapsed) in enumerate(apps):
        value = Valuation([Phase(kinds_of([JobInfo(10, seconds, width)] * jobs))], elapsed, 100.0 * seconds)
        name = f"a{number}"
        values[name] = value
        bids.append(make_bid(name, value, [], where.values()))
    clearing = clear_auction(bids, where)
    granted = Counter(gpu for row in clearing.allocation.values() for gpu in row)
    assert all(times == 1 for times in granted.values())
    assert granted.keys() | clearing.leftover == where.keys()
    assert not granted.keys() & clearing.leftover
    for bid in bids:
        won, kept = clearing.proportional[bid.app], clearing.allocation[bid.app]
        assert kept <= won
        assert len(kept) == math.floor(clearing.payment[bid.app] * len(won) + 1e-9)
        assert 0 < clearing.payment[bid.app] <= 1
    # The GPUs that are won are worth what was bid, because they have the shape of the row.
    value = sum(-math.log(values[app].rho([where[g] for g in won])) for app, won in clearing.proportional.items())
    assert value >= clearing.value - 1e-9
    assert clearing.value <= relaxed_value(bids, where) + 1e-9


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_pieces_that_fit_by_the_capacities_fit_in_the_machines(sizes, data):
    where = machines(*sizes)
    layout = Shaped(where)
    bids, won, left = [], {}, np.array(layout.capacity)
    for number in range(data.draw(st.integers(1, 6))):
        row = data.draw(st.frozensets(st.sampled_from(sorted(where)), min_size=1))
        gang = data.draw(st.sampled_from([1, 2, 4, 8]))
        (uses,) = layout.uses([row], gang)
        if (uses <= left).all():
            left -= uses
            bids.append(Bid(f"a{number}", {NONE: 1.0}, gang))
            won[f"a{number}"] = row
    placed = layout.place(bids, won)
    assert sum(map(len, placed.values())) == len(frozenset().union(*placed.values()))
    for bid in bids:
        counts = Counter(where[gpu].machine for gpu in placed[bid.app])
        wanted = layout.pieces(won[bid.app], bid.gang)
        for size in (1, 2, 4, 8):
            whole = sum(count // size * size for count in counts.values())
            assert whole >= sum(s * n for (_, s), n in wanted.items() if s >= size)


def test_the_solver_prints_nothing():
    """It does so once in a process, below Python's own output; what prints JSON would print that first."""
    code = (
        "from tests.themis.brute import random_bids\n"
        "import random\n"
        "from themis_bridge import clear_auction\n"
        "from themis_bridge.locality import Gpu\n"
        "gpus = [str(n) for n in range(6)]\n"
        "clear_auction(random_bids(random.Random(1), 4, gpus), {gpu: Gpu(gpu, 'm', kind=gpu) for gpu in gpus})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b""
