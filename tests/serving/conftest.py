"""A finished run to serve, for the modules of this directory."""

from __future__ import annotations

import pytest

from tests.conftest import assert_nothing_left
from tests.serving.runs import run


@pytest.fixture(scope="module")
def finished(one_ray, tmp_path_factory):
    """The directory of a finished run, and a cluster of two CPUs that is left as it was found."""
    one_ray.use(num_cpus=2)
    yield run(tmp_path_factory.mktemp("results"))
    assert_nothing_left()
