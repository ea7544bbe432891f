"""Finish-time fairness: rho = T_sh / T_id (Themis, section 4.3).

T_sh is when an app finishes on the GPUs that it gets, T_id when it would on its own share of the cluster. An app
is a sequence of phases; a phase is a list of jobs that all have to end before the next one begins. A single job
is one phase of one job; successive halving (HyperBand, ASHA) has a phase a rung; performance-curve stopping is
one phase of what still runs. Seconds everywhere; a budget is GPU seconds. Nothing is bid or granted here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from themis_bridge.errors import ThemisError

#: A bidder that would hold nothing values it as this share of one GPU. A bid is finite; by the paper its rho is
#: unbounded, so that the first GPU is worth more to it than another one to anybody else, however far behind.
NOTHING = 0.01


@dataclass(frozen=True)
class JobInfo:
    """One training job: the paper's figure 7, and the most GPUs that it can use.

    ``iters_remaining``: iterations left. ``time_per_iter``: seconds of one on one GPU. ``sensitivity``: how much of
    a placement's slowdown it feels, 0 none, 1 all of it.
    """

    iters_remaining: float
    time_per_iter: float
    max_gpus: int = 1
    sensitivity: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("iters_remaining", 0), ("time_per_iter", 0), ("max_gpus", 1), ("sensitivity", 0)):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= least):
                raise ThemisError(f"{name}={value!r} of a job: expected a finite number >= {least}")

    @property
    def work(self) -> float:
        """GPU seconds left, on one GPU."""
        return self.iters_remaining * self.time_per_iter

    def slowdown(self, placement: float) -> float:
        """This job's S on a placement whose S is ``placement`` for a job of sensitivity 1."""
        return 1.0 + self.sensitivity * (placement - 1.0)


def phase_time(jobs: Sequence[JobInfo], gpus: float, slowdown: float = 1.0) -> float:
    """Seconds of one phase on ``gpus`` GPUs when the tuner splits them as well as can be (eq. 2: max over jobs).

    Jobs may take turns and be as wide as ``max_gpus``, so no split ends before all GPUs have done all work, nor
    before the longest job has run at its widest, and one ends then.
    """
    works = [job.work * (job.slowdown(slowdown) if slowdown != 1.0 else 1.0) for job in jobs]
    total = sum(works)
    if total == 0:
        return 0.0
    if gpus <= 0:
        return math.inf
    longest = max(work / min(gpus, job.max_gpus) for work, job in zip(works, jobs, strict=True))
    return max(total / gpus, longest)


def shared_finish_time(
    phases: Iterable[Sequence[JobInfo]], gpus: float, elapsed: float = 0.0, slowdown: float = 1.0
) -> float:
    """T_sh (eq. 1 and 2): seconds from the app's start to its end if it had ``gpus`` GPUs from now on.

    Args:
        phases: what is left, the running phase first.
        gpus: how many GPUs; 0 gives infinity while anything is left.
        elapsed: seconds since the app started, queueing included.
        slowdown: S of the placement, >= 1.

    Raises:
        ThemisError: a number that cannot be.
    """
    if not (math.isfinite(gpus) and gpus >= 0):
        raise ThemisError(f"gpus={gpus!r}: expected a finite number >= 0")
    if not (math.isfinite(elapsed) and elapsed >= 0):
        raise ThemisError(f"elapsed={elapsed!r}: expected seconds >= 0")
    if not (math.isfinite(slowdown) and slowdown >= 1):
        raise ThemisError(f"slowdown={slowdown!r}: expected a finite number >= 1")
    return elapsed + sum(phase_time(jobs, gpus, slowdown) for jobs in phases)


def independent_finish_time(budget: float, cluster_gpus: float, max_gpus: float, contention: float) -> float:
    """T_id = T_cluster * N_avg: seconds on a share of the cluster of one's own.

    Args:
        budget: B, all GPU seconds of the app, without slowdown.
        cluster_gpus: R_C.
        max_gpus: the most GPUs that the app can use.
        contention: N_avg, the mean over the app's life of the number of apps in the cluster, itself included.

    Raises:
        ThemisError: a number that cannot be.
    """
    if not (math.isfinite(budget) and budget > 0):
        raise ThemisError(f"budget={budget!r}: expected GPU seconds > 0")
    for name, value in (("cluster_gpus", cluster_gpus), ("max_gpus", max_gpus), ("contention", contention)):
        # fractions of a GPU or of an app make no sense
        if not (math.isfinite(value) and value >= 1):
            raise ThemisError(f"{name}={value!r}: expected a finite number >= 1")
    return budget / min(cluster_gpus, max_gpus) * contention


def halving_phases(running: Sequence[JobInfo], rungs: Iterable[tuple[int, float]]) -> list[list[JobInfo]]:
    """Phases of successive halving: the jobs that run now, then a phase of each later rung.

    ``rungs``: of each later rung how many jobs it has and for how many iterations. Nobody knows yet which jobs
    those will be: they count as the median one (section 4.3.3).
    """
    if not running:
        raise ThemisError("successive halving without a running job; leave the app out once it has none")
    typical = JobInfo(
        0,
        median(job.time_per_iter for job in running),
        max(job.max_gpus for job in running),
        median(job.sensitivity for job in running),
    )
    phases = [list(running)]
    for count, iterations in rungs:
        job = JobInfo(iterations, typical.time_per_iter, typical.max_gpus, typical.sensitivity)
        phases.append([job] * count)
    return phases


def curve_phases(forecasts: Iterable[Sequence[JobInfo]]) -> list[list[JobInfo]]:
    """Performance-curve stopping: one phase of what still runs.

    ``forecasts``: of each running job, one JobInfo for every curve that fits what was seen of it. The one that
    lets it run longest counts (section 4.3.2), so that the estimate is never too early.
    """
    return [[max(curves, key=lambda job: job.work) for curves in forecasts]]
