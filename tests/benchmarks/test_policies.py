"""Reading windows of recorded traces, and comparing policies."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import policies


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
