"""A mean whose count is of the whole data is found, and no other one."""

from __future__ import annotations

import pytest

from fluidtune.elastic.data.counted import Counted


def having_read(parts: list[int], uneven: bool = False, returned: int = 0) -> Counted:
    """A loader of 40 samples in 5 batches; ``parts``: what this worker has had of them."""
    counted = Counted(returned=returned)
    for samples in parts:
        counted.read(samples, uneven=uneven, of_data=40, batches=5)
    return counted


@pytest.mark.parametrize("uneven", [False, True])
def test_all_samples_are_not_those_of_a_part(uneven):
    assert "number of all samples, 40, as the count of a worker that has read 20" in str(
        having_read([4] * 5, uneven).why_wrong(40.0)
    )
    assert having_read([4] * 10, uneven).why_wrong(40.0) is None  # read twice


def test_batches_count_only_if_each_is_divided_evenly():
    assert having_read([4] * 5).why_wrong(5.0) is None
    assert "number of batches, 5" in str(having_read([4] * 5, uneven=True).why_wrong(5.0))
    assert having_read([1] * 5, uneven=True).why_wrong(5.0) is None  # a sample of each


@pytest.mark.parametrize("count", [20.0, 3.0, 160.0])
def test_other_counts_are_the_loops_own(count):
    assert having_read([4] * 5, uneven=True).why_wrong(count) is None


@pytest.mark.parametrize("count", [5, 40])
def test_what_samples_has_returned_is_right(count):
    assert having_read([4] * 5, uneven=True, returned=count).why_wrong(float(count)) is None
