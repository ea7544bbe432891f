"""The arbiter: leases the cluster's GPUs to apps (Themis, section 4.2.2).

It is a state machine that neither imports Ray nor reads a clock; the time is handed in with each event. It is
level-triggered: events only change what is known, and at each tick it compares that with the leases. Leases that are
over end, and GPUs are auctioned that are free, recalled, or near the end of a lease. An app is whoever reports: with
its first report it joins, and with the one that comes after a long silence it is back. The shell stores
`ArbiterState.saved`, and then makes Ray's reservations agree with the leases and tells each app its own
(`lease_manager.leases_of`). So nothing that the arbiter says can be lost. `restored` is the next arbiter.

The parts are `arbiter_state` (what is known), `auctioneer` (who gets what) and `lease_manager` (leases); here is what
each event means, which apps are known, and how time passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from themis_bridge import messages as m
from themis_bridge.app_record import AppRecord
from themis_bridge.arbiter_state import ArbiterState
from themis_bridge.auctioneer import Auctioneer
from themis_bridge.errors import ThemisError
from themis_bridge.lease_manager import LeaseManager
from themis_bridge.locality import Gpu
from themis_bridge.policy import Policy, Themis


class Arbiter:
    """See the module. ``policy``: as of `Auctioneer`."""

    def __init__(self, state: ArbiterState, policy: Callable[[float], Policy] = Themis):
        self.state = state
        self._leases = LeaseManager(state)
        self.auctioneer = Auctioneer(state, self._leases, policy)
        #: What the shell's clock said last; None before the first event.
        self._shell_time: float | None = None
        #: What is done for each event.
        self._handlers: dict[type[m.Event], Callable[[Any], m.Refused | None]] = {
            m.Gpus: self._gpus,
            m.Heartbeat: self._heard,
            m.AppLeft: self._app_left,
            m.Reservation: self._leases.note_reservation,
            m.Configured: self._configured,
            m.Tick: self._tick,
        }

    # --- restart

    @classmethod
    def restored(
        cls,
        data: Mapping[str, Any],
        reserved: Mapping[tuple[str, str, int], str],
        gpus: Iterable[Gpu],
        newest: int = 0,
    ) -> Arbiter:
        """The successor of a dead arbiter.

        Args:
            data: what `ArbiterState.saved` of the dead one returned; empty if the books are lost.
            reserved: the reservations that exist now: (app, GPU, token) -> id of the group, "" while Ray has not made
                it. Without books they become leases.
            gpus: the GPUs in the cluster now.
            newest: the largest token that any reservation ever had, if that is known.
        """
        newest = max([newest, *(token for _, _, token in reserved)])
        arbiter = cls(ArbiterState.loaded(data, gpus, newest))
        arbiter._leases.reconcile(reserved, adopt=not data)
        return arbiter

    # --- one event

    def handle(self, event: m.Event, now: float) -> m.Refused | None:
        """Handle one event. Returns the answer to whoever sent it, if it is refused.

        ``now``: seconds on any clock of the shell; it may jump.

        Raises ThemisError for settings that are not allowed, and for an event of an unknown type.
        """
        handler = self._handlers.get(type(event))
        if handler is None:
            raise ThemisError(f"{event!r} is not an event that the arbiter knows; see themis_bridge.messages")
        self._pass_time(now)
        if not isinstance(event, m.Heartbeat):
            self.state.account()
        return handler(event)

    def _pass_time(self, now: float) -> None:
        passed = 0.0 if self._shell_time is None else now - self._shell_time
        self._shell_time = now
        # If the shell's clock jumps back, no time passes. If it jumps ahead, at most half of the patience passes, so
        # that a jump does not make live apps look silent.
        self.state.elapse(min(max(0.0, passed), max(self.state.settings.patience_s / 2, 1.0)))

    def _tick(self, event: m.Tick) -> None:
        self._forget_silent_apps()
        self._leases.end_expired()
        self.auctioneer.advance()

    # --- which apps are known

    def _heard(self, event: m.Heartbeat) -> m.Refused | None:
        state, app = self.state, self.state.holder(event.app)
        if {event.session, event.life} & state.left.keys():
            over = event.session in state.left
            return m.Refused(f"app {event.app!r} {'has left' if over else 'has lost its sign of life'}", ends=over)
        if app is not None and app.session not in (event.session, ""):
            return self._refuse_namesake(event.app, app)
        if app is None and (why := state.why_not_admitted(event.app)):
            return m.Refused(why, ends=True)
        # Five reports come from every app each second, so that each looks at nothing but its app.
        if event.app not in state.apps or event.left:
            state.account()
        if state.hear(event):
            for gpu, token in event.left:
                lease = state.leases.current(gpu, token)
                if lease is not None and lease.app == event.app:
                    self._leases.end(lease)
        return None

    def _refuse_namesake(self, name: str, holder: AppRecord) -> m.Refused:
        """Another app has the name. If that one is silent, or only the books know it, the name may become free."""
        state = self.state
        if name in state.reports and state.clock - holder.heard <= state.settings.patience_s / 2:
            return m.Refused(f"another app of the name {name!r} is running; give this one another name", ends=True)
        why = (
            f"an app of the name {name!r} is silent, and keeps its name until that has lasted for "
            f"{state.name_kept_s:.0f} s: wait, or give this one another name"
        )
        return m.Refused(why, ends=False)

    def _forget_silent_apps(self) -> None:
        """Whoever is silent loses his leases first, and his name after a lease."""
        state = self.state
        for name, app in list(state.apps.items()):
            if state.clock - app.heard > state.settings.patience_s:
                state.set_away(name)
                self._leases.take_all_from(name)
        for name, app in list(state.away.items()):
            if state.clock - app.heard > state.name_kept_s or not app.session:
                state.forget(name)
        state.left = {each: at for each, at in state.left.items() if state.clock - at <= state.name_kept_s}

    def _app_left(self, event: m.AppLeft) -> None:
        self.state.left[event.life or event.session] = self.state.clock
        holder = self.state.holder(event.app)
        if holder is not None and holder.session == event.session:
            self.state.forget(event.app)
            self._leases.take_all_from(event.app)

    # --- what an operator and the cluster say

    def _gpus(self, event: m.Gpus) -> None:
        there = {gpu.id: gpu for gpu in event.there}
        for gpu in self.state.gpus.keys() - there.keys():
            # Ray has removed what was on it, or will when the node is back. The token is never used again.
            if (lease := self.state.leases.get(gpu)) is not None:
                self.state.leases.drop(lease)
        self.state.gpus = there

    def _configured(self, event: m.Configured) -> None:
        self.state.settings = self.state.settings.changed(event.changes)
        for user in sorted(set(map(self.state.user_of, self.state.apps))):
            self._leases.end_leases_over_quota(user)
