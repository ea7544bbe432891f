"""The error of this package. It says the value, what was expected, and what to do."""

from __future__ import annotations


class SalusError(ValueError):
    """A need, a setting or a call is wrong."""
