"""Apps of the twin: what they have to do, how fast they do it, and what they say of it.

An app is phases of jobs, one after the other, as in `fairness`. It works as fast as its GPUs and its true
slowdowns allow, has no use of a new GPU for `SWITCH_S`, gives back what a phase cannot use, and answers its agent
with estimates that may be wrong or lies. Workloads are made in `workloads`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from themis_bridge.bids import Valuation
from themis_bridge.fairness import JobInfo, independent_finish_time
from themis_bridge.locality import GUESSES, Gpu, Phase, Slowdowns

#: Seconds until a GPU that was gained does work: a change takes 35 to 50 (section 6.2.3).
SWITCH_S = 40.0


@dataclass
class Spec:
    """One app of a workload. ``links``: its true S by link. ``arrives``: seconds."""

    name: str
    arrives: float
    phases: list[list[JobInfo]]
    links: dict[str, float] = field(default_factory=lambda: dict(GUESSES))

    @cached_property
    def budget(self) -> float:
        """B, GPU seconds."""
        return sum(job.work for jobs in self.phases for job in jobs)

    @cached_property
    def demand(self) -> int:
        return max(sum(job.max_gpus for job in jobs) for jobs in self.phases)


@dataclass(frozen=True)
class Facts:
    """What the baselines go by. ``service``: GPU seconds. ``quality``: loss decrease a second on one GPU."""

    arrived: float
    attained: float
    service_left: float
    value: Valuation
    sensitivity: float
    quality: float


class TwinApp:
    """One app as it runs; its agent's `Work`.

    ``error``: factor on what it believes to be left and on what it believes that placements cost. ``claim``: what it
    says that it has to do over what it believes. ``lie``: by what share it overstates the cost of bad placements and
    understates that of good ones, to win the best machine.
    """

    def __init__(self, spec: Spec, error: float = 1.0, claim: float = 1.0, lie: float = 0.0):
        self.spec = spec
        self.now = spec.arrives
        self.held: dict[str, Gpu] = {}
        #: GPU seconds held; seconds * GPUs weighted by 1/S.
        self.attained = self.placed = 0.0
        self.finished: float | None = None
        self._phases = [Phase(jobs) for jobs in spec.phases]
        #: Index of the one that runs.
        self.phase = 0
        self._left = 1.0
        self._frozen_until = spec.arrives
        self._claim = error * claim
        self._true = Slowdowns(dict(spec.links))
        told = {name: 1 + (s - 1) * error for name, s in spec.links.items()}
        if lie:
            told = {name: s * (1 + lie) if name in ("rack", "cluster") else s for name, s in told.items()}
        self._told = Slowdowns({name: max(1.0, s) for name, s in told.items()})

    # --- running

    def _seconds(self) -> float:
        """How long a whole run of the present phase takes on what is held."""
        if not self.held:
            return math.inf
        return self._phases[self.phase].time(*self._placement(self._true))

    def _placement(self, slowdowns: Slowdowns) -> tuple[list[int], float]:
        counts = list(Counter(gpu.machine for gpu in self.held.values()).values())
        racks = {gpu.rack for gpu in self.held.values()}
        return counts, slowdowns.of("cluster" if len(racks) > 1 else "rack")

    def advance(self, now: float) -> None:
        """Work until ``now``; the caller stops at `next_change`."""
        if self.held:
            passed = now - self.now
            self.attained += passed * len(self.held)
            ideal = self._phases[self.phase].time([len(self.held)], 1.0)
            self.placed += passed * len(self.held) * ideal / self._seconds()
        working = now - max(self.now, self._frozen_until)
        self.now = now
        if working > 0 and self.held:
            self._left -= working / self._seconds()
        if self._left <= 1e-9:
            self.phase, self._left = self.phase + 1, 1.0
            if self.phase == len(self._phases):
                self.finished = now

    def next_change(self) -> float:
        """When the present phase ends if nothing changes."""
        if not self.held or self.finished is not None:
            return math.inf
        return max(self.now, self._frozen_until) + self._left * self._seconds()

    def give(self, gpu: Gpu) -> None:
        self.held[gpu.id] = gpu
        # The others go on meanwhile: as long as all would have to stand still for the GPU seconds that newcomers lose.
        count, still = len(self.held), max(0.0, self._frozen_until - self.now)
        self._frozen_until = self.now + (still * (count - 1) + SWITCH_S) / count

    def take(self, gpu: str) -> None:
        self.held.pop(gpu, None)

    def surplus(self) -> list[str]:
        """GPUs that the present phase cannot use: the most scattered ones."""
        over = len(self.held) - self._phases[self.phase].demand
        if over <= 0:
            return []
        count = Counter(gpu.machine for gpu in self.held.values())
        order = sorted(self.held.values(), key=lambda gpu: (count[gpu.machine], gpu.machine, gpu.id))
        return [gpu.id for gpu in order[:over]]

    # --- what it says

    def _rest(self, factor: float) -> Sequence[Phase]:
        rest = [self._phases[self.phase].part(self._left * factor)]
        return rest + [phase.part(factor) if factor != 1 else phase for phase in self._phases[self.phase + 1 :]]

    def valuation(self, contention: float, cluster_gpus: int) -> Valuation:
        independent = independent_finish_time(
            self.spec.budget * self._claim, cluster_gpus, self.spec.demand, contention
        )
        return Valuation(self._rest(self._claim), self.now - self.spec.arrives, independent, self._told)

    def facts(self) -> Facts:
        rest = self._rest(1.0)
        left = sum(phase.work for phase in rest)
        done = 1 - left / self.spec.budget
        return Facts(
            arrived=self.spec.arrives,
            attained=self.attained,
            service_left=left,
            value=Valuation(rest, 0.0, 1.0, self._true),
            sensitivity=self.spec.links["cluster"] if self._phases[self.phase].widest > 1 else 1.0,
            # A loss that falls as 1 / (1 + 9 * progress): the derivative by time on one GPU.
            quality=9 / (1 + 9 * done) ** 2 / self.spec.budget,
        )


def rho(jct: float, spec: Spec, cluster_gpus: int, contention: float) -> float:
    """The finish-time fairness that an app has got."""
    return jct / independent_finish_time(spec.budget, cluster_gpus, spec.demand, contention)


def average_contention(specs: Iterable[tuple[float, float, float]], start: float, end: float) -> float:
    """Mean over [start, end] of the sum of weights of what is in the system; ``specs``: (weight, from, until)."""
    total = sum(weight * max(0.0, min(end, until) - max(start, begin)) for weight, begin, until in specs)
    return max(1.0, total / (end - start))
