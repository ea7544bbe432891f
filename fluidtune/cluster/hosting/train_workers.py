"""A trial that starts a run of Ray Train needs devices for the run's workers too: how many, and where each starts.

A trial that has too few devices for its workers begins anew when it has them all. So no trial holds devices while it
waits for others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray

from fluidtune.cluster.devices.layout import devices_held
from fluidtune.errors import FluidTuneError
from fluidtune.ray_compat.cluster_state import may_get_nodes

if TYPE_CHECKING:
    from fluidtune.ray_compat.train_runs import Place

logger = logging.getLogger(__name__)

Resources = Mapping[str, float]


@dataclass(frozen=True)
class TrainRoom:
    """What a trial has for the workers of a run of Ray Train.

    ``own``: Ray's resources of the trial's own process. ``device``: those of one device. ``devices``: how many the
    trial holds; its process is on the first. ``most``: how many the job may have; None: any number. ``places``: the
    place of each in Ray, by which workers can be started there; (): Ray Train makes a group of its own, as devices are
    emulated.
    """

    own: Resources
    device: Resources
    devices: int
    most: int | None = None
    places: tuple[Place, ...] = ()

    def on_one(self, each: Resources) -> int:
        """How many workers one device holds. ``each``: Ray's resources of one worker."""
        return devices_held(each, self.device) if self.places else 1

    def places_for(self, workers: int, each: Resources) -> list[Place] | None:
        """A place for each worker, by rank, on devices after the first; None: Ray Train makes a group of its own."""
        on_one = self.on_one(each)
        return [self.places[1 + rank // on_one] for rank in range(workers)] if self.places else None


class TooFewDevices(FluidTuneError):
    """The trial begins anew with ``devices`` devices."""

    def __init__(self, devices: int, has: int) -> None:
        super().__init__(f"with its workers of Ray Train the trial needs {devices} devices, and has {has}")
        self.devices = devices


class TrainWorkers:
    """Finds places for the workers of a hosted trial's runs of Ray Train. Called as `ownership.TrainPlaces` says.

    ``nodes``: as `ray.nodes`. ``may_grow``: whether the cluster may get further ones.

    Raises:
        TooFewDevices: the trial has fewer devices than it needs.
        FluidTuneError: the job can never have as many.
    """

    def __init__(self, room: TrainRoom, nodes: Callable = ray.nodes, may_grow: Callable = may_get_nodes) -> None:
        self._room, self._nodes, self._may_grow = room, nodes, may_grow
        #: Set if the trial had too few devices.
        self.lack: TooFewDevices | None = None

    def __call__(self, workers: int, each: dict[str, float]) -> list[Place] | None:
        room, nodes = self._room, [node["Resources"] for node in self._nodes() if node["Alive"]]
        self._refuse_hopeless(workers, each, nodes)
        on_one = room.on_one(each)
        needed = 1 + math.ceil(workers / on_one) if on_one else 0
        if room.most is not None and needed > room.most:
            raise FluidTuneError(
                f"with its {workers} workers of Ray Train a trial needs {needed} devices, and the job may have "
                f"{room.most}; ask for fewer workers, or give the job more devices"
            )
        of_node = max(devices_held(room.device, node) for node in nodes) if room.places else needed
        if not needed or needed > of_node:
            logger.warning(
                "FluidTune: the trial's %d workers of Ray Train with %s each are not counted: %s",
                workers,
                each,
                f"a device of this job has {room.device}" if not needed else f"no node has {needed} devices",
            )
            return None
        if needed > room.devices:
            self.lack = TooFewDevices(needed, room.devices)
            raise self.lack
        return room.places_for(workers, each)

    def _refuse_hopeless(self, workers: int, each: Resources, nodes: Sequence[Resources]) -> None:
        """FluidTuneError if the cluster never has what the trial's process and its workers need of something."""
        for name, amount in each.items():
            total, there = workers * amount + self._room.own.get(name, 0.0), sum(node.get(name, 0.0) for node in nodes)
            if total > there + 1e-9 and not self._may_grow():
                raise FluidTuneError(
                    f"with its {workers} workers of Ray Train a trial needs {total:g} {name}, and the Ray cluster has "
                    f"{there:g}; ask for fewer workers, or start Ray with more"
                )
