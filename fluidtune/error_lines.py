"""Errors of others in one line, as messages and logs quote them."""

from __future__ import annotations

#: What the first line of Ray's error says when an actor's constructor has raised. A traceback follows, whose frames are
#: indented, and then what was raised (`ray.exceptions.ActorDiedError`; the test has a real actor raise).
_AT_START = "creation task"


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its class where the message is empty.

    Where an actor's constructor has raised, it is the line that says what.
    """
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    if _AT_START not in lines[0]:
        return lines[0]
    frames = [number for number, line in enumerate(lines) if line.startswith("  ")]
    return lines[min(frames[-1] + 1, len(lines) - 1)] if frames else lines[-1]


def failure(error: BaseException) -> str:
    """The name of an error's class, and its message in one line.

    Of an error that a task or a constructor of Ray's has raised, they are those of what was raised there.
    """
    cause = getattr(error, "cause", None)
    meant: BaseException = cause if isinstance(cause, BaseException) else error
    said, name = first_line(meant), type(meant).__name__
    return said if said == name or _AT_START in str(meant) else f"{name}: {said}"
