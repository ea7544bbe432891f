"""The errors of this package. Each says the value, what was expected, and what to do."""

from __future__ import annotations


class ServeError(ValueError):
    """A profile, a setting, a message or a call is wrong."""
