"""Where GPUs are, and what a placement costs an app.

S(G) >= 1 is set by the slowest link that a job's GPUs use: nothing inside a machine, more across machines and
across racks. An app starts with the paper's guesses and replaces them by measured iteration times. Which
placements to bid on is decided in `bids`.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from themis_bridge.errors import ThemisError
from themis_bridge.fairness import NOTHING, JobInfo

#: Links, fastest first, and what they cost before anything was measured (footnote 3).
GUESSES: Mapping[str, float] = {"slot": 1.0, "machine": 1.0, "rack": 1.1, "cluster": 1.3}
#: Iteration times remembered of one width and link.
MEMORY = 9


@dataclass(frozen=True)
class Gpu:
    """One GPU of the cluster. ``kind``: its type; equal kinds are equally fast."""

    id: str
    machine: str
    rack: str = "rack"
    slot: str = "slot"
    kind: str = "gpu"


def link(gpus: Iterable[Gpu]) -> str:
    """The slowest link between these GPUs."""
    gpus = list(gpus)
    for name, places in (
        ("slot", {(gpu.machine, gpu.slot) for gpu in gpus}),
        ("machine", {gpu.machine for gpu in gpus}),
        ("rack", {gpu.rack for gpu in gpus}),
    ):
        if len(places) <= 1:
            return name
    return "cluster"


@dataclass
class Slowdowns:
    """One app's S by link, and how fast it is on each kind of GPU; guessed, then measured.

    A guess is replaced by the median of (time on the link * width) / (time on one GPU), never below 1.
    """

    guesses: Mapping[str, float] = field(default_factory=lambda: dict(GUESSES))
    #: kind of GPU -> iterations per second over those of the slowest kind; a kind that is not here counts as 1.
    speeds: Mapping[str, float] = field(default_factory=dict)
    _serial: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))
    _seen: dict[str, deque[float]] = field(default_factory=dict)

    def measured(self, gpus: Sequence[Gpu], seconds: float) -> None:
        """One iteration of one job took ``seconds`` on these GPUs."""
        if not gpus or not (math.isfinite(seconds) and seconds > 0):
            raise ThemisError(f"an iteration of {seconds!r} s on {len(gpus)} GPUs; expected seconds > 0 and a GPU")
        spent = seconds * min(self.speed(gpu) for gpu in gpus)
        if len(gpus) == 1:
            self._serial.append(spent)
        else:
            self._seen.setdefault(link(gpus), deque(maxlen=MEMORY)).append(spent * len(gpus))

    def of(self, name: str) -> float:
        """S of a link. A slower link is never better than a faster one."""
        worst = 1.0
        for each in GUESSES:
            seen = self._seen.get(each)
            known = median(seen) / median(self._serial) if seen and self._serial else self.guesses[each]
            worst = max(worst, known)
            if each == name:
                return worst
        raise ThemisError(f"{name!r} is not a link; use one of: {', '.join(GUESSES)}")

    def speed(self, gpu: Gpu) -> float:
        return self.speeds.get(gpu.kind, 1.0)


class Phase:
    """The sums over a phase's jobs that its time depends on, taken once: a bid asks for many placements."""

    def __init__(self, jobs: Iterable[JobInfo]):
        self.jobs = 0
        #: The most GPUs that they can use.
        self.demand = 0
        self.work = self.felt = 0.0
        #: (max_gpus, sensitivity) -> work of the longest such job.
        self._longest: dict[tuple[int, float], float] = {}
        for job in jobs:
            self.jobs += 1
            self.demand += job.max_gpus
            self.work += job.work
            self.felt += job.work * job.sensitivity
            key = (job.max_gpus, job.sensitivity)
            self._longest[key] = max(job.work, self._longest.get(key, 0.0))
        self.widest = max((width for width, _ in self._longest), default=1)

    def part(self, share: float) -> Phase:
        """The same jobs with that share of their work."""
        new = copy.copy(self)
        new.work, new.felt = self.work * share, self.felt * share
        new._longest = {key: work * share for key, work in self._longest.items()}
        return new

    def time(self, counts: Sequence[int], across: float, faster: float = 1.0) -> float:
        """Seconds on GPUs of which ``counts`` lie together, a count for every place.

        Jobs as wide as fit into a place feel no slowdown; jobs that span places feel ``across``. The tuner takes
        the better of the two, and the better width, so another GPU never makes the phase later. ``faster``: speed
        of the GPUs. No GPU at all counts as a share ``NOTHING`` of one.
        """
        if not self.work:
            return 0.0
        total = sum(counts)
        if total == 0:
            return self.work / (NOTHING * faster)
        best = math.inf
        if self.widest > 1 and total > 1:
            best = self._capped(total, total, across)
        width = 1
        while True:
            whole = sum(size // width for size in counts)
            if whole:
                best = min(best, self._capped(whole if width == 1 else min(whole, self.jobs) * width, width, 1.0))
            if width >= self.widest:
                return best / faster
            width = min(2 * width, self.widest)

    def _capped(self, usable: int, width: int, slowdown: float) -> float:
        """Seconds on ``usable`` GPUs when no job is wider than ``width``."""
        extra = slowdown - 1.0
        longest = max(work * (1.0 + feels * extra) / min(width, most) for (most, feels), work in self._longest.items())
        return max((self.work + self.felt * extra) / usable, longest)
