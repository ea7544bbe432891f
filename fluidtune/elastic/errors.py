"""The exceptions that end a training loop from outside.

They are BaseExceptions, so that a user's ``except Exception`` around a training step does not swallow them. None is an
error of the user's code, and the host never reports one as such an error.
"""

from __future__ import annotations


class Left(BaseException):
    """The trial was asked to stop. Its state is safe."""


class BeginsAnew(BaseException):
    """The trial has no commit from which it could go on rightly: it begins again where stock Ray Tune would."""
