"""Which leases are recalled for an app that comes: auctioned before their time.

An app of half an hour that waits ten minutes until the first leases end is behind for all its life. So GPUs up to its
share are auctioned at once; their holders are told ahead as at any end of a lease, and keep what the auction
leaves them until the end that they were promised. The paper has no such thing; docs/themis.md says what it gains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from themis_bridge.books import App, Settings
from themis_bridge.leases import Lease, LeaseTable
from themis_bridge.locality import Gpu


def to_recall(
    newcomer: str,
    gpus: Mapping[str, Gpu],
    leases: LeaseTable,
    apps: Mapping[str, App],
    settings: Settings,
    clock: float,
) -> list[Lease]:
    """Leases of as many GPUs as the newcomer's share of the cluster, less what is free or comes free.

    The share is that of one of so many apps, at least one GPU, at most its quota. Whoever is furthest ahead gives
    first, and keeps as many as a share is.
    """
    share = max(1, len(gpus) // max(1, len(apps)))
    need = min(share, settings.quotas.get(newcomer, share))
    held: dict[str, list[Lease]] = {}
    for gpu in gpus:
        lease = leases.get(gpu)
        if lease is None or lease.recalled or (lease.closing and lease.heir is None):
            need -= 1
        elif not lease.closing and not lease.ending and not lease.on_offer(clock, settings.notice_s):
            held.setdefault(lease.app, []).append(lease)
    # Who has not said yet how far it is gives nothing.
    rho = {name: app.rho * settings.weights.get(name, 1.0) / app.doubt for name, app in apps.items() if app.rho}
    chosen: list[Lease] = []
    for app in sorted(held.keys() & rho.keys(), key=lambda app: (rho[app], app)):
        own = held[app]
        together = Counter(gpus[lease.gpu].machine for lease in own)
        # Whole machines first, so that they can be won together and their holder keeps whole ones.
        own.sort(key=lambda lease: (-together[gpus[lease.gpu].machine], gpus[lease.gpu].machine, lease.gpu))
        chosen += own[: max(0, min(need - len(chosen), len(own) - share))]
    return chosen
