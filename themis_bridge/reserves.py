"""Reserves: GPUs that no auction takes from an app, such as a service that must answer whatever searches bid.

An operator gives an app a reserve (`Settings.reserves`). It counts while the app is there. In a round, GPUs for
reserves are set aside before the policy sees the offer, so that every policy keeps them. Nothing else is decided here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from themis_bridge.arbiter_state import ArbiterState
from themis_bridge.locality import Gpu, cut_in_gangs


def set_aside(state: ArbiterState, asked: Iterable[str], offer: Mapping[str, Gpu]) -> dict[str, str]:
    """GPUs of the offer that go to reserves: GPU -> app.

    Each app first gets back what it holds itself, up to its reserve. What is missing is taken from free GPUs, and then
    from the apps that hold most on offer. If there is too little for all, the app that came first is first. So an app
    may lose its last GPU to the reserve of another one, but never a GPU of its own reserve. A user's quota is kept.

    Args:
        state: the arbiter's.
        asked: apps that take part in the round.
        offer: GPU id -> the GPU, for all on offer.
    """
    here = sorted((app for app in asked if app in state.apps), key=lambda app: (state.apps[app].joined, app))
    owed = {app: state.reserve(app) for app in here}
    for lease in state.leases:
        app = lease.app if state.is_kept(lease, offer) and not lease.closing else lease.heir
        if app in owed:
            owed[app] -= 1
    holder = {lease.gpu: lease.app for lease in state.leases if lease.gpu in offer}
    aside: dict[str, str] = {}
    for app in here:
        own = sorted(gpu for gpu in offer if holder.get(gpu) == app)[: max(0, owed[app])]
        aside.update(dict.fromkeys(own, app))
        owed[app] -= len(own)
    count = Counter(holder[gpu] for gpu in holder.keys() - aside.keys())
    left = sorted(offer.keys() - aside.keys(), key=lambda gpu: (gpu in holder, -count[holder.get(gpu, "")], gpu))
    rooms = {user: state.quota_left(user) for user in map(state.user_of, here)}
    for app in here:
        user = state.user_of(app)
        together = state.apps[app].together
        some, _ = cut_in_gangs({gpu: offer[gpu].machine for gpu in left if holder.get(gpu) != app}, together)
        number = max(0, min(owed[app], rooms[user]))
        some = some[: number - number % together]
        aside.update(dict.fromkeys(some, app))
        rooms[user] -= len(some)
        left = [gpu for gpu in left if gpu not in aside]
    return aside
