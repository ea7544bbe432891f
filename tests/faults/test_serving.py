"""One round of each kind of `tests.faults.serving`: processes of a service are killed under load."""

from __future__ import annotations

import importlib.util

import pytest

from tests.faults import serving
from tests.serving.test_service import free_port

there = importlib.util.find_spec("starlette") is not None
pytestmark = [
    pytest.mark.ray,
    pytest.mark.faults,
    pytest.mark.skipif(not there, reason="Ray Serve is not installed: fluidtune[serve]"),
]


def test_each_request_has_one_response_whoever_is_killed(no_ray, tmp_path):
    became = serving.rounds(len(serving.KINDS), tmp_path, free_port())
    assert became["answered"] > 0
