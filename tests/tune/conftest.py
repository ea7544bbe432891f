"""Fixtures of several modules."""

from tests.tune.tried_manager import tried

__all__ = ["tried"]
