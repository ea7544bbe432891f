"""The one exception type of this package."""

from __future__ import annotations


class ThemisError(ValueError):
    """A bid, a figure or a setting that cannot be true. The message names whose it is, the value and the remedy."""
