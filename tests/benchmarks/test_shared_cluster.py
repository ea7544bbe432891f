"""What liars gain on the shared cluster is told from what chance gives them."""

from __future__ import annotations

import random

from benchmarks.liars import beyond_chance


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
