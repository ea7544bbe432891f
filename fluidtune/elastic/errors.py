"""The exceptions that end a training loop from outside.

Both are BaseExceptions, so that a user's ``except Exception`` around a training step does not swallow them. Neither is
an error of the user's code, and the host never reports one as such an error.
"""

from __future__ import annotations


class Left(BaseException):
    """This worker is no longer part of the trial, or the trial is to stop. The trial's state is safe."""


class Refused(Left):
    """This joiner was not taken in: the trial goes on as it was."""


class GroupLost(BaseException):
    """Another worker is gone or cannot be reached: the group's state is no longer whole.

    The host restarts the trial from its last commit. Every later collective of the group raises it again.
    """


class CannotDivide(GroupLost):
    """What the loop does cannot be divided among workers: alone it goes on as it would under stock Ray Tune.

    All workers of the group raise it at the same place, so none waits for another one.
    """


def explain(error: BaseException, lost: str | None, *, dismissed: bool, divided: str | None = None) -> None:
    """A trial's loop has raised ``error``: raise what that means for its host, if it is something else.

    ``lost``: why the group is lost, None if it is not. ``dismissed``: this worker was asked to leave. ``divided``: why
    the error may come of the division of batches, None if it does not.
    """
    if isinstance(error, GroupLost):
        if dismissed:  # its leader was quicker: no news
            raise Left("this worker was asked to leave") from error
    elif lost is not None:
        raise GroupLost(lost) from error
    elif divided is not None:
        raise CannotDivide(divided) from error
