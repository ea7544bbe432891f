"""Paced trainables: Ray Tune trainables whose iterations last as long as a profile says.

The pace is kept inside ``step``, so that the times that Tune itself measures (``time_this_iter_s``) are the emulated
ones. In FluidTune's workers an `EmulatedSession` knows the trial's placement. `benchmarks.stock_host` has the same
class in stock Ray Tune's processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ray.tune import Trainable

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
    """What knows a trial's placement: an `EmulatedSession` in FluidTune's workers."""

    def begin_iteration(self) -> None:
        """Called before each iteration."""

    def placement(self) -> tuple[tuple[int, ...], int]:
        """The number of the trial's devices on each node, and the number of trials on the worker's own device.

        It may take a while, by which the iteration is longer: a pause.
        """
        ...


_host: EmulatedHost | None = None


def use_host(host: EmulatedHost | None) -> None:
    """Make this the host that the paced trainables of this process ask."""
    global _host
    _host = host


def paced(trainable: type[Trainable], emulation: Emulation) -> type[Trainable]:
    """A subclass of the given trainable class whose iterations last as long as the profile says."""

    class Paced(trainable):  # type: ignore[valid-type, misc]
        def step(self) -> dict[str, Any]:
            host = _host_here()
            host.begin_iteration()
            started = time.perf_counter()
            result: dict[str, Any] = super().step()
            keep_pace(emulation.profile, float(self.config.get(COST_KEY, 1.0)), host, started)
            return result

    Paced.__name__, Paced.__qualname__ = trainable.__name__, trainable.__qualname__
    return Paced


def _host_here() -> EmulatedHost:
    # Not in `Paced` itself: a class made in a function is pickled with copies of the globals that it uses.
    assert _host is not None
    return _host


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
