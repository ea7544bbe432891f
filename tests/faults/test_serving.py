"""One round of each kind of `tests.faults.serving`: processes of a service are killed under load."""

from __future__ import annotations

import pytest

from benchmarks.common import free_ports
from tests.faults import serving, serving_versions
from tests.faults.serving import Response


@pytest.mark.ray
@pytest.mark.faults
@pytest.mark.serve
def test_each_request_has_one_response_whoever_is_killed(no_ray, tmp_path):
    became = serving.rounds(len(serving.KINDS), tmp_path, free_ports(1)[0])
    assert became["answered"] > 0


@pytest.mark.ray
@pytest.mark.faults
@pytest.mark.serve
def test_no_request_is_lost_while_versions_are_deployed_and_rolled_back(no_ray, tmp_path):
    became = serving_versions.rounds(len(serving_versions.KINDS), tmp_path, free_ports(1)[0])
    assert became["answered"] > 0


def test_the_restart_and_the_slowest_response():
    """The process is killed at 10. At 13 the first request is answered that was sent after it."""
    before, on_the_way = Response(1.0, 3.0, "answered"), Response(9.0, 17.0, "error")
    refused, back = Response(10.5, 11.0, "refused"), Response(11.0, 13.0, "answered")
    waited = Response(10.0, 15.0, "answered")
    responses = [before, refused, back, waited, on_the_way]
    assert serving.times(responses, 10.0, carries=True) == (3.0, 5.0)
    assert serving.times(responses, 10.0, carries=False) == (3.0, 8.0)
