"""What a tuning job has to do, as the twin needs it. `fluidtune.report.recorded` reads it off a run's event log."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fluidtune.engine.messages import Kind
from fluidtune.profiles import Profile


@dataclass(frozen=True)
class Stage:
    """What a trial does between two decisions of the tuning algorithm: ``iterations`` in ``group``.

    ``told``: the iterations left, as the engine hears; None: it does not hear. ``share``: the share of one device that
    the script asked for, or a whole number of devices.
    """

    group: str
    iterations: int
    told: float | None
    share: float = 1.0


@dataclass(frozen=True)
class RecordedTrial:
    """One trial: its stages, and ``cost``, its seconds per iteration divided by those of the job's profile."""

    trial: str
    stages: tuple[Stage, ...]
    cost: float = 1.0


@dataclass(frozen=True)
class Costs:
    """Seconds that a job spends otherwise than in training.

    ``begin``: from the start of the job until its first worker is asked for. ``cold``: the start of a worker process,
    if no other starts. ``at_once``: not seconds, but how many processes can start at a time and take no longer.
    ``first``: by how much the first iteration in a new process is longer than others, for imports for example.
    ``turn``: between two iterations, and before the first one in a process that is there.
    """

    begin: float = 0.0
    cold: float = 0.0
    at_once: float = math.inf
    first: float = 0.0
    turn: float = 0.0

    def starts(self, most: int) -> tuple[int, float]:
        """How many processes start at a time, ``most`` if any number may, and the seconds of a start among so many."""
        if math.isinf(self.at_once):
            return most, self.cold
        count = math.ceil(self.at_once)
        return count, self.cold * count / self.at_once


@dataclass(frozen=True)
class RecordedJob:
    """A tuning job.

    ``synchronous`` and ``concurrency``: by group, as in `fluidtune.engine.GroupAnnounced`. ``pending``: how many new
    trials the search algorithm offers at once; None: all. ``kind``: what its trials turn out to be when they have
    run. ``growable``: they turn out to be able to have several workers. ``waits``: a paused trial goes on in its own
    process, as on cores. ``reuses``: a process serves one trial of its device after another, as with
    ``reuse_actors=True`` and on emulated devices.
    """

    trials: tuple[RecordedTrial, ...]
    profile: Profile
    synchronous: Mapping[str, bool]
    concurrency: Mapping[str, int | None] = field(default_factory=dict)
    pending: int | None = None
    kind: Kind = "elastic"
    growable: bool = True
    waits: bool = False
    reuses: bool = False
    costs: Costs = Costs()
    #: Settings of `fluidtune.engine.Engine`.
    max_packing: int | None = None
    concurrent_packing: int = 1
    max_workers: int | None = None

    @property
    def widest(self) -> int:
        """The most devices of one node that a trial asks for."""
        return max((math.ceil(stage.share) for trial in self.trials for stage in trial.stages), default=1)


def grid(trials: int, iterations: int, profile: Profile, **settings: Any) -> RecordedJob:
    """A job of ``trials`` equal trials in one synchronous group; ``settings``: further fields of `RecordedJob`."""
    stage = Stage("all", iterations, float(iterations))
    listed = tuple(RecordedTrial(f"trial{k}", (stage,)) for k in range(trials))
    return RecordedJob(listed, profile, {"all": True}, **settings)
