"""What can go wrong with a lane, in words: the value, what was expected, what to do."""

from __future__ import annotations


class SalusError(ValueError):
    """A need, a setting or a call that cannot work."""


class StaleToken(SalusError):
    """The trial was taken off the device since it got this token: commit, free the memory, ask again."""


class Refused(SalusError):
    """The trial can never be admitted to this device."""


class ServiceLost(SalusError):
    """The lane service cannot be reached and could not be started again."""
