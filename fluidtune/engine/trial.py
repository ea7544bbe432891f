"""The records that the engine keeps about a trial and a TrialGroup, and what it shows of them.

Decides nothing: `State` changes the records, the modules beside it read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fluidtune.engine.messages import Kind, Traits
from fluidtune.engine.speed import Pool, Speed

#: ``suspending``: still on its device, told to leave. ``paused``: Tune took it, and may add it again.
Status = Literal["waiting", "running", "suspending", "paused", "ended"]


class EngineError(ValueError):
    """An event that cannot be true, which means that the shell has an error. The message names the value."""


@dataclass(eq=False)
class Group:
    """A TrialGroup: the unit of scheduling."""

    name: str
    #: Largest first, and StaticFluid's widths; else first come, first served.
    synchronous: bool
    #: How many of an asynchronous group may run at once; None: as many as there are devices over share.
    concurrency: int | None
    #: Iterations that follow for its best trials when it is over; synchronous groups with more go first.
    tail: float
    #: What its trials have found out about speeds.
    pool: Pool
    #: Its trials that wait, run or are suspending, in the order added (values are unused).
    live: dict[str, None] = field(default_factory=dict)
    #: How many of ``live`` do not wait.
    running: int = 0
    #: Starts that other groups got since the last one of this, while it had something waiting.
    passed: int = 0


@dataclass(eq=False)
class Trial:
    """One trial, for as long as the engine lives: it may come back."""

    name: str
    group: Group
    kind: Kind
    #: What the script asked of one device, or a whole number of devices.
    asked_share: float
    #: Iterations left; None: nobody knows. Never negative.
    iterations: float | None
    #: Order of adding, over all trials and anew each time it is added.
    number: int
    status: Status = "waiting"
    #: Engine time at which ``status`` began.
    since: float = 0.0
    #: Devices it runs on, the first worker's first. Empty iff status not in (running, suspending).
    devices: tuple[int, ...] = ()
    #: Devices it was told to change to and has not answered yet, else None. What it holds is both together.
    resizing_to: tuple[int, ...] | None = None
    #: The part of each device that it was given: 1.0, or 1/p on a device for p. 0.0 iff it has no devices.
    share: float = 0.0
    #: Its searched-over hyperparameters.
    traits: Traits = ()
    #: Width that StaticFluid gave it, None before; only read while it waits in a synchronous group.
    planned: float | None = None
    #: It waits before all others, since it lost its worker or was told to suspend.
    first: bool = False
    #: Where workers of it may still live since it lost one, likeliest first: it goes on at once there. Empty again
    #: when it has done an iteration.
    homes: tuple[int, ...] = ()
    #: It has done an iteration since it last started: until then it may still be loading, and nobody feels it.
    settled: bool = False
    #: It was started at least once, so that it gets Resume and late answers about it are possible.
    has_run: bool = False
    #: It lost a worker or a device at least once, so that an answer to an older resize is possible.
    has_lost: bool = False
    #: Results to come before the next resize may be tried; > 0 only after one that did not do what was asked.
    cooldown: int = 0
    #: Iterations done, all told.
    done: int = 0
    #: Seconds that widths above 1 saved against one worker, less the pauses of its resizes.
    gained: float = 0.0
    #: How often Tune has given it a longer budget.
    rung: int = 0
    #: Iterations, all told, at which its budget ends; None: nobody knows.
    target: float | None = None
    speed: Speed = field(default_factory=Speed)

    def set_budget(self, iterations: float | None) -> None:
        """So many iterations are left. More in all than before: it was promoted."""
        target = None if iterations is None else self.done + iterations
        if target is not None and self.target is not None and target > self.target:
            self.rung += 1
        self.iterations, self.target = iterations, target

    @property
    def gang(self) -> int:
        """How many whole devices of one node it needs; 1 for any other trial."""
        return max(1, int(self.asked_share))

    @property
    def width(self) -> float:
        """Workers it has now: its share if it has but one device, 0 while it waits."""
        return len(self.devices) * self.share

    @property
    def held(self) -> list[int]:
        """The devices it runs on and, after them, those it was promised."""
        return list(dict.fromkeys(self.devices + (self.resizing_to or ())))

    @property
    def steady(self) -> bool:
        """It runs, and no resize is under way."""
        return self.status == "running" and self.resizing_to is None


@dataclass(frozen=True)
class TrialView:
    """What the engine knows of one trial at this moment; a copy."""

    trial: str
    group: str
    kind: Kind
    status: Status
    #: Engine time at which ``status`` began.
    since: float
    #: Devices it runs on, the first worker's first; empty while it does not run.
    devices: tuple[int, ...]
    #: Devices of a resize that is not answered yet, else None.
    resizing_to: tuple[int, ...] | None
    #: Part of each device that it was given, 0.0 while it does not run.
    share: float
    #: Workers: a share below 1, or a whole number; 0 while it does not run. Under a lane policy the share that
    #: this gives it beside those that are there.
    width: float
    #: Iterations left, None if unknown.
    iterations: float | None
    #: Iterations done, all told.
    done: int
    #: Seconds left on one worker, an estimate while nothing is measured.
    height: float
    #: Seconds per iteration on one worker, likewise.
    base: float
    #: Seconds per iteration at every width measured.
    seconds: dict[float, float]
    #: Seconds that growing saved so far, less what its resizes cost.
    gained: float
    #: How often Tune has given it a longer budget.
    rung: int
    #: Parts of a device's memory that it needs, (persistent, ephemeral): its own, else what others of its job need.
    #: None if nobody knows, and where devices are shared by count.
    need: tuple[float, float] | None
    #: What it must not be promised less than, likewise: it lacked that much before.
    least: tuple[float, float] | None
