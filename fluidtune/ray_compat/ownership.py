"""What this process has created in Ray: it is noticed, and ended with the trial that has created it."""

from __future__ import annotations

import functools
from typing import Any

import ray
from ray.actor import ActorClass
from ray.remote_function import RemoteFunction
from ray.util.placement_group import PlacementGroup

from fluidtune.ray_compat.descent import end_made_by

#: What this process has created since `watch`, in words.
_owned: set[str] = set()
_watching = _over = False


def watch() -> None:
    """Notice from now on what this process creates in Ray."""
    global _watching
    if not _watching:
        _watching = True
        ActorClass._remote = _noting(ActorClass._remote, "an actor")  # type: ignore[method-assign]
        RemoteFunction._remote = _noting(RemoteFunction._remote, "a task")  # type: ignore[method-assign]
        PlacementGroup.__init__ = _noting_group(PlacementGroup.__init__)  # type: ignore[method-assign]


def _noting(create: Any, words: str) -> Any:
    @functools.wraps(create)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _over:
            raise RuntimeError(f"the trial is over, and creates {words} in Ray")
        _owned.add(words)
        return create(self, *args, **kwargs)

    return noting


def _noting_group(init: Any) -> Any:
    @functools.wraps(init)
    def noting(self: Any, id: Any, *args: Any, **kwargs: Any) -> None:
        if not id.is_nil():  # Ray makes one without an id for each actor that is in no group
            _owned.add("a placement group")
        init(self, id, *args, **kwargs)

    return noting


def owned() -> str | None:
    """What this process has created in Ray since it was watched, in words; None: nothing."""
    return " and ".join(sorted(_owned)) or None


def end_owned() -> None:
    """End what this actor's process has created in Ray, if anything. It creates no actor and no task any more.

    Its tasks end when it does.
    """
    global _over
    if _owned and ray.get_runtime_context().get_actor_id():
        _over = True
        end_made_by()
