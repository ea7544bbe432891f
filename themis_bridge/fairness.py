"""Finish-time fairness: rho = T_sh / T_id (Themis, section 4.3).

T_sh is the time that an app takes on the GPUs that it gets, T_id the time that it would take on its own share of the
cluster. An app is a sequence of phases. A phase is a list of jobs that all have to end before the next phase begins: a
single job is one phase of one job; successive halving (HyperBand, ASHA) has one phase for each rung; performance-curve
stopping is one phase of all jobs that still run. Times are seconds, budgets are GPU seconds. Nothing is bid or granted
here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from themis_bridge.errors import ThemisError

#: An app without any GPU is valued as if it had this fraction of one. By the paper its rho is unbounded, but a bid must
#: be finite. So small that a first GPU is worth more to an app than another GPU to any other app.
NOTHING = 0.01
#: rho of an app that never ends and holds no GPU: finite, as a bid must be, and far above the rho of any app that ends,
#: which is at most some thousands (`NOTHING`).
UNSERVED = 1e9


@dataclass(frozen=True)
class JobInfo:
    """One training job (figure 7 of the paper).

    iters_remaining: iterations left.
    time_per_iter: seconds of one iteration on one GPU.
    max_gpus: the most GPUs that it can use.
    """

    iters_remaining: float
    time_per_iter: float
    max_gpus: int = 1

    def __post_init__(self) -> None:
        for name, least in (("iters_remaining", 0), ("time_per_iter", 0), ("max_gpus", 1)):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= least):
                raise ThemisError(f"{name}={value!r} of a job: expected a finite number >= {least}")

    @property
    def work(self) -> float:
        """Work left: seconds on one GPU."""
        return self.iters_remaining * self.time_per_iter


@dataclass(frozen=True)
class JobKind:
    """The jobs of one phase that are alike, as the sums that the phase's time depends on.

    max_gpus: as of `JobInfo`.
    number: how many jobs there are.
    work: the work left of all of them, GPU seconds.
    longest: that of the longest one, GPU seconds.
    """

    max_gpus: int
    number: int
    work: float
    longest: float


def kinds_of(jobs: Iterable[JobInfo]) -> tuple[JobKind, ...]:
    """The jobs of one phase by kind."""
    works: dict[int, list[float]] = {}
    for job in jobs:
        works.setdefault(job.max_gpus, []).append(job.work)
    return tuple(JobKind(width, len(each), sum(each), max(each)) for width, each in works.items())


def independent_finish_time(budget: float, cluster_gpus: float, max_gpus: float, contention: float) -> float:
    """T_id = B / min(R_C / N, max_gpus): seconds that an app's work takes on its share of the cluster, R_C / N GPUs.

    Where the app can use the whole cluster this is the paper's T_cluster * N_avg, with T_cluster = B / min(R_C,
    max_gpus) (eq. 1 and 2). Where it cannot, the paper gives it N times as long as on all GPUs that it can use, though
    they may fit into its share; `docs/arbiter.md` says why that is not done here. With N = 1 this is T_cluster.

    Args:
        budget: B, all work of the app in GPU seconds, without slowdown, > 0.
        cluster_gpus: R_C, GPUs in the cluster, >= 1.
        max_gpus: the most GPUs that the app can use, >= 1.
        contention: N_avg, the number of apps in the cluster (this one included), averaged over the app's life, >= 1.

    Raises:
        ThemisError: an argument is not finite or out of range.
    """
    if not (math.isfinite(budget) and budget > 0):
        raise ThemisError(f"budget={budget!r}: expected GPU seconds > 0")
    for name, value in (("cluster_gpus", cluster_gpus), ("max_gpus", max_gpus), ("contention", contention)):
        if not (math.isfinite(value) and value >= 1):
            raise ThemisError(f"{name}={value!r}: expected a finite number >= 1")
    return budget / min(cluster_gpus / contention, max_gpus)


def endless_rho(wanted: float, share: float, gpus: float) -> float:
    """rho of an app that never ends: what it could do with its share, over what it does with ``gpus`` GPUs.

    It is 1 if the app holds its share, or all GPUs that it wants where these are fewer, and no more than 1 with more of
    them, whatever it says. So a wish that is too large gains nothing beyond the share.
    ``wanted``: GPUs that its load wants now, >= 1. ``share``: R_C / N_avg, GPUs.
    """
    return min(wanted, share) / min(wanted, gpus) if gpus > 0 else UNSERVED


def equal_shares(demands: Mapping[str, int], gpus: float) -> dict[str, float]:
    """App, or user -> GPUs, max-min fair: an equal number for everyone, except for those that can use fewer."""
    shares, left = {}, gpus
    waiting = sorted(demands, key=lambda app: (demands[app], app))
    for position, app in enumerate(waiting):
        shares[app] = min(demands[app], left / (len(waiting) - position))
        left -= shares[app]
    return shares


def halving_phases(running: Sequence[JobInfo], rungs: Iterable[tuple[int, float]]) -> list[list[JobInfo]]:
    """Phases of successive halving: the jobs that run now, then one phase for each later rung.

    ``rungs``: (number of jobs, iterations of each) for every later rung. Which jobs will get there is not known yet, so
    each counts as the median of those that run now (section 4.3.3). Raises ThemisError if no job runs.
    """
    if not running:
        raise ThemisError("successive halving without a running job; call it only while a job runs")
    seconds, width = median(job.time_per_iter for job in running), max(job.max_gpus for job in running)
    return [list(running), *([JobInfo(iterations, seconds, width)] * count for count, iterations in rungs)]
