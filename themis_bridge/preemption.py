"""Preemption for a new app: which leases are recalled, that is, auctioned before their notice begins.

A short app that waits ten minutes until the first leases end is behind for all its life. So when an app joins, leases
of as many GPUs as its share are recalled and auctioned at once. A holder that loses one is given the usual notice; a
GPU that nobody else wins stays with its holder until the end that it was promised. The paper has no preemption;
docs/themis.md says what it gains. The arbiter marks the leases, this module only chooses them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from themis_bridge.app_record import AppRecord, crowding
from themis_bridge.leases import Lease, LeaseTable
from themis_bridge.locality import Gpu
from themis_bridge.settings import NO_QUOTA, Settings
from themis_bridge.standing import turn


def leases_to_recall(
    newcomer: str,
    gpus: Mapping[str, Gpu],
    leases: LeaseTable,
    apps: Mapping[str, AppRecord],
    settings: Settings,
    clock: float,
) -> list[Lease]:
    """The leases to recall, so that the newcomer can win its share.

    An app's share is the number of GPUs divided by its `crowding`, at least 1. The newcomer's is also at most its
    user's quota, and GPUs that are free, or soon will be, are subtracted from it. The holder with the smallest rho (the
    one furthest ahead) gives first, of equals the one that came last; each holder keeps at least its share. Where an
    app's reserve is more than its share, it counts instead; and for a newcomer's reserve a holder keeps no more than
    its own reserve.
    """
    reserve = {name: settings.reserves.get(name, 0) for name in apps}
    share = {name: max(1, len(gpus) // crowd, reserve[name]) for name, crowd in crowding(apps).items()}
    beyond = max(0, share[newcomer] - reserve[newcomer])
    need = min(share[newcomer], settings.quotas.get(apps[newcomer].user or newcomer, NO_QUOTA))
    held: dict[str, list[Lease]] = {}
    for gpu in gpus:
        lease = leases.get(gpu)
        if lease is None or lease.recalled or (lease.closing and lease.heir is None):
            need -= 1
        elif not lease.closing and not lease.ending and not lease.on_offer(clock, settings.notice_s):
            held.setdefault(lease.app, []).append(lease)
    # An app that has not reported its rho yet gives nothing.
    rho = {name: app.rho * app.factor(name, settings.weights) for name, app in apps.items() if app.rho}

    def ahead(app: str) -> tuple[float, float, bytes]:
        joined, lot = turn(app, apps[app].joined, clock)
        return rho[app], -joined, lot

    chosen: list[Lease] = []
    order = sorted(held.keys() & rho.keys(), key=ahead)
    for app in order:
        own = held[app]
        together = Counter(gpus[lease.gpu].machine for lease in own)
        # The machines on which the holder has most go first: they can be won whole, and it keeps others whole.
        own.sort(key=lambda lease: (-together[gpus[lease.gpu].machine], gpus[lease.gpu].machine, lease.gpu))
        given = max(0, min(need - len(chosen), len(own) - share[app]))
        chosen += own[:given]
        held[app] = own[given:]
    for app in order:
        chosen += held[app][: max(0, min(need - beyond - len(chosen), len(held[app]) - reserve[app]))]
    return chosen
