"""Grants and ends leases: what has to be reserved and removed, and what the messages to an app say that it holds.

A GPU is granted again only when the reservation of its last lease is known to be gone. Which app gets a GPU is decided
in `auctioneer`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from themis_bridge import messages as m
from themis_bridge.app_record import AppRecord
from themis_bridge.arbiter_state import ArbiterState
from themis_bridge.leases import Lease, first_length, lease_phases
from themis_bridge.locality import whole_gangs


class LeaseManager:
    """See the module. ``out``: the list to which the arbiter's instructions are appended.

    One thing: each change of a lease also changes the version of what its app was sent.
    """

    def __init__(self, state: ArbiterState, out: list[m.Instruction]):
        self._state, self._out = state, out
        #: Second part of the version of a `messages.Leases`; it grows with each change.
        self._version = 0
        #: App -> the version of its leases as they are now. Its epoch is the arbiter's, or a larger one that only this
        #: app has, see `remind_app`.
        self._versions: dict[str, tuple[int, int]] = {}
        #: The GPUs and ``by_machine`` of the last `lease_phases`, and its result.
        self._phases: tuple[tuple[tuple[str, ...], bool], dict[str, float]] = (((), False), {})

    # --- grant, end, tell

    def grant_gpu(self, gpu: str, app: str, leftover: bool, expires: float | None = None) -> None:
        """Lease a free GPU, and have it reserved. ``expires``: None for a first lease of usual length."""
        state = self._state
        if expires is None:
            expires = state.clock + first_length(self._phase(gpu), state.clock, state.settings.lease_s)
        lease = state.leases.grant(gpu, app, expires, leftover)
        if app in state.apps:
            state.apps[app].gain_gpu()
            self.align_ends(app)
        self._out.append(m.Reserve(gpu, app, lease.token))

    def _phase(self, gpu: str) -> float:
        key = tuple(self._state.gpus), bool(self._state.gangs())
        if self._phases[0] != key:
            self._phases = key, lease_phases(self._state.gpus.values(), by_machine=key[1])
        return self._phases[1][gpu]

    def next_end(self, gpu: str, expires: float, gangs: bool) -> float:
        """When a lease that would end at ``expires`` ends if it is renewed.

        ``gangs``: an app needs gangs. The leases of a machine are then made to end together, so that one can be won.
        """
        length = self._state.settings.lease_s
        if not gangs:
            return expires + length
        return expires + first_length(self._phase(gpu), expires, length)

    def align_ends(self, app: str) -> None:
        """Let all leases of an app that needs gangs end together on each machine, so that a gang is never torn."""
        state = self._state
        if app not in state.apps or state.apps[app].together == 1:
            return
        machines: dict[str, list[Lease]] = defaultdict(list)
        for lease in state.leases.of(app):
            # A GPU that has left the cluster is forgotten with the next one that is looked at.
            if not lease.ending and lease.gpu in state.gpus:
                machines[state.gpus[lease.gpu].machine].append(lease)
        for leases in machines.values():
            end = min(lease.expires for lease in leases)
            for lease in leases:
                lease.expires = end

    def close_lease(self, lease: Lease) -> None:
        """End a lease now: what is reserved for it has to be removed."""
        lease.closing = True
        self._out.append(m.Remove(lease.gpu, lease.app, lease.token))

    def tell_app(self, name: str) -> None:
        """Something about an app's leases has changed: tell it all of them."""
        if name in self._state.apps:
            self._version += 1
            epoch, _ = self._versions.get(name, (0, 0))
            self._versions[name] = max(epoch, self._state.epoch), self._version
            self._tell(name)

    def remind_app(self, event: m.Heard) -> None:
        """Tell an app its leases if it does not know them."""
        name, known, told = event.app, event.version, self._versions.get(event.app)
        if told is None or (known is not None and known > told):
            if known is not None:
                # Of an arbiter before this one, which may have lost its books. Smaller versions would be ignored. The
                # epoch is this app's alone: were its word to count for all, it could make it too large for them.
                self._versions[name] = known[0] + 1, 0
            self.tell_app(name)
        elif known != told:
            self._tell(name)

    def _tell(self, name: str) -> None:
        """Tell an app all that it holds, except grants that are tried again after a failure."""
        state = self._state
        views = tuple(
            m.LeaseView(
                gpu=state.gpus[each.gpu],
                token=each.token,
                remaining=each.expires - state.clock,
                ending=each.ending,
                leftover=each.leftover,
                expires=each.expires,
            )
            for each in state.leases.of(name)
            if (each.gpu, name) not in state.backoff
        )
        app = state.apps[name]
        promised = sum(each.heir == name for each in state.leases) if app.together > 1 else 0
        self._out.append(m.Leases(name, app.session, self._versions[name], views, promised))

    def end_leases_of(self, app: str) -> None:
        """End all leases of an app that is gone or away, and all promises to it."""
        self._versions.pop(app, None)
        for lease in self._state.leases.of(app):
            self.close_lease(lease)
        for lease in self._state.leases:
            if lease.heir == app:
                lease.heir = None

    def end_leases_over_quota(self, user: str) -> None:
        """Let leases beyond the user's quota end without renewal."""
        over = -self._state.quota_left(user)
        for lease in self._state.leases_of_user(user)[: max(0, over)]:
            lease.ending, lease.heir = True, None

    def close_expired(self) -> None:
        for lease in list(self._state.leases):
            if not lease.closing and self._state.clock >= lease.expires:
                self.close_lease(lease)
                self.tell_app(lease.app)

    # --- what agents and Ray say of reservations

    def forget_gpu(self, gpu: str) -> None:
        self._state.backoff.forget(gpu=gpu)
        lease = self._state.leases.get(gpu)
        if lease is not None:
            # Ray has removed what was on it, or will when the node is back. The token is never used again.
            self._drop(lease)

    def _drop(self, lease: Lease) -> None:
        """A lease is no more, and neither is the promise of its GPU: tell its app and its heir."""
        self._state.leases.drop(lease)
        self.tell_app(lease.app)
        if lease.heir is not None:
            self.tell_app(lease.heir)

    def release(self, event: m.Release) -> None:
        lease = self._state.leases.current(event.gpu, event.token)
        if lease is not None and lease.app == event.app and not lease.closing:
            self.close_lease(lease)

    def end_closed(self, event: m.Removed) -> bool:
        """A reservation is gone: the GPU goes to its heir or is free. Returns whether it was under that lease."""
        state, gpu = self._state, event.gpu
        lease = state.leases.current(gpu, event.token)
        if lease is None:
            return False
        state.leases.drop(lease)
        if not lease.closing:
            self.tell_app(lease.app)
        heir = lease.heir
        if heir in state.apps:
            if gpu in state.gpus and self._could_use(heir):
                self.grant_gpu(gpu, heir, lease.heir_leftover)
            self.tell_app(heir)
        return True

    def _could_use(self, heir: str) -> bool:
        """Whether the app may have one more GPU, and has a use for it by its latest report, later than the promise."""
        state = self._state
        app = state.apps[heir]
        keeps = [state.gpus[each.gpu] for each in state.leases.of(heir) if not (each.closing or each.ending)]
        return app.wanted > whole_gangs(keeps, app.together) and state.quota_left(state.user_of(heir)) > 0

    def note_reserved(self, event: m.Reserved) -> None:
        """A reservation was made: tell the app, so that it learns the group."""
        state = self._state
        lease = state.leases.current(event.gpu, event.token)
        if lease is None or lease.closing:
            return
        if state.backoff.record_success(lease.gpu, lease.app) and state.quota_left(state.user_of(lease.app)) < 0:
            # The app has won other GPUs meanwhile.
            self.close_lease(lease)
        self.tell_app(lease.app)

    def take_failure(self, event: m.ReserveFailed, pause: float) -> None:
        """A reservation could not be made. ``pause``: seconds until the next attempt after a first failure."""
        state = self._state
        lease = state.leases.current(event.gpu, event.token)
        if lease is None:
            return
        # Of an app that has left meanwhile nothing is remembered: one that comes under its name may ask for less.
        apps = {lease.app, *event.also_for} & state.apps.keys()
        state.backoff.record_failure(lease.gpu, apps, state.clock, pause)
        self._drop(lease)

    # --- restart

    def reconcile(self, reserved: Mapping[str, tuple[str, int]], adopt: bool) -> None:
        """Make the leases of the books and the reservations that exist agree.

        ``reserved``: GPU -> (app, token) of the reservations. ``adopt``: whether reservations that are not in the books
        become leases; otherwise they are removed.
        """
        state = self._state
        for lease in list(state.leases):
            there = reserved.get(lease.gpu)
            if lease.gpu not in state.gpus or (there is None and lease.closing):
                state.leases.drop(lease)
            elif there is None:
                # The reservation may have existed and be gone again; a token must not be reserved twice.
                state.leases.drop(lease)
                self.grant_gpu(lease.gpu, lease.app, lease.leftover, lease.expires)
            elif there[1] == lease.token and lease.closing:
                self._out.append(m.Remove(lease.gpu, lease.app, lease.token))
        for gpu, (app, token) in reserved.items():
            known = state.leases.get(gpu)
            if known is not None and known.token == token:
                continue
            if known is not None:
                # The books have a newer lease, but the reservation of an older one still exists: close that first.
                state.leases.drop(known)
            lease = Lease(gpu, app, token, state.clock + state.settings.lease_s)
            state.leases.adopt(lease)
            if known is not None or not adopt:
                self.close_lease(lease)
            elif app not in state.apps:
                state.apps[app] = AppRecord("", state.clock, state.clock)
