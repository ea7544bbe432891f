"""Preemption for a new app: which leases are recalled, that is, auctioned before their notice begins.

A short app that waits ten minutes until the first leases end is behind for all its life. So when an app joins, its
share of GPUs is recalled and auctioned at once. A holder that loses a lease has the usual notice; a GPU that no other
app wins stays with its holder until the end that it was promised. The paper has no preemption;
benchmarks/themis.md says what it gains.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Mapping

from themis_bridge.app_record import crowding
from themis_bridge.arbiter_state import ArbiterState
from themis_bridge.leases import Lease
from themis_bridge.policy import tie_break
from themis_bridge.settings import NO_QUOTA


def leases_to_recall(newcomer: str, state: ArbiterState, recalled: Container[str] = ()) -> list[str]:
    """The GPUs whose leases to recall, so that the newcomer can win its share. ``recalled``: GPUs of which it is done.

    An app's share is the number of GPUs divided by its `crowding`, at least 1. The newcomer's is also at most its
    user's quota, and GPUs that are free, or soon will be, are subtracted from it. The holder with the smallest rho (the
    one furthest ahead) gives first, of equals the one that came last; each holder keeps at least its share. Where an
    app's reserve is more than its share, it counts instead; and for a newcomer's reserve a holder keeps no more than
    its own reserve. For a newcomer that needs several GPUs of one machine at once, either whole gangs are recalled or
    nothing.
    """
    gpus, leases, apps, settings = state.gpus, state.leases, state.apps, state.settings
    reserve = {name: settings.reserves.get(name, 0) for name in apps}
    share = {name: max(1, len(gpus) // crowd, reserve[name]) for name, crowd in crowding(apps).items()}
    beyond = max(0, share[newcomer] - reserve[newcomer])
    # GPUs that it may have without a recall of its own.
    free = {gpu for gpu in gpus if gpu in recalled or (leases.is_free(gpu) and newcomer not in state.barred(gpu))}
    need = min(share[newcomer], settings.quotas.get(apps[newcomer].user or newcomer, NO_QUOTA))
    need -= len(free) + len(leases.of(newcomer))
    held: dict[str, list[Lease]] = {}
    for lease in leases:
        kept = lease.gpu in recalled or lease.app == newcomer or lease.waits or lease.ending
        if not kept and not lease.on_offer(state.clock, settings.notice_s):
            held.setdefault(lease.app, []).append(lease)
    # An app that has not reported its rho yet gives nothing.
    weights = state.weights()
    rho = {name: app.rho * app.factor(name, weights) for name, app in apps.items() if app.rho}

    def ahead(app: str) -> tuple[float, float, bytes]:
        joined, lot = tie_break(app, apps[app].joined, state.clock)
        return rho[app], -joined, lot

    chosen: list[Lease] = []
    order = sorted(held.keys() & rho.keys(), key=ahead)
    together = apps[newcomer].together
    if together > 1:
        allowed = {app: len(held[app]) - share[app] for app in order}
        return _gangs_to_recall(together, need, state, {app: held[app] for app in order}, allowed, free)
    for app in order:
        number = Counter(gpus[lease.gpu].machine for lease in held[app])
        # The machines on which the holder has most go first: they can be won whole, and it keeps others whole.
        held[app].sort(key=lambda lease: (-number[gpus[lease.gpu].machine], gpus[lease.gpu].machine, lease.gpu))
    for keeps, most in ((share, need), (reserve, need - beyond)):
        for app in order:
            given = max(0, min(most - len(chosen), len(held[app]) - keeps[app]))
            # What is left of a gang would be of no use to its holder.
            given += -given % apps[app].together
            chosen += held[app][:given]
            held[app] = held[app][given:]
    return [lease.gpu for lease in chosen]


def _gangs_to_recall(
    together: int,
    need: int,
    state: ArbiterState,
    held: Mapping[str, list[Lease]],
    allowed: dict[str, int],
    there: Collection[str],
) -> list[str]:
    """The GPUs to recall for a newcomer that needs ``together`` GPUs of one machine at once.

    ``need``: GPUs that it is to win beyond those that are ``there`` for it. ``held``: app -> its leases that may be
    recalled; the apps that give first come first. ``allowed``: app -> how many of these it gives at most.
    """
    gpus, machines = state.gpus, defaultdict[str, list[Lease]](list)
    free = Counter(gpus[gpu].machine for gpu in there)
    for lease in (lease for own in held.values() for lease in own):
        machines[gpus[lease.gpu].machine].append(lease)
    need += free.total()
    # Gangs that are free already need no recall.
    need -= need % together + sum(count - count % together for count in free.values())
    chosen: list[Lease] = []
    for machine in sorted(machines, key=lambda each: (-(free[each] % together), -len(machines[each]), each)):
        loose, room = free[machine] % together, dict(allowed)
        given: list[Lease] = []
        for lease in machines[machine]:
            if room[lease.app] > 0:
                room[lease.app] -= 1
                given.append(lease)
        size = min(need, loose + len(given))
        size -= size % together
        if size > 0:
            for lease in given[: size - loose]:
                allowed[lease.app] -= 1
            chosen += given[: size - loose]
            need -= size
    return [lease.gpu for lease in chosen]
