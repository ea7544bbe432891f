"""Paced trainables: Ray Tune trainables whose iterations last as long as a profile says.

The pace is kept inside ``step``, so that the times that Tune itself measures (``time_this_iter_s``) are the emulated
ones. The same class runs in FluidTune's workers, where an `EmulatedSession` knows the trial's placement, and in stock
Ray Tune's processes, where a trial has the emulated GPUs that Ray gave it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.tune import Trainable

from fluidtune.cluster.emulated.occupancy_board import OccupancyBoard
from fluidtune.profiles import Profile

#: Seconds between a trial's looks at its neighbours.
LOOK_S = 0.1
#: The key of a trial's configuration by which its iterations take a multiple of the profile's time.
COST_KEY = "emulated_cost"


@dataclass(frozen=True)
class Emulation:
    """What a process needs in order to emulate. ``board``: path of the job's `OccupancyBoard`; ``owner``: see there."""

    profile: Profile
    board: str
    owner: int | None = None


class EmulatedHost(Protocol):
    """What knows a trial's placement: an `EmulatedSession`, or a `_StockHost` under stock Ray Tune."""

    def begin_iteration(self) -> None:
        """Called before each iteration."""

    def placement(self) -> tuple[tuple[int, ...], int]:
        """The number of the trial's devices on each node, and the number of trials on the worker's own device.

        It may take a while, by which the iteration is longer: a pause.
        """
        ...


_host: EmulatedHost | None = None


def use_host(host: EmulatedHost | None) -> None:
    """Make this the host that the paced trainables of this process ask; None: a `_StockHost`."""
    global _host
    _host = host


def paced(trainable: type[Trainable], emulation: Emulation) -> type[Trainable]:
    """A subclass of the given trainable class whose iterations last as long as the profile says."""

    class Paced(trainable):  # type: ignore[valid-type, misc]
        def step(self) -> dict[str, Any]:
            host = _host_here(emulation)
            host.begin_iteration()
            started = time.perf_counter()
            result: dict[str, Any] = super().step()
            keep_pace(emulation.profile, float(self.config.get(COST_KEY, 1.0)), host, started)
            return result

    Paced.__name__, Paced.__qualname__ = trainable.__name__, trainable.__qualname__
    return Paced


def _host_here(emulation: Emulation) -> EmulatedHost:
    # Not in `Paced` itself: a class made in a function is pickled with copies of the globals that it uses.
    return _host or _StockHost.of_this_process(emulation)


def keep_pace(
    profile: Profile,
    cost: float,
    host: EmulatedHost,
    started: float,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Sleep until an iteration that began at ``started`` is done; neighbours may come and go meanwhile.

    ``cost``: the iteration takes this multiple of the profile's time.

    Raises:
        MemoryError: the trials on the device do not fit into its memory.
    """
    done, then = 0.0, started
    while True:
        looked = clock()
        nodes, trials = host.placement()
        now = clock()
        then += now - looked
        if not profile.fits(trials):
            raise MemoryError(
                f"out of memory on an emulated device: {trials} trials of {profile.memory:g} of its memory each"
            )
        seconds = profile.iteration(nodes, trials) * cost
        # Since the last look the neighbours were those of now, near enough.
        done += (now - then) / seconds
        then = now
        left = (1.0 - done) * seconds
        if left <= 0:
            return
        sleep(min(LOOK_S, left))


class _StockHost:
    """Under stock Ray Tune: the emulated GPUs that Ray gave this process; neighbours are those on the first one."""

    _one: _StockHost | None = None

    def __init__(self, emulation: Emulation):
        self._board = OccupancyBoard(emulation.board, emulation.owner)
        self._devices = [int(i) for i in ray.get_gpu_ids()] or [0]
        for device in self._devices:
            self._board.enter(device)

    @classmethod
    def of_this_process(cls, emulation: Emulation) -> _StockHost:
        # A process of stock Tune keeps its GPU until it ends, also while it is idle between two trials.
        if cls._one is None:
            cls._one = cls(emulation)
        return cls._one

    def begin_iteration(self) -> None:
        pass

    def placement(self) -> tuple[tuple[int, ...], int]:
        return (len(self._devices),), self._board.count(self._devices[0])
