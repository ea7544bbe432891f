"""Grants and ends leases, and says what an app is told of them.

A lease that is over is dropped, and its heir has the GPU at once, under a lease of its own. Which app gets a GPU is
decided in `auctioneer`.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping

from themis_bridge import messages as m
from themis_bridge.app_record import AppRecord
from themis_bridge.arbiter_state import ArbiterState
from themis_bridge.leases import Lease, lease_length, lease_phases
from themis_bridge.locality import whole_gangs

#: Bytes of a digest of leases. No two states of an app's leases have the same one.
DIGEST_BYTES = 8


def leases_of(state: ArbiterState, name: str) -> m.Leases:
    """What an app is to know of its leases: all that Ray has reserved for it, and what is on its way."""
    app, leases = state.apps[name], state.leases.of(name)
    views = tuple(
        m.LeaseView(state.gpus[each.gpu], each.token, each.group, each.ending, each.expires - state.clock)
        for each in leases
        if each.group
    )
    promised = 0
    if app.together > 1:
        promised = sum(each.heir == name for each in state.leases) + sum(not each.group for each in leases)
    # A token says which GPU it is, and which group.
    shown = repr((promised, [(view.token, view.ending) for view in views]))
    digest = hashlib.blake2b(shown.encode(), digest_size=DIGEST_BYTES).hexdigest()
    return m.Leases(digest, views, promised)


class LeaseManager:
    """See the module."""

    def __init__(self, state: ArbiterState):
        self._state = state
        #: The GPUs and ``by_machine`` of the last `lease_phases`, and its result.
        self._phases: tuple[tuple[tuple[str, ...], bool], dict[str, float]] = (((), False), {})

    # --- grant and end

    def grant_gpu(self, gpu: str, app: str) -> None:
        """Lease a free GPU, and have it reserved."""
        self._begin(self._state.leases.grant(gpu, app, 0.0))

    def _begin(self, lease: Lease) -> None:
        state = self._state
        lease.expires = self.next_end(lease.gpu, state.clock)
        state.apps[lease.app].gain_gpu()
        self.align_ends(lease.app)

    def next_end(self, gpu: str, begins: float) -> float:
        """When a lease that begins then, or is renewed from then on, ends: one length later, or so, at its phase.

        While an app needs gangs, the leases of a machine end together, so that a gang can be won.
        """
        key = tuple(self._state.gpus), any(app.together > 1 for app in self._state.apps.values())
        if self._phases[0] != key:
            self._phases = key, lease_phases(self._state.gpus.values(), by_machine=key[1])
        return begins + lease_length(self._phases[1][gpu], begins, self._state.settings.lease_s)

    def align_ends(self, app: str) -> None:
        """Let all leases of an app that needs gangs end together on each machine, so that a gang is never torn."""
        state = self._state
        if state.apps[app].together == 1:
            return
        machines: dict[str, list[Lease]] = defaultdict(list)
        for lease in state.leases.of(app):
            if not lease.ending:
                machines[state.gpus[lease.gpu].machine].append(lease)
        for leases in machines.values():
            end = min(lease.expires for lease in leases)
            for lease in leases:
                lease.expires = end

    def end(self, *leases: Lease) -> None:
        """The leases are over. The heir of each has its GPU, if it still has a use for it."""
        for lease in leases:
            self._state.leases.drop(lease)
        for lease in leases:
            if lease.heir in self._state.apps and self._could_use(lease.heir):
                self.grant_gpu(lease.gpu, lease.heir)

    def take_all_from(self, app: str) -> None:
        """The app is gone or away: end all its leases at once, and all promises to it."""
        for lease in self._state.leases:
            lease.heir = None if lease.heir == app else lease.heir
        self.end(*[lease for lease in self._state.leases if lease.app == app])

    def end_leases_over_quota(self, user: str) -> None:
        """Let leases beyond the user's quota end without renewal."""
        for lease in self._state.leases_of_user(user)[: max(0, -self._state.quota_left(user))]:
            lease.ending, lease.heir = True, None

    def end_expired(self) -> None:
        """End what is over. A reservation that waits is withdrawn when its app has no more use for the GPU."""
        for lease in list(self._state.leases):
            if not self._could_use(lease.app) if lease.waits else self._state.clock >= lease.expires:
                self.end(lease)

    # --- what Ray says of reservations

    def _could_use(self, name: str) -> bool:
        """Whether the app may have one more GPU, and has a use for it by its latest report."""
        state = self._state
        app = state.apps[name]
        keeps = [state.gpus[each.gpu] for each in state.leases.of(name) if not each.ending]
        return app.wanted > whole_gangs(keeps, app.together) and state.quota_left(state.user_of(name)) > 0

    def note_reservation(self, event: m.Reservation) -> None:
        """A reservation was made, and its app is told of the lease; or it waits, and is withdrawn if it is to end."""
        lease = self._state.leases.current(event.gpu, event.token)
        if lease is None:
            return
        if event.group:
            self._take_group(lease, event.group)
        elif lease.ending and not lease.group:
            self.end(lease)
        else:
            lease.waits = not lease.group

    def _take_group(self, lease: Lease, group: str) -> None:
        lease.group = group
        if group and lease.waits:
            # The app may have won other GPUs meanwhile.
            if not self._could_use(lease.app):
                self.end(lease)
                return
            lease.waits = False
            self._begin(lease)

    # --- restart

    def reconcile(self, reserved: Mapping[tuple[str, str, int], str], adopt: bool) -> None:
        """Make the leases of the books and the reservations that exist agree.

        ``reserved``: as of `Arbiter.restored`. ``adopt``: whether they become leases.
        """
        state = self._state
        for lease in list(state.leases):
            # Of one whose group was never known to be made, nobody was told; Ray is asked for it again.
            if lease.gpu not in state.gpus or (lease.group and lease.key not in reserved):
                state.leases.drop(lease)
        for lease in list(state.leases):
            # Ray may have made it since it was said to wait.
            self._take_group(lease, reserved.get(lease.key, ""))
        # Of two groups of one GPU, the one with the smaller token was being removed.
        for (app, gpu, token), group in sorted(reserved.items(), key=lambda each: each[0][2]) if adopt else ():
            if gpu in state.gpus:
                if (older := state.leases.get(gpu)) is not None:
                    state.leases.drop(older)
                state.leases.add(Lease(gpu, app, token, state.clock + state.settings.lease_s, group=group))
                state.apps.setdefault(app, AppRecord("", state.clock, state.clock))
