"""Sub-clusters: the golden example, the limits, and that the solver's parts are even."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from benchmarks.placement.partition import Limits, ModelLoad, partition
from benchmarks.serve_cluster import imbalance
from symphony_serve.errors import ServeError

#: Golden example 7: rate, memory at rest, memory of a batch.
FOUR = [ModelLoad("a", 10, 4, 1), ModelLoad("b", 10, 4, 1), ModelLoad("c", 20, 8, 2), ModelLoad("d", 20, 8, 2)]


def parts_of(places):
    return sorted(sorted(name for name in places if places[name] == part) for part in set(places.values()))


def sums(models, places, parts, field):
    return [sum(getattr(one, field) for one in models if places[one.name] == part) for part in range(parts)]


def test_a_small_and_a_large_model_fit_together():
    """Both large ones need 16 + 2, more than 14."""
    places = partition(FOUR, 2, Limits(14))
    assert all(len(part & {"a", "b"}) == 1 for part in map(set, parts_of(places)))
    assert sums(FOUR, places, 2, "rate") == [30, 30]
    assert sums(FOUR, places, 2, "static") == [12, 12]


@pytest.mark.parametrize("current", [{"a": 0, "c": 0, "b": 1, "d": 1}, {"a": 1, "d": 1, "b": 0, "c": 0}])
def test_without_moves_the_present_parts_stay(current):
    assert partition(FOUR, 2, Limits(14, moves=0), current) == current


def test_moves_are_counted_as_an_unload_and_a_load():
    """From a and b together, one exchange is enough: two models move, each costs 2."""
    current = {"a": 0, "b": 0, "c": 1, "d": 1}
    models = [ModelLoad(one.name, one.rate, one.static) for one in FOUR]
    places = partition(models, 2, Limits(100, moves=3), current)
    assert sum(places[name] != current[name] for name in current) <= 1
    places = partition(models, 2, Limits(100, moves=4), current)
    assert sums(models, places, 2, "rate") == [30, 30]
    assert sum(places[name] != current[name] for name in current) == 2


def test_the_rate_is_limited():
    models = [ModelLoad("a", 6, 9), ModelLoad("b", 6, 1), ModelLoad("c", 4, 5), ModelLoad("d", 4, 5)]
    places = partition(models, 2, Limits(100, rate=10))
    assert sums(models, places, 2, "rate") == [10, 10]
    with pytest.raises(ServeError, match="4 models were not brought into 2 parts of 100 bytes and 9 requests/s"):
        partition(models, 2, Limits(100, rate=9))


def test_the_solver_finds_parts_where_the_rule_fails():
    """The largest first: 7 and 6, then 5 with 6 and 4 with 7, so that the last 4 and 4 do not both fit into 15."""
    models = [ModelLoad(str(number), 1, size) for number, size in enumerate([7, 6, 5, 4, 4, 4])]
    places = partition(models, 2, Limits(15))
    assert sorted(sums(models, places, 2, "static")) == [15, 15]


def test_the_memory_of_a_batch_counts_once():
    models = [ModelLoad(str(number), 1, 2, 6) for number in range(4)]
    assert sorted(len(part) for part in parts_of(partition(models, 2, Limits(10)))) == [2, 2]
    with pytest.raises(ServeError, match="not brought into 2 parts"):
        partition(models, 2, Limits(9))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_more_even_than_random_parts(seed):
    """Figure 16 in small: 120 models in 6 parts, against the best of 1,000 random draws."""
    rng = random.Random(seed)
    models = [ModelLoad(str(one), rng.lognormvariate(3, 1), rng.uniform(1, 10), rng.random()) for one in range(120)]
    places = partition(models, 6, Limits(1e6), seconds=1.0)
    ordered = [places[model.name] for model in models]
    draws = [[rng.randrange(6) for _ in models] for _ in range(1000)]
    rates, memory = [model.rate for model in models], [model.static for model in models]
    best = min(draws, key=lambda draw: imbalance(rates, draw, 6) + imbalance(memory, draw, 6))
    assert imbalance(rates, ordered, 6) < 0.1 * imbalance(rates, best, 6)
    assert imbalance(memory, ordered, 6) < 0.1 * imbalance(memory, best, 6)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ModelLoad("a", -1.0, 1), "model a has rate -1.0"),
        (lambda: partition([], 2, Limits(1)), "0 models in 2 parts"),
        (lambda: partition([FOUR[0], FOUR[0]], 2, Limits(99)), "2 models in 2 parts: give one part or more"),
        (lambda: partition(FOUR, 2, Limits(99), {"a": 2}), "in part 2 now, expected one of 0 to 1"),
    ],
)
def test_what_is_refused(make, said):
    with pytest.raises(ServeError, match=said):
        make()


def test_the_solver_prints_nothing():
    """It does so once in a process, below Python's own output; what prints JSON would print that first."""
    code = (
        "from benchmarks.placement.partition import Limits, ModelLoad, partition\n"
        "partition([ModelLoad(str(n), n + 1, 1) for n in range(4)], 2, Limits(14))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b""
