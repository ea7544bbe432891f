"""The one exception type that a user can meet for a wrong setting, before anything is started."""

from __future__ import annotations


class FluidTuneError(ValueError):
    """A setting, script or environment that cannot work. The message names the value and the remedy."""


class UnpicklableTrainableError(FluidTuneError, TypeError):
    """The trainable cannot be sent to a worker. Ray Tune raises a TypeError then, which a script may expect."""
