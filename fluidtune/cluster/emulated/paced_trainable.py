"""Paced trainables: any Ray Tune trainable whose iterations last what a profile says.

The pace is kept inside ``step``, so that the times which Tune itself measures (``time_this_iter_s``) are the
emulated ones. The same class runs in FluidTune's workers, where an `EmulatedSession` knows the trial's width, and
in stock Ray Tune's processes, where a trial has the emulated GPU that Ray gave it.
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

#: How often a trial looks whether it has got neighbours or lost some, seconds.
LOOK_S = 0.1
#: A trial's configuration may have this key: its iterations take so many times the profile's.
COST_KEY = "emulated_cost"


@dataclass(frozen=True)
class Emulation:
    """What a process needs to know to emulate. ``board``: path of the job's `OccupancyBoard`."""

    profile: Profile
    board: str


class EmulatedHost(Protocol):
    """Whoever knows a trial's place: an `EmulatedSession`, or `_StockHost` under stock Ray Tune."""

    def begin_iteration(self) -> None:
        """An iteration begins."""

    def placement(self) -> tuple[tuple[int, ...], int]:
        """(devices of the trial on each node, trials on its device). Raises if the trial's group has broken."""
        ...


_host: EmulatedHost | None = None


def use_host(host: EmulatedHost | None) -> None:
    """Make this the one that paced trainables of this process ask."""
    global _host
    _host = host


def paced(trainable: type[Trainable], emulation: Emulation) -> type[Trainable]:
    """A trainable class like the given one whose iterations last what the profile says."""

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
    """Sleep until an iteration that began at ``started`` is done, whoever comes and goes meanwhile.

    Raises MemoryError if the trials on the device do not fit its memory; what ``host.placement`` raises.
    """
    done, then = 0.0, started
    while True:
        nodes, trials = host.placement()
        if not profile.fits(trials):
            raise MemoryError(
                f"out of memory on an emulated device: {trials} trials of {profile.memory:g} of its memory each"
            )
        seconds = profile.iteration(nodes, trials) * cost
        now = clock()
        # What has passed since the last look went at the pace of the neighbours of that look, near enough.
        done += (now - then) / seconds
        then = now
        left = (1.0 - done) * seconds
        if left <= 0:
            return
        sleep(min(LOOK_S, left))


class _StockHost:
    """Under stock Ray Tune: the first emulated GPU that Ray gave this process, and who else is on it."""

    _one: _StockHost | None = None

    def __init__(self, emulation: Emulation):
        self._board = OccupancyBoard(emulation.board)
        self._devices = [int(i) for i in ray.get_gpu_ids()] or [0]
        for device in self._devices:
            self._board.enter(device)

    @classmethod
    def of_this_process(cls, emulation: Emulation) -> _StockHost:
        # A process of stock Tune keeps its GPU for as long as it lives, idle between two trials or not.
        if cls._one is None:
            cls._one = cls(emulation)
        return cls._one

    def begin_iteration(self) -> None:
        pass

    def placement(self) -> tuple[tuple[int, ...], int]:
        return (len(self._devices),), self._board.count(self._devices[0])
