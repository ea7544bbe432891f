"""Whether this process has created actors or submitted tasks. Ray ends them when it ends, and not before."""

from __future__ import annotations

import functools
from typing import Any

from ray.actor import ActorClass
from ray.remote_function import RemoteFunction

#: What this process has created since `watch`, in words.
_owned: set[str] = set()
_watching = False


def watch() -> None:
    """Notice from now on what this process creates in Ray."""
    global _watching
    if not _watching:
        _watching = True
        ActorClass._remote = _noting(ActorClass._remote, "an actor")  # type: ignore[method-assign]
        RemoteFunction._remote = _noting(RemoteFunction._remote, "a task")  # type: ignore[method-assign]


def _noting(submit: Any, words: str) -> Any:
    @functools.wraps(submit)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        _owned.add(words)
        return submit(self, *args, **kwargs)

    return noting


def owned() -> str | None:
    """What this process has created in Ray since it was watched, in words; None: nothing."""
    return " and ".join(sorted(_owned)) or None
