"""The driver of a search is killed, and told to end: what is restored decides as a search that nobody disturbs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.search_kills import cluster, compared

pytestmark = [pytest.mark.ray, pytest.mark.faults]


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("search", ["several", "optuna", "bohb", "pbt"])
def test_a_disturbed_search_decides_as_one_that_is_not(search: str, tmp_path: Path) -> None:
    with cluster() as address:
        assert [line["differ"] for line in compared(search, 1, 1, address, tmp_path)] == [{}]
