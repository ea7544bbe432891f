"""Runs of one name that begin in one second stage their files apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray import tune

from tests.tune.running import fit


def reports(config: dict[str, Any]) -> None:
    tune.report({"score": config["x"]})


@pytest.mark.ray
@pytest.mark.usefixtures("ray2")
def test_two_experiments_of_one_name_that_begin_in_one_second_share_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen: each had the other's trials in its storage."""
    monkeypatch.setattr("ray.tune.utils.date_str", lambda: "2026-11-29_10-00-00")
    for x in (1, 2):
        fit("fluid", reports, {"x": x}, tmp_path / str(x))
    assert [len(list((tmp_path / name / "fluid").glob("*/result.json"))) for name in "12"] == [1, 1]
