"""A device for one test."""

from __future__ import annotations

import pytest

from tests.salus.processes import home


@pytest.fixture
def directory():
    with home() as made:
        yield made
