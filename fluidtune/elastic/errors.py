"""How a training loop is ended from outside.

Both are BaseExceptions, so that a user's ``except Exception`` around a training step does not swallow them.
Neither is an error of the user's code, and the host never reports one as such.
"""

from __future__ import annotations


class Left(BaseException):
    """This worker is no longer part of the trial, or the trial is to stop: unwind. State is safe."""


class GroupLost(BaseException):
    """A peer is gone, or cannot be reached: the group's state is no longer whole.

    The host restarts the trial from its last commit. Raised again by every later collective of the group.
    """
