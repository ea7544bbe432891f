"""Equal sharing without any cost: no real scheduler, but what the schedulers are measured against.

At every moment every app in the system has an equal share of the cluster; what an app cannot use is shared among the
others. GPUs are divisible, all in one place, and change hands at once, without leases and at no cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from benchmarks.shared_cluster.apps import Spec
from themis_bridge import JobInfo
from themis_bridge.fairness import equal_shares


def phase_time(jobs: Sequence[JobInfo], gpus: float) -> float:
    """Seconds of one phase on ``gpus`` GPUs with the best split of them among its jobs (eq. 2: max over jobs).

    Jobs may take turns and use up to ``max_gpus`` GPUs. A split ends neither before all GPUs together have done all the
    work, nor before the longest job has run at its widest; the best one ends at the later of these two times.
    """
    works = [job.work for job in jobs]
    total = sum(works)
    if total == 0:
        return 0.0
    if gpus <= 0:
        return math.inf
    longest = max(work / min(gpus, job.max_gpus) for work, job in zip(works, jobs, strict=True))
    return max(total / gpus, longest)


def ends(specs: Iterable[Spec], gpus: int) -> dict[str, float]:
    """App -> when it ends, seconds on the clock of `Spec.arrives`."""
    coming = sorted(specs, key=lambda spec: spec.arrives, reverse=True)
    #: App -> its spec, the index of its running phase, and the fraction of that phase that is left.
    there: dict[str, tuple[Spec, int, float]] = {}
    done: dict[str, float] = {}
    now = 0.0
    while coming or there:
        demands = {name: sum(job.max_gpus for job in spec.phases[phase]) for name, (spec, phase, _) in there.items()}
        shares = equal_shares(demands, gpus)
        took = {name: phase_time(spec.phases[phase], shares[name]) for name, (spec, phase, _) in there.items()}
        until = {name: now + left * took[name] for name, (_, _, left) in there.items()}
        arrival = coming[-1].arrives if coming else math.inf
        first = min(until, key=lambda name: until[name], default="")
        then = min(arrival, until[first]) if there else arrival
        there = {name: (spec, at, left - (then - now) / took[name]) for name, (spec, at, left) in there.items()}
        now = then
        if arrival <= now and coming:
            spec = coming.pop()
            there[spec.name] = (spec, 0, 1.0)
        elif there[first][1] + 1 < len(there[first][0].phases):
            there[first] = (there[first][0], there[first][1] + 1, 1.0)
        else:
            done[first] = now
            del there[first]
    return done
