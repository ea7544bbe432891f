"""The errors of this package. Each says the value, what was expected, and what to do."""

from __future__ import annotations


class SalusError(ValueError):
    """A need, a setting or a call is wrong."""


class StaleToken(SalusError):
    """The trial was told to leave the device after it got this token: it must commit, free its memory and ask again."""


class Refused(SalusError):
    """The trial can never be admitted to this device."""


class ServiceLost(SalusError):
    """The lane service cannot be reached and could not be started again."""
