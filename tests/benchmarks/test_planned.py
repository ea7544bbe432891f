"""Shockwave and Sia: what their programs decide where it can be seen by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.shared_cluster.apps import Spec, TwinApp, TwinReport
from benchmarks.shared_cluster.baselines import BASELINES
from themis_bridge import JobInfo
from themis_bridge.locality import Gpu
from themis_bridge.policy import Situation


def situation(gpus: int, *apps: tuple[int, float], age: float = 1000.0, held: int = 0) -> Situation:
    """Apps of one job on one machine. ``apps``: (the most GPUs, seconds on one GPU); the first holds ``held`` GPUs."""
    offer = {f"g{i}": Gpu(f"g{i}", "m", slot=f"s{i}") for i in range(gpus)}
    reports = {}
    for number, (most, seconds) in enumerate(apps):
        app = TwinApp(Spec(f"a{number}", 0.0, [[JobInfo(seconds, 1.0, most)]]))
        reports[f"a{number}"] = TwinReport(1.0, most, facts=replace(app.facts(), age=age))
    return Situation(reports, dict.fromkeys(reports, ()), offer, dict.fromkeys(list(offer)[:held], "a0"), {})


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
        report = there.reports[late]
        reports = {**there.reports, late: replace(report, facts=replace(report.facts, age=20000.0))}
        assert got("shockwave", replace(there, reports=reports)) == {late: 1}
