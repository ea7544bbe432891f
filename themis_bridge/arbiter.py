"""The arbiter: leases the cluster's GPUs to apps (Themis, section 4.2.2).

It is a state machine that neither imports Ray nor reads a clock; the time is handed in with each event. It is
level-triggered: events only change what is known, and at each tick it compares that with the leases. Leases that are
over end, and GPUs are auctioned that are free, recalled, or near the end of a lease. The shell stores
`ArbiterState.saved`, and then makes Ray's reservations agree with the leases and tells each app its own
(`lease_manager.leases_of`). So nothing that the arbiter says can be lost. `restored` is the next arbiter.

The parts are `arbiter_state` (what is known), `auctioneer` (who gets what) and `lease_manager` (leases); here is what
each event means, which apps are known, and how time passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from themis_bridge import messages as m
from themis_bridge.arbiter_state import ArbiterState
from themis_bridge.auctioneer import Auctioneer
from themis_bridge.errors import ThemisError
from themis_bridge.lease_manager import LeaseManager
from themis_bridge.locality import Gpu
from themis_bridge.policy import Policy


class Arbiter:
    """See the module. ``policy``: None for Themis with the f of the settings."""

    def __init__(self, state: ArbiterState, policy: Policy | None = None):
        self.state = state
        #: The answer to the event that is being handled, if that is refused.
        self._refused: m.Refused | None = None
        self._leases = LeaseManager(state)
        self.auctioneer = Auctioneer(state, self._leases, policy)
        #: What the shell's clock said last; None before the first event.
        self._shell_time: float | None = None
        #: What is done for each event.
        self._handlers: dict[type[m.Event], Callable[[Any], object]] = {
            m.GpuJoined: self._gpu_joined,
            m.GpuLeft: self._gpu_left,
            m.AppJoined: self._app_joined,
            m.AppLeft: self._forget_app,
            m.DriverDied: self._driver_died,
            m.Heard: self._heard,
            m.Removed: self._removed,
            m.Reserved: self._leases.note_reserved,
            m.ReserveFailed: lambda failed: self._leases.take_failure(failed, self.auctioneer.retry_s),
            m.Freed: self._freed,
            m.Configured: self._configured,
            m.Tick: self._tick,
        }

    # --- restart

    @classmethod
    def restored(
        cls,
        data: Mapping[str, Any],
        reserved: Mapping[str, tuple[str, int]],
        gpus: Iterable[Gpu],
        wall: float,
        newest: int = 0,
    ) -> Arbiter:
        """The successor of a dead arbiter.

        Args:
            data: what `ArbiterState.saved` of the dead one returned; empty if the books are lost.
            reserved: GPU -> (app, token) of the reservations that exist now. Those that the books do not have are
                removed; without books they become leases.
            gpus: the GPUs in the cluster now.
            wall: time of day, s; see `ArbiterState.loaded`.
            newest: the largest token that any reservation ever had, if that is known.
        """
        tokens = [newest, *(token for _, token in reserved.values())]
        arbiter = cls(ArbiterState.loaded(data, gpus, tokens, wall))
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
        if not isinstance(event, m.AppEvent) or self._is_from_known_app(event):
            # Five heartbeats come from every app each second, so that each looks at nothing but its app.
            if not isinstance(event, m.Heard) or event.left:
                self.state.account()
            handler(event)
        refused, self._refused = self._refused, None
        return refused

    def _pass_time(self, now: float) -> None:
        passed = 0.0 if self._shell_time is None else now - self._shell_time
        self._shell_time = now
        # If the shell's clock jumps back, no time passes. If it jumps ahead, at most half of the patience passes, so
        # that a jump does not make live apps look silent.
        self.state.elapse(min(max(0.0, passed), max(self.state.settings.patience_s / 2, 1.0)))

    def _tick(self, event: m.Tick) -> None:
        self._forget_silent_apps()
        self._leases.close_expired()
        self.auctioneer.advance()

    # --- which apps are known

    def _is_from_known_app(self, event: m.AppEvent) -> bool:
        """Whether the app is known under the event's session, or joins with it; any other sender is refused."""
        app, away = self.state.apps.get(event.app), self.state.away.get(event.app)
        if app is not None and app.session == event.session:
            app.heard = self.state.clock
            return True
        if isinstance(event, m.AppJoined):
            return True
        if away is not None and away.session == event.session and isinstance(event, m.AppLeft):
            return True
        holder = self.state.holder(event.app)
        if holder is not None and holder.session not in (event.session, ""):
            self._refuse_namesake(event)
        else:
            why = f"app {event.app!r}: the arbiter does not know this app; join again"
            self._refused = m.Refused(why, "join")
        return False

    def _refuse_namesake(self, event: m.AppEvent) -> None:
        """Another app has the name. If that one is silent, the name may become free; else it does not."""
        state, app = self.state, self.state.holder(event.app)
        assert app is not None
        waits = state.clock - app.heard > state.settings.patience_s / 2
        why = f"another app of the name {event.app!r} is running; give this one another name"
        if waits:
            why = (
                f"an app of the name {event.app!r} is silent, and keeps its name until that has lasted for "
                f"{state.name_kept_s:.0f} s: wait, or give this one another name"
            )
        self._refused = m.Refused(why, "wait" if waits else "end")

    def _forget_silent_apps(self) -> None:
        """Whoever is silent loses his leases first, and his name after a lease."""
        state = self.state
        for name, app in list(state.apps.items()):
            if state.clock - app.heard > state.settings.patience_s:
                state.set_away(name)
                self._take_all_from(name)
        for name, app in list(state.away.items()):
            if state.clock - app.heard > state.name_kept_s or not app.session:
                state.forget(name)

    def _take_all_from(self, name: str) -> None:
        """The app does not take part any more."""
        self.state.backoff.forget(app=name)
        self._leases.end_leases_of(name)
        self.auctioneer.clear_soon()

    # --- what each event means

    def _gpu_joined(self, event: m.GpuJoined) -> None:
        self.state.gpus[event.gpu.id] = event.gpu
        self.auctioneer.clear_soon()

    def _gpu_left(self, event: m.GpuLeft) -> None:
        self.state.gpus.pop(event.gpu, None)
        self._leases.forget_gpu(event.gpu)

    def _app_joined(self, event: m.AppJoined) -> None:
        state, holder = self.state, self.state.holder(event.app)
        if holder is not None and holder.session not in (event.session, ""):
            self._refuse_namesake(event)
            return
        if holder is None and (why := state.why_not_admitted(event.app)):
            self._refused = m.Refused(why, "end")
            return
        app = state.apps.get(event.app)
        if comes := app is None:
            app = state.add(event.app, event.user)
        app.session, app.heard, app.user, app.life = event.session, state.clock, event.user, event.life
        app.together = event.together
        if comes:
            self.auctioneer.recall_leases_for(event.app)
        self._leases.align_ends(event.app)
        self.auctioneer.clear_soon()

    def _heard(self, event: m.Heard) -> None:
        if self.state.hear(event.app, event.number, event.report):
            for gpu, token in event.left:
                self._leases.give_up(event.app, gpu, token)

    def _driver_died(self, event: m.DriverDied) -> None:
        holder = self.state.holder(event.app)
        if holder is not None and holder.session == event.session:
            self._forget_app(event)

    def _forget_app(self, event: m.AppLeft | m.DriverDied) -> None:
        """The app is gone: end its leases."""
        self.state.forget(event.app)
        self._take_all_from(event.app)

    def _removed(self, event: m.Removed) -> None:
        if self._leases.end_closed(event):
            self.auctioneer.clear_soon()

    def _freed(self, event: m.Freed) -> None:
        self.state.backoff.end_pauses()
        self.auctioneer.clear_soon()

    def _configured(self, event: m.Configured) -> None:
        self.state.settings = self.state.settings.changed(event.changes)
        for user in sorted(set(map(self.state.user_of, self.state.apps))):
            self._leases.end_leases_over_quota(user)
        self.auctioneer.clear_soon()
