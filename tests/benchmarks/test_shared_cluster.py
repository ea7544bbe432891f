"""The shared cluster on a virtual clock: windows of traces, Shockwave and Sia by hand, and gains told from chance."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import policies
from benchmarks.liars import beyond_chance
from benchmarks.shared_cluster.apps import Spec, TwinApp, TwinReport
from benchmarks.shared_cluster.baselines import BASELINES
from themis_bridge import JobInfo
from themis_bridge.locality import Gpu
from themis_bridge.policy import Need, Situation


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "WINDOW_FROM", 1)
    monkeypatch.setattr(policies, "WINDOW_JOBS", 2)


def test_a_window_has_the_next_jobs_of_its_cluster_that_are_neither_short_nor_long(tmp_path: Path) -> None:
    rows = ["timestamp,duration,num_gpus,gpu_time,cluster"]
    # In no order; the first is left out because the window begins with the second.
    for minute, seconds, gpus, name in [
        (9, 700, 4, "c"),
        (1, 800, 8, "c"),
        (3, 599, 2, "c"),
        (4, 900, 2, "c"),
        (5, 43201, 2, "c"),
        (6, 900, 2, "other"),
        (12, 1000, 1, "c"),
    ]:
        rows.append(f"2017-10-09 07:{minute:02}:00,{seconds},{gpus},0,{name}")
    path = tmp_path / "philly.csv"
    path.write_text("\n".join(rows))
    specs = policies.read_window(path, "c")
    assert [(each.arrives, each.budget, each.demand) for each in specs] == [
        (0.0, pytest.approx(1800.0), 2),
        (300.0, pytest.approx(2800.0), 4),
    ]


def test_a_side_is_compared_with_the_best_on_each_workload() -> None:
    def figures(rho: float, makespan: float) -> dict[str, float]:
        return {"worst_rho": rho, "makespan": makespan}

    table = {
        "x": {"strawman both": figures(2.0, 100.0), "themis both": figures(1.0, 90.0)},
        "y": {"strawman both": figures(1.0, 100.0), "themis both": figures(1.5, 110.0)},
    }
    found = policies.compared(table)
    assert (found["themis both"]["median"], found["themis both"]["most"], found["themis both"]["best"]) == (
        1.25,
        1.5,
        1,
    )
    assert (found["strawman both"]["median"], found["themis both"]["makespan"]) == (1.5, 1.0)


def situation(gpus: int, *apps: tuple[int, float], age: float = 1000.0, held: int = 0) -> Situation:
    """Apps of one job on one machine. ``apps``: (the most GPUs, seconds on one GPU); the first holds ``held`` GPUs."""
    offer = {f"g{i}": Gpu(f"g{i}", "m", slot=f"s{i}") for i in range(gpus)}
    needs = {}
    for number, (most, seconds) in enumerate(apps):
        app = TwinApp(Spec(f"a{number}", 0.0, [[JobInfo(seconds, 1.0, most)]]))
        needs[f"a{number}"] = Need(1.0, most, report=TwinReport(facts=replace(app.facts(), age=age)))
    return Situation(needs, dict.fromkeys(needs, ()), offer, dict.fromkeys(list(offer)[:held], "a0"), {})


def got(name: str, there: Situation) -> dict[str, int]:
    return dict(Counter(BASELINES[name]().decide(there, {}).grants.values()))


@pytest.mark.parametrize(
    ("gpus", "apps", "expected"),
    [
        (4, [(4, 1000.0), (4, 90000.0)], {"a0": 2, "a1": 2}),
        # There is no configuration of three GPUs, and 4 ** -0.5 + 1.1 is less than 1 + 2 ** -0.5.
        (4, [(1, 1000.0), (4, 1000.0)], {"a1": 4}),
        (8, [(1, 1000.0), (4, 1000.0)], {"a0": 1, "a1": 4}),
    ],
)
def test_sia_chooses_the_numbers_of_gpus_with_the_best_sum(
    gpus: int, apps: list[tuple[int, float]], expected: dict[str, int]
) -> None:
    assert got("sia", situation(gpus, *apps)) == expected


def test_shockwave_serves_the_app_first_that_cannot_end_in_its_fair_time() -> None:
    there = situation(1, (1, 4000.0), (1, 5000.0), age=0.0)
    for late in ("a0", "a1"):
        facts = replace(there.needs[late].report.facts, age=20000.0)
        needs = {**there.needs, late: replace(there.needs[late], report=TwinReport(facts=facts))}
        assert got("shockwave", replace(there, needs=needs)) == {late: 1}


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
