"""Whether `benchmarks.liars` tells a gain from chance."""

from __future__ import annotations

import random

import pytest

from benchmarks.liars import CHANCE, MOST, PLACEBOS, beyond_chance, rows


def drawn(seed: int, gain: float, liars: int = 24) -> list[float]:
    """What liars gain whose times change by chance by about a tenth."""
    rng = random.Random(seed)
    return [rng.gauss(gain, 0.1) for _ in range(liars)]


def test_a_gain_is_told_from_chance() -> None:
    placebos = [drawn(seed, 0.0) for seed in range(1, 7)]
    found = beyond_chance(drawn(0, 0.15), placebos)
    assert found["p_gain"] < 0.01 and found["p_over"] < 0.01


def test_chance_alone_is_rarely_taken_for_a_gain() -> None:
    found = [
        beyond_chance(drawn(10 * seed, 0.0), [drawn(10 * seed + number, 0.0) for number in range(1, 7)])
        for seed in range(40)
    ]
    for key in ("p_gain", "p_over"):
        # Of 40 with p spread evenly, more than 8 below 0.05 happen in about 1 of 8,000 tries; the seeds are fixed.
        assert sum(each[key] < 0.05 for each in found) <= 8


def test_what_differs_between_liars_is_no_gain() -> None:
    # One app ends 40 % sooner whatever changes. That is chance of its own, and the lie has no part in it.
    own = [0.4, *[0.0] * 23]
    found = beyond_chance(own, [own] * 6)
    assert found == {"p_gain": 1.0, "p_over": 1.0}


def test_the_rows_have_all_placebos_together() -> None:
    gains = {kind: [(0.01 * number, 0.0), (-0.02, 0.0)] for number, kind in enumerate(PLACEBOS)}
    table = rows(gains | {"work * 0.5": [(MOST + 0.01, -0.1), (0.0, 0.1)]})
    assert table[CHANCE]["liars"] == 2 * len(PLACEBOS)
    assert table[CHANCE]["best"] == pytest.approx(0.01 * (len(PLACEBOS) - 1))
    assert table["work * 0.5"]["over"] == 0.5 and table["work * 0.5"]["others"] == pytest.approx(0.0)
    assert "p_gain" in table["work * 0.5"] and "p_gain" not in table["1 s later"]
