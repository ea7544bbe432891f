"""What this process has created in Ray: it is noticed, and ended with the trial that has created it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorClass
from ray.remote_function import RemoteFunction
from ray.util.placement_group import PlacementGroup

from fluidtune.ray_compat.descent import end_made_by
from fluidtune.ray_compat.versions import trials_may_be_controllers

if TYPE_CHECKING:
    from fluidtune.ray_compat.train_runs import Place

    #: Where the workers of a run of Ray Train start: it gets their number and Ray's resources of each, and returns a
    #: place for each; None: in a group of the run's own.
    TrainPlaces = Callable[[int, dict[str, float]], list[Place] | None]

#: The class of the actor that a run of Ray Train V2 begins with.
_CONTROLLER = "TrainController"
#: The environment variable that chooses V2, which is the default since Ray 2.51. Source: Ray Train's documentation.
_V2 = "RAY_TRAIN_V2_ENABLED"
#: Whether this process has created anything since `watch`.
_owns = False
_watching = _over = False
_train_places: TrainPlaces | None = None


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
        global _owns
        if _over:
            raise RuntimeError(f"the trial is over, and creates {words} in Ray")
        if isinstance(self, ActorClass) and self.__ray_metadata__.class_name == _CONTROLLER:
            _prepare_train_run(kwargs.get("kwargs"))
        _owns = True
        return create(self, *args, **kwargs)

    return noting


def place_train_runs(places: TrainPlaces | None) -> None:
    """Ask ``places`` from now on where the workers of a run of Ray Train V2 start, before the run begins.

    What it raises, the code gets that begins the run. None: ask nobody.
    """
    global _train_places
    _train_places = places
    if places is not None and _V2 in os.environ and trials_may_be_controllers():
        from fluidtune.ray_compat.train_runs import notice_own_controllers

        notice_own_controllers(_prepare_train_run)


def _prepare_train_run(arguments: Any) -> None:
    """``arguments``: those of the controller's constructor."""
    if _train_places is None or "scaling_policy" not in arguments:
        return
    # Not at the top: it imports Ray Train, which only such a trial has imported.
    from fluidtune.ray_compat.train_runs import asked_of, place_workers

    asked = asked_of(arguments)
    found = None if asked is None else _train_places(*asked)
    if found is not None:
        place_workers(arguments, found)


def _noting_group(init: Any) -> Any:
    @functools.wraps(init)
    def noting(self: Any, id: Any, *args: Any, **kwargs: Any) -> None:
        global _owns
        if not id.is_nil():  # Ray makes one without an id for each actor that is in no group
            _owns = True
        init(self, id, *args, **kwargs)

    return noting


def end_owned() -> None:
    """End what this actor's process has created in Ray, if anything. It creates no actor and no task any more.

    Its tasks end when it does.
    """
    global _over
    if _owns and ray.get_runtime_context().get_actor_id():
        _over = True
        end_made_by()
