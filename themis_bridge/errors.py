"""The exceptions of this package."""

from __future__ import annotations


class ThemisError(ValueError):
    """A bid, a number or a setting that cannot be true. The message names its owner, the value and the remedy."""


class WrongArbiter(ThemisError):
    """The arbiter of the Ray cluster leases other devices than the job asks for, or is of another version."""
