"""The records that the engine keeps of a trial and of a TrialGroup, and the copy of a trial that it shows to others.

Nothing is decided here: `State` and `event_handlers` change the records, the other modules of the room read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from fluidtune.engine.messages import Kind, Traits
from fluidtune.engine.speed import GroupSpeed, TrialSpeed

#: ``waiting``: it is in the queue. ``running``: it holds devices. ``suspending``: it still holds its device and was
#: told to leave. ``paused``: Tune let go of it and may add it again. ``ended``: Tune is done with it.
Status = Literal["waiting", "running", "suspending", "paused", "ended"]

#: Whether a trial can have several workers. ``unknown``: it has not shown that it can. ``held``: it must not have more
#: than it has. ``ended``: they do not help it.
Growth = Literal["unknown", "possible", "held", "ended"]

#: Every change of status that there is, with the events and instructions that cause it. A trial is ``waiting`` at
#: first. docs/engine.md shows the same as a diagram, and a test holds the two equal.
TRANSITIONS: dict[tuple[Status, Status], str] = {
    ("waiting", "running"): "Start, Resume",
    ("waiting", "paused"): "TrialEnded(paused)",
    ("waiting", "ended"): "TrialEnded(stopped, failed)",
    ("running", "suspending"): "Suspend",
    ("running", "waiting"): "WorkerLost, DeviceLost",
    ("running", "paused"): "TrialEnded(paused)",
    ("running", "ended"): "TrialEnded(stopped, failed)",
    ("suspending", "waiting"): "WorkerLost, DeviceLost",
    ("suspending", "paused"): "TrialEnded(paused)",
    ("suspending", "ended"): "TrialEnded(stopped, failed)",
    ("paused", "waiting"): "TrialAdded",
    ("paused", "ended"): "TrialEnded(stopped, failed)",
    ("ended", "waiting"): "TrialAdded",
}

#: Added to a quotient before it is cut to a whole number, so that 1 / (1 / 3) counts as 3.
ROUNDING = 1e-9


class EngineError(ValueError):
    """An event that cannot be true, which means that the shell has an error. The message names the value."""


@dataclass(eq=False)
class Group:
    """A TrialGroup: the unit of scheduling."""

    name: str
    #: Its trials are a batch: the largest goes first, at StaticFluid's widths. Otherwise first come, first served.
    synchronous: bool
    #: Trials of an asynchronous group that may run at once; None: one for each device, or share asked for.
    concurrency: int | None
    #: Iterations that its best trials will do in later groups. Synchronous groups with a longer path go first.
    tail: float
    #: What its trials have found out about speeds.
    speed: GroupSpeed
    #: Its trials that wait, run or are suspending, in the order in which they were added. The values are unused.
    live: dict[str, None] = field(default_factory=dict)
    #: Number of trials in ``live`` that hold devices.
    running: int = 0
    #: Starts of other groups' trials since the last start of its own, while a trial of it waited.
    passed: int = 0

    @property
    def places(self) -> int:
        """How many more of its trials may run at once if there are devices; in a synchronous group all of them."""
        if self.synchronous or self.concurrency is None:
            return len(self.live)
        return self.concurrency - self.running


@dataclass(eq=False)
class Trial:
    """One trial. It is kept for as long as the engine lives, since Tune may add it again."""

    name: str
    group: Group
    kind: Kind
    #: The share of one device that the script asked for, or a whole number of devices.
    asked_share: float
    #: Iterations left, never negative; None: unknown.
    iterations: float | None
    #: Order of adding over all trials. It is new each time that the trial is added or goes to the front.
    number: int
    #: Its turn in its group, lowest first; None: the engine decides which trial is next.
    turn: int | None = None
    #: While it waits, its place in its line of the queue: its turn, -path (seconds) in a synchronous group, or 0.
    order: float = 0.0
    status: Status = "waiting"
    #: Engine time at which ``status`` began.
    since: float = 0.0
    #: Devices that it runs on, the first worker's first. Empty if and only if it is neither running nor suspending.
    devices: tuple[int, ...] = ()
    #: Devices of a resize that is not answered yet, else None. It holds both these and
    #: ``devices``.
    resizing_to: tuple[int, ...] | None = None
    #: The part of each device that it was given: 1.0, or 1 / slots of a shared device. 0.0 if and only if it has none.
    share: float = 0.0
    #: Whether it can have several workers: see `CanGrow` and `GrowthEnded`.
    growth: Growth = "unknown"
    #: Its searched-over hyperparameters.
    traits: Traits = ()
    #: The width that StaticFluid gave it, None before. Read only while it waits in a synchronous group.
    planned: float | None = None
    #: It goes before all others when it waits, since it lost its worker or is being suspended.
    first: bool = False
    #: It has done an iteration since it last started. Before that it may still be loading, and slows no neighbour down.
    settled: bool = False
    #: ``started``: at least once. It gets `Resume` from then on, and late answers about it are possible. ``lost``: it
    #: was, and lost a worker or a device at least once, so that an answer to an earlier resize is possible, too.
    past: Literal["new", "started", "lost"] = "new"
    #: Results to come before the next resize may be tried. Above 0 only after a resize that did not do what was asked.
    cooldown: int = 0
    #: Iterations done in all.
    done: int = 0
    #: How often Tune has given it a longer budget.
    rung: int = 0
    #: Number of iterations, from its first on, at which its budget ends; None: unknown.
    target: float | None = None
    speed: TrialSpeed = field(default_factory=TrialSpeed)
    #: What `RuntimePredictor.predict` answered for ``traits``, and the number of the fit that it answered from.
    prediction: float | None = None
    predicted_by: int = 0
    #: How many whole devices of one node it needs at once; 1 for a trial that is not a gang.
    gang: int = field(init=False)
    #: How many such trials fit a device by the share that the script asked for; 1 if it asked for a whole one.
    slots_by_share: int = field(init=False)

    def __post_init__(self) -> None:
        self.ask_for(self.asked_share)

    def ask_for(self, share: float) -> None:
        """The script asks for this share of one device, or for a whole number of devices."""
        self.asked_share = share
        self.gang = max(1, int(share))
        self.slots_by_share = int(1 / share + ROUNDING) if share < 1 else 1

    def set_budget(self, iterations: float | None) -> None:
        """``iterations`` are left. A budget that ends later than the one before counts as a promotion."""
        target = None if iterations is None else self.done + iterations
        if target is not None and self.target is not None and target > self.target:
            self.rung += 1
        self.iterations, self.target = iterations, target

    @property
    def held(self) -> list[int]:
        """The devices that it runs on, and after them those that it was promised."""
        return list(dict.fromkeys(self.devices + (self.resizing_to or ())))

    @property
    def steady(self) -> bool:
        """It runs, and no resize is under way."""
        return self.status == "running" and self.resizing_to is None

    @property
    def can_grow(self) -> bool:
        """Whether it may ever have more than one worker."""
        return self.growth == "possible" and self.gang <= 1

    @property
    def worth_growing(self) -> bool:
        """At least two iterations are left, as far as is known."""
        return self.iterations is None or self.iterations >= 2


class TrialWork(NamedTuple):
    """The work that a trial has left, for callers that look at all trials often.

    devices, height: as in `TrialView`.
    useful: devices that it needs, has, or would be done sooner with now (`width_rules.growth_pays`).
    widest: the most devices that it could ever use, as far as is known now (`width_rules.widest`).
    iterations: left; None if unknown.
    done: iterations done in all.
    base: seconds per iteration on one worker; an estimate while nothing is measured.
    """

    trial: str
    group: str
    devices: tuple[int, ...]
    useful: int
    widest: int
    iterations: float | None
    done: int
    height: float
    base: float


@dataclass(frozen=True)
class TrialView:
    """What the engine knows of one trial at this moment; a copy."""

    group: str
    status: Status
    #: Devices that it runs on, the first worker's first; empty while it does not run.
    devices: tuple[int, ...]
    #: Workers: a share below 1, or a whole number; 0 while it does not run. Under a lane policy it is the share that
    #: the policy gives it beside the trials that are there.
    width: float
    #: Seconds left on one worker; an estimate while nothing is measured.
    height: float
    #: Seconds per iteration at every width that was measured.
    seconds: dict[float, float]
    #: How often Tune has given it a longer budget.
    rung: int
