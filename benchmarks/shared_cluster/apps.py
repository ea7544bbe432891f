"""Apps of the twin: what they have to do, how fast they do it, and what they report.

An app is a sequence of phases of jobs, as in `fairness`. It works as fast as its GPUs and its true slowdowns allow. A
GPU that it gains does no work for `SWITCH_S` seconds, and it gives back GPUs that its phase cannot use. What it reports
may be wrong or a lie. Workloads are made in `workloads`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from themis_bridge import messages as m
from themis_bridge.bids import Valuation
from themis_bridge.fairness import JobInfo, independent_finish_time, kinds_of
from themis_bridge.locality import GUESSES, Gpu, Phase, cut_in_gangs, whole_gangs

#: Seconds until a GPU that was gained does work. Source: a change takes 35 to 50 s (section 6.2.3).
SWITCH_S = 40.0


@dataclass
class Spec:
    """One app of a workload.

    arrives: seconds on the clock of the simulation.
    phases: its jobs, phase by phase.
    links: its true S on GPUs of several machines, and of several racks.
    user: whose app it is; "": the only one of its user, see `messages.Heartbeat`.
    follows: the app at whose end this one arrives; "": it arrives at ``arrives``.
    together: how many GPUs of one machine each of its jobs needs at once, see `messages.Heartbeat`.
    claims: how many it says that it needs; 0: the truth.
    """

    name: str
    arrives: float
    phases: list[list[JobInfo]]
    links: tuple[float, float] = GUESSES
    user: str = ""
    follows: str = ""
    together: int = 1
    claims: int = 0

    @property
    def told(self) -> int:
        """How many GPUs the arbiter is told that its jobs need at once."""
        return self.claims or self.together

    @cached_property
    def budget(self) -> float:
        """B: all its work, GPU seconds."""
        return sum(job.work for jobs in self.phases for job in jobs)

    @cached_property
    def demand(self) -> int:
        """The most GPUs that any of its phases can use."""
        return max(sum(job.max_gpus for job in jobs) for jobs in self.phases)


@dataclass(frozen=True)
class Facts:
    """What the baselines are told of an app; it is the truth, whatever the app reports.

    arrived: when, s.
    attained: GPU seconds that it has held so far.
    service_left: work left, GPU seconds.
    value: its forecasts with its true slowdowns.
    sensitivity: its S across the cluster; 1 if no job is wider than a GPU.
    quality: decrease of its loss in a second on one GPU.
    age: seconds since it arrived.
    restarts: how often its GPUs changed so that it stood still.
    budget, demand: as of `Spec`.
    """

    arrived: float
    attained: float
    service_left: float
    value: Valuation
    sensitivity: float
    quality: float
    age: float
    restarts: int
    budget: float
    demand: int


class TwinApp:
    """One app as it runs; it is the `Work` of its agent.

    error: its estimate of its work, and of what placements cost it, divided by the truth.
    claim: the work that it reports divided by its estimate.
    lie: by which fraction it overstates the slowdown of placements across machines, so as to win the best machine.
    """

    def __init__(self, spec: Spec, error: float = 1.0, claim: float = 1.0, lie: float = 0.0):
        self.spec = spec
        self.now = spec.arrives
        self.held: dict[str, Gpu] = {}
        #: GPU seconds held so far.
        self.attained = 0.0
        #: GPU seconds held so far, each divided by the S of its placement.
        self.placed = 0.0
        self.finished: float | None = None
        self._phases = [Phase(kinds_of(jobs)) for jobs in spec.phases]
        #: Index of the phase that runs.
        self.phase = 0
        #: The fraction of that phase that is left.
        self._left = 1.0
        #: Until then it does no work because GPUs were gained.
        self._frozen_until = spec.arrives
        self._restarts, self._restarted = 0, -math.inf
        self._claim = error * claim
        machines, racks = (max(1.0, (1 + (s - 1) * error) * (1 + lie)) for s in spec.links)
        self._told = machines, max(machines, racks)

    # --- running

    def begin_at(self, now: float) -> None:
        """It arrives now, because the app that it follows has ended."""
        self.spec = replace(self.spec, arrives=now)
        self.now = self._frozen_until = now

    def _seconds(self) -> float:
        """How long the whole present phase takes on the GPUs that it holds."""
        counts, across = self._placement()
        return self._phases[self.phase].time(counts, across) if sum(counts) else math.inf

    def _placement(self) -> tuple[list[int], float]:
        number = Counter(gpu.machine for gpu in self.held.values())
        counts = [count - count % self.spec.together for count in number.values()]
        return counts, self.spec.links[len({gpu.rack for gpu in self.held.values()}) > 1]

    def advance(self, now: float) -> None:
        """Work until ``now``, which must not be after `next_change`."""
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
        """When the present phase ends if its GPUs do not change."""
        if not self.held or self.finished is not None:
            return math.inf
        return max(self.now, self._frozen_until) + self._left * self._seconds()

    def gain_gpu(self, gpu: Gpu) -> None:
        """It holds one more GPU."""
        self.held[gpu.id] = gpu
        if self.now > self._restarted:
            self._restarts, self._restarted = self._restarts + 1, self.now
        # Only the new GPU idles for SWITCH_S. Here all stand still for the time that loses as many GPU seconds.
        count, still = len(self.held), max(0.0, self._frozen_until - self.now)
        self._frozen_until = self.now + (still * (count - 1) + SWITCH_S) / count

    def lose_gpu(self, gpu: str) -> None:
        """It does not hold the GPU any more."""
        self.held.pop(gpu, None)

    def surplus(self) -> list[str]:
        """The GPUs that the present phase cannot use, chosen from the machines where it has fewest.

        Of an app that needs gangs these are whole ones. What is left of a torn one is `torn`.
        """
        demand, together = self._phases[self.phase].demand, self.spec.together
        over = whole_gangs(self.held.values(), together) - demand
        if over <= 0:
            return []
        count = Counter(gpu.machine for gpu in self.held.values())
        order = sorted(self.held.values(), key=lambda gpu: (count[gpu.machine], gpu.machine, gpu.id))
        return [gpu.id for gpu in order[: over - over % together]]

    def torn(self) -> list[str]:
        """The GPUs that are in no whole gang."""
        return cut_in_gangs({name: gpu.machine for name, gpu in self.held.items()}, self.spec.together)[1]

    # --- what it reports

    def _rest(self, factor: float) -> Sequence[Phase]:
        """The work left, multiplied by ``factor``."""
        rest = [self._phases[self.phase].part(self._left * factor)]
        return rest + [phase.part(factor) if factor != 1 else phase for phase in self._phases[self.phase + 1 :]]

    def report(self) -> m.Report:
        phases = tuple(phase.kinds for phase in self._rest(self._claim))
        done = max(0.0, self.spec.budget * self._claim - sum(kind.work for kinds in phases for kind in kinds))
        return TwinReport(phases, done, self.spec.demand, across=self._told, facts=self.facts())

    def facts(self) -> Facts:
        rest = self._rest(1.0)
        left = sum(phase.work for phase in rest)
        done = 1 - left / self.spec.budget
        return Facts(
            arrived=self.spec.arrives,
            attained=self.attained,
            service_left=left,
            value=Valuation(rest, 0.0, 1.0, self.spec.links, together=self.spec.together),
            sensitivity=self.spec.links[1] if self._phases[self.phase].widest > 1 else 1.0,
            # Judgement: the loss is 1 / (1 + 9 * progress), so it falls to a tenth; here its derivative by time on one
            # GPU.
            quality=9 / (1 + 9 * done) ** 2 / self.spec.budget,
            age=self.now - self.spec.arrives,
            restarts=self._restarts,
            budget=self.spec.budget,
            demand=self.spec.demand,
        )


@dataclass(frozen=True)
class TwinReport(m.Report):
    """A report with what policies beside Themis need to know of the app."""

    facts: Facts | None = None


def rho(jct: float, spec: Spec, cluster_gpus: int, contention: float) -> float:
    """The finish-time fairness of an app that took ``jct`` seconds."""
    return jct / independent_finish_time(spec.budget, cluster_gpus, spec.demand, contention)


def average_contention(lives: Sequence[tuple[float, float, str]], own: int) -> float:
    """N of `independent_finish_time`: the `app_record.crowding` of app number ``own``, averaged over its life.

    ``lives``: (arrival, end, user) of every app.
    """
    start, end, user = lives[own]
    there = [
        (max(start, begin), min(end, until), whose) for begin, until, whose in lives if begin < end and until > start
    ]
    changes = sorted(
        [(begin, 1, whose) for begin, _, whose in there] + [(until, -1, whose) for _, until, whose in there]
    )
    count: Counter[str] = Counter()
    users, total, since = 0, 0.0, start
    for at, change, whose in changes:
        total += (at - since) * users * count[user]
        since = at
        users += (count[whose] + change > 0) - (count[whose] > 0)
        count[whose] += change
    return max(1.0, total / (end - start))
