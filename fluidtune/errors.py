"""The exceptions that a user can meet."""

from __future__ import annotations


class FluidTuneError(ValueError):
    """A setting, script or environment that cannot work. The message names the value and the remedy."""


class UnpicklableTrainableError(FluidTuneError, TypeError):
    """The trainable cannot be sent to a worker. Ray Tune raises a TypeError then, which a script may expect."""


class TrialTimeoutError(FluidTuneError, TimeoutError):
    """A trial has passed a limit of time that the user has set. The message says where its process stood."""


class BadInput(ValueError):
    """A served model returns it in place of an output, or raises it: the client gets 400 with its text, in one line."""
