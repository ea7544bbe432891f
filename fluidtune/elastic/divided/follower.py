"""A follower's side of divided calls: a stub until the room is written."""

from __future__ import annotations

from collections.abc import Hashable


class Refused(Exception):
    """The leader does not take the follower, for this reason."""


class Follower:
    """Computes parts of a leader's calls."""

    def __init__(self, trial: str, worker: str, secret: bytes, device: str, backend: str) -> None:
        pass

    def attach(self, address: Hashable) -> None:
        """Raises `Refused` or OSError."""
        raise Refused("calls of modules are not divided yet")

    def run(self) -> None:
        """Serve the leader until that is over."""

    def close(self) -> None:
        """Free what it holds; idempotent."""
