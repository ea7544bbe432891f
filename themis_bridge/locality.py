"""Where GPUs are, and what a placement costs an app.

How far a job's GPUs lie apart decides its slowdown S(G) >= 1: none inside a machine, more across machines, most across
racks. An app starts with the paper's guesses and replaces them by measured iteration times. `bids` decides which
placements to bid on.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

from themis_bridge.errors import ThemisError
from themis_bridge.fairness import NOTHING, JobKind

#: What names a GPU: its id, or a job's number of it.
Key = TypeVar("Key", str, int)

#: S on GPUs of several machines, and of several racks, before anything was measured. Source: the paper, footnote 3.
GUESSES = (1.1, 1.3)
#: How many iteration times are remembered for each kind of placement: the median of nine ignores four outliers.
MEMORY = 9
#: GPUs of one machine that an app can need at once. Judgement: no machine has more.
MOST_TOGETHER = 1024


@dataclass(frozen=True)
class Gpu:
    """One GPU of the cluster and its place. ``kind``: its type; GPUs of one kind are equally fast."""

    id: str
    machine: str
    rack: str = "rack"
    kind: str = "gpu"


def check_together(number: int) -> None:
    """Raise ThemisError if an app cannot need that many GPUs of one machine at once."""
    if not isinstance(number, int) or not 1 <= number <= MOST_TOGETHER or number & (number - 1):
        raise ThemisError(
            f"{number!r} GPUs at once: gangs have 1, 2, 4, 8, 16, ... GPUs, {MOST_TOGETHER} at most; ask for such a "
            "number"
        )


def whole_gangs(gpus: Iterable[Gpu], together: int) -> int:
    """How many of these GPUs are of use to an app whose trials need ``together`` GPUs of one machine at once."""
    return sum(count - count % together for count in Counter(gpu.machine for gpu in gpus).values())


def cut_in_gangs(machines: Mapping[Key, str], together: int) -> tuple[list[Key], list[Key]]:
    """The GPUs in whole gangs, gang by gang, and those beyond, which are of no use; see `whole_gangs`.

    ``machines``: GPU -> its machine. Of each machine the first GPUs make the gangs.
    """
    own: dict[str, list[Key]] = {}
    for gpu, machine in machines.items():
        own.setdefault(machine, []).append(gpu)
    whole: list[Key] = []
    torn: list[Key] = []
    for gpus in own.values():
        number = len(gpus) - len(gpus) % together
        whole += gpus[:number]
        torn += gpus[number:]
    return whole, torn


class Slowdowns:
    """What placements cost one app, guessed or measured.

    S is the median of (time of an iteration on several GPUs * their number / time of one on one GPU). It is at least 1,
    and at least that of GPUs that lie closer together.
    """

    def __init__(self) -> None:
        self._seen = [deque[float](maxlen=MEMORY) for _ in range(3)]

    def measured(self, gpus: Sequence[Gpu], share: float) -> None:
        """Note that an iteration on these GPUs took ``share`` of its time on one GPU."""
        # 0: they are on one machine; 1: on several machines of one rack; 2: in several racks.
        spread = (len({gpu.machine for gpu in gpus}) > 1) + (len({gpu.rack for gpu in gpus}) > 1)
        self._seen[spread].append(share * len(gpus))

    @property
    def across(self) -> tuple[float, float]:
        """S on GPUs of several machines, and of several racks."""
        found = [median(seen) if seen else guess for seen, guess in zip(self._seen, (1.0, *GUESSES), strict=True)]
        machines = max(1.0, *found[:2])
        return machines, max(machines, found[2])


class Phase:
    """One phase as the sums over its jobs that its time depends on; a bid asks for the times of many placements."""

    def __init__(self, kinds: Iterable[JobKind]):
        self.kinds = tuple(kinds)
        self.jobs = sum(kind.number for kind in self.kinds)
        #: The most GPUs that all its jobs can use together.
        self.demand = sum(kind.number * kind.max_gpus for kind in self.kinds)
        #: GPU seconds of all jobs.
        self.work = sum(kind.work for kind in self.kinds)
        self.widest = max((kind.max_gpus for kind in self.kinds), default=1)

    def part(self, share: float) -> Phase:
        """The same jobs with the fraction ``share`` of their work."""
        return Phase(replace(kind, work=kind.work * share, longest=kind.longest * share) for kind in self.kinds)

    def time(self, counts: Sequence[int], across: float) -> float:
        """Seconds that the phase takes with the best width of its jobs on a placement.

        A job that stays inside a machine feels no slowdown; one that spans machines feels ``across``. Because the
        better of the two and the best width count, another GPU never makes the phase longer.

        ``counts``: number of GPUs on each machine; without any GPU the app counts as having the fraction `NOTHING`.
        """
        if not self.work:
            return 0.0
        total = sum(counts)
        if total == 0:
            return self.work / NOTHING
        best = math.inf
        if self.widest > 1 and total > 1:
            best = self._capped(total, total, across)
        width = 1
        while True:
            whole = sum(size // width for size in counts)
            if whole:
                best = min(best, self._capped(whole if width == 1 else min(whole, self.jobs) * width, width, 1.0))
            if width >= self.widest:
                return best
            width = min(2 * width, self.widest)

    def _capped(self, usable: int, width: int, slowdown: float) -> float:
        """Seconds on ``usable`` GPUs if no job may use more than ``width`` GPUs."""
        return slowdown * max(self.work / usable, *(kind.longest / min(width, kind.max_gpus) for kind in self.kinds))
