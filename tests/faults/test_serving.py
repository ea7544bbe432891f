"""One round of each kind of `tests.faults.serving` but one: processes of a service are killed under load."""

from __future__ import annotations

import pytest

from benchmarks.common import free_ports
from tests.faults import serving

pytestmark = [
    pytest.mark.ray,
    pytest.mark.faults,
    pytest.mark.serve,
]


#: Ray Serve takes half a minute to miss its proxy.
KINDS = [kind for kind in serving.KINDS if kind != "proxy"]


def test_each_request_has_one_response_whoever_is_killed(no_ray, tmp_path):
    became = serving.rounds(len(KINDS), tmp_path, free_ports(1)[0], KINDS)
    assert became["answered"] > 0
