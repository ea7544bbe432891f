"""Paced trainables under stock Ray Tune: a trial has the emulated GPUs that Ray gave its process."""

from __future__ import annotations

from typing import Any

import ray
from ray.tune import Trainable

from fluidtune.cluster.emulated import Emulation, paced, use_host
from fluidtune.cluster.emulated.occupancy_board import OccupancyBoard


class StockHost:
    """The `EmulatedHost` of this process; neighbours are the processes on its first GPU."""

    _one: StockHost | None = None

    def __init__(self, emulation: Emulation):
        self._board = OccupancyBoard(emulation.board, emulation.owner)
        self._devices = [int(i) for i in ray.get_gpu_ids()] or [0]
        for device in self._devices:
            self._board.enter(device)

    @classmethod
    def use(cls, emulation: Emulation) -> None:
        # A process of stock Tune keeps its GPU until it ends, also while it is idle between two trials.
        if cls._one is None:
            cls._one = cls(emulation)
            use_host(cls._one)

    def begin_iteration(self) -> None:
        pass

    def placement(self) -> tuple[tuple[int, ...], int]:
        return (len(self._devices),), self._board.count(self._devices[0])


def paced_on_stock(trainable: type[Trainable], emulation: Emulation) -> type[Trainable]:
    """A subclass of the given trainable class whose iterations last as long as the profile says, without FluidTune."""

    class Paced(paced(trainable, emulation)):  # type: ignore[misc]
        def setup(self, config: dict[str, Any]) -> None:
            StockHost.use(emulation)
            super().setup(config)

    Paced.__name__, Paced.__qualname__ = trainable.__name__, trainable.__qualname__
    return Paced
