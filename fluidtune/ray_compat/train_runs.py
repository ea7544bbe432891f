"""Ray Train's workers get places in placement groups that exist: `place_workers`, for a run that is about to begin.

Ray Train's controller makes a placement group for the run's workers. A callback, which runs in the controller's
process, hands it places instead. The controller is an actor of its own; before Ray 2.50 it is in the trial's process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.controller.controller import TrainController
from ray.train.v2._internal.execution.worker_group import worker_group as ray_worker_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

#: A placement group and the index of one of its bundles.
Place = tuple[PlacementGroup, int]


def asked_of(controller: dict[str, Any]) -> tuple[int, dict[str, float]] | None:
    """How many workers a run asks for, and Ray's resources of each; None: Ray Train chooses the number.

    ``controller``: the arguments of the controller's constructor.
    """
    scaling = controller["scaling_policy"].scaling_config
    workers = scaling.num_workers
    return (workers, scaling._resources_per_worker_not_none) if isinstance(workers, int) else None


def place_workers(controller: dict[str, Any], places: list[Place]) -> None:
    """Let the run's workers start in these places, one in each, by their rank."""
    controller["callbacks"] = [*controller["callbacks"], _HandOver(places)]


def notice_own_controllers(prepare: Callable[[dict[str, Any]], None]) -> None:
    """Have ``prepare`` called with the arguments of each controller's constructor that this process calls itself."""
    init = TrainController.__init__
    if hasattr(init, "__wrapped__"):
        return

    @functools.wraps(init)
    def noticed(self: Any, **arguments: Any) -> None:
        prepare(arguments)
        init(self, **arguments)

    TrainController.__init__ = noticed  # type: ignore[method-assign]


class _HandOver(WorkerGroupCallback):
    def __init__(self, places: list[Place]) -> None:
        self._places = places

    @contextmanager
    def on_worker_group_start(self) -> Iterator[None]:
        before = ray_worker_group.placement_group, ray_worker_group.PlacementGroupSchedulingStrategy
        held, places = _Held(), self._places
        ray_worker_group.placement_group = lambda **_: held
        ray_worker_group.PlacementGroupSchedulingStrategy = lambda placement_group, placement_group_bundle_index: (
            PlacementGroupSchedulingStrategy(*places[placement_group_bundle_index])
        )
        try:
            yield
        finally:
            ray_worker_group.placement_group, ray_worker_group.PlacementGroupSchedulingStrategy = before


class _Held(PlacementGroup):
    """Stands for the run's own group. Ray knows none of its id, so that Ray Train removes nothing when it ends."""

    def __init__(self) -> None:
        super().__init__(ray.PlacementGroupID.from_random())

    def wait(self, timeout_seconds: float = 30) -> bool:
        return True

    def ready(self) -> Any:
        return ray.put(True)
