"""Worker processes for the tests of frameworks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contracts.processes import PeerProcess, peer_processes


@pytest.fixture(scope="module")
def pool() -> Iterator[list[PeerProcess]]:
    with peer_processes(3) as processes:
        yield processes
