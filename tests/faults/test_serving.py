"""One round of each kind of `tests.faults.serving`: processes of a service are killed under load."""

from __future__ import annotations

import pytest

from benchmarks.common import free_ports
from tests.faults import serving

pytestmark = [
    pytest.mark.ray,
    pytest.mark.faults,
    pytest.mark.serve,
]


def test_each_request_has_one_response_whoever_is_killed(no_ray, tmp_path):
    became = serving.rounds(len(serving.KINDS), tmp_path, free_ports(1)[0])
    assert became["answered"] > 0
