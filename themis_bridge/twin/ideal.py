"""What sharing would be if it cost nothing: a yardstick for the schedulers, and none itself.

Every app in the system has an equal share of the cluster at every moment, and what one cannot use is shared among the
others. GPUs can be divided, all lie together, and change hands at no cost and without leases.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from themis_bridge.fairness import phase_time
from themis_bridge.twin.apps import Spec


def equal_shares(demands: Mapping[str, int], gpus: float) -> dict[str, float]:
    """GPUs by app: as many for each, but for those that can use fewer (max-min fair)."""
    shares, left = {}, gpus
    waiting = sorted(demands, key=lambda app: (demands[app], app))
    for position, app in enumerate(waiting):
        shares[app] = min(demands[app], left / (len(waiting) - position))
        left -= shares[app]
    return shares


def ends(specs: Iterable[Spec], gpus: int) -> dict[str, float]:
    """By app, when it ends; seconds on the clock of ``arrives``."""
    coming = sorted(specs, key=lambda spec: spec.arrives, reverse=True)
    #: App -> its spec, the running phase, and what is left of that, from 1 to 0.
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
