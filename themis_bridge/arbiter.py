"""The arbiter: leases the cluster's GPUs to apps, in rounds of two phases (Themis, section 4.2).

A state machine: events in, instructions out; no Ray, no clock but what is handed in. Whenever a GPU is free, or its
lease ends within the notice or is recalled, all apps are asked for their rho (visibility), the policy's choice of them
is offered the GPUs and bids, and the outcome becomes leases (allocation). Nobody is waited for beyond a deadline. A GPU
is leased again only when what its last holder had reserved is known to be gone.

The shell writes `saved()` down before it carries instructions out, and starts a new arbiter with `restored`.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from functools import singledispatchmethod
from typing import Any

from themis_bridge import messages as m
from themis_bridge.app_record import AppRecord
from themis_bridge.backoff import Backoff
from themis_bridge.errors import ThemisError
from themis_bridge.leases import Lease, LeaseTable, first_length
from themis_bridge.locality import Gpu
from themis_bridge.policy import Outcome, Policy, Situation, Themis
from themis_bridge.preemption import leases_to_recall
from themis_bridge.rounds import Round
from themis_bridge.settings import NO_QUOTA, Settings

logger = logging.getLogger(__name__)


class Arbiter:
    """See the module. ``policy``: Themis with the settings' f unless another one is given."""

    def __init__(self, settings: Settings | None = None, policy: Policy | None = None):
        self.settings = settings or Settings()
        self._given = policy
        self.gpus: dict[str, Gpu] = {}
        self.apps: dict[str, AppRecord] = {}
        self.leases = LeaseTable()
        self.round: Round | None = None
        self.rounds = 0
        #: Seconds on a clock of its own, which only goes forward.
        self.clock = 0.0
        self._raw: float | None = None
        self._epoch, self._version = 0, 0
        #: When a round may begin although nothing changed.
        self._next = 0.0
        self._backoff = Backoff()
        self._out: list[m.Instruction] = []
        #: The last outcome, for whoever watches.
        self.last: Outcome | None = None
        self.late = 0
        #: Rounds in which the policy raised something; that is a bug.
        self.failed = 0

    # --- state that survives

    def saved(self) -> dict[str, Any]:
        """All that the next arbiter needs, as plain data."""
        return {
            "settings": asdict(self.settings),
            "apps": {name: asdict(app) for name, app in self.apps.items()},
            "leases": self.leases.saved(),
            "rounds": self.rounds,
            "clock": self.clock,
            "epoch": self._epoch,
        }

    @classmethod
    def restored(
        cls,
        data: Mapping[str, Any],
        reserved: Mapping[str, tuple[str, int]],
        gpus: Iterable[Gpu],
        wall: float,
        policy: Policy | None = None,
    ) -> tuple[Arbiter, list[m.Instruction]]:
        """The arbiter that a dead one left behind, and what puts the world in order.

        ``data``: its `saved()`, empty if even that is lost. ``reserved``: GPU -> (app, token) that exist now; those
        that nobody here knows are adopted if ``data`` is empty, and removed otherwise. ``gpus``: that are there.
        ``wall``: seconds of the time of day: without ``data``, tokens and versions go on from its milliseconds,
        above all that were ever given.
        """
        arbiter = cls(Settings(**data["settings"]) if "settings" in data else None, policy)
        arbiter.apps = {name: AppRecord(**app) for name, app in data.get("apps", {}).items()}
        seen = [token for _, token in reserved.values()]
        arbiter.leases = LeaseTable.load(data.get("leases", {}), seen if data else [*seen, int(1000 * wall)])
        arbiter.rounds = data.get("rounds", 0)
        arbiter.clock = data.get("clock", 0.0)
        arbiter._epoch = max(data.get("epoch", 0) + 1, 0 if data else int(1000 * wall))
        arbiter.gpus = {gpu.id: gpu for gpu in gpus}
        for app in arbiter.apps.values():
            app.heard = arbiter.clock
        out = arbiter._out
        for lease in list(arbiter.leases):
            there = reserved.get(lease.gpu)
            if lease.gpu not in arbiter.gpus or (there is None and lease.closing):
                arbiter.leases.drop(lease)
            elif there is None:
                # Perhaps never reserved, perhaps gone since: a token serves once.
                arbiter.leases.drop(lease)
                arbiter._grant(lease.gpu, lease.app, lease.leftover, lease.expires)
            elif there[1] == lease.token and lease.closing:
                out.append(m.Remove(lease.gpu, lease.app, lease.token))
        for gpu, (name, token) in reserved.items():
            known = arbiter.leases.get(gpu)
            if known is not None and known.token == token:
                continue
            if known is not None:
                # Written down, but the older one was never seen gone: close it first.
                arbiter.leases.drop(known)
            lease = Lease(gpu, name, token, arbiter.clock + arbiter.settings.lease_s)
            arbiter.leases.adopt(lease)
            if known is not None or data:
                arbiter._close(lease)
            elif name not in arbiter.apps:
                arbiter.apps[name] = AppRecord("", arbiter.clock, arbiter.clock)
        arbiter._out = []
        return arbiter, out

    # --- one event

    def handle(self, event: m.Event, now: float) -> list[m.Instruction]:
        """Take one event. ``now``: seconds of whatever clock the shell has; it may jump."""
        self._pass_time(now)
        if isinstance(event, m.AppEvent) and not self._admitted(event):
            out, self._out = self._out, []
            return out
        self._on_event(event)
        self._expire()
        self._advance()
        out, self._out = self._out, []
        return out

    def _pass_time(self, now: float) -> None:
        passed = 0.0 if self._raw is None else now - self._raw
        self._raw = now
        # A clock that jumps back stands still; one that jumps ahead, or a long sleep, ends leases but no more.
        passed = min(max(0.0, passed), max(self.settings.patience_s / 2, 1.0))
        self.clock += passed
        held = Counter(lease.app for lease in self.leases if not lease.closing)
        for name, app in self.apps.items():
            app.crowd += passed * len(self.apps)
            app.served += passed * min(1.0, held[name] / app.useful) * app.speed

    def _admitted(self, event: m.AppEvent) -> bool:
        """Whether the app is known under this session; a stranger is told."""
        app = self.apps.get(event.app)
        if app is not None and app.session == event.session:
            app.heard = self.clock
            return True
        if isinstance(event, m.AppJoined):
            return True
        if app is not None and app.session == "":
            app.session, app.heard = event.session, self.clock
            return True
        why = "another app of that name is running" if app else "the arbiter does not know this app; join again"
        why = f"app {event.app!r}: {why}"
        self._out.append(m.Refused(event.app, event.session, why, final=app is not None, unknown=app is None))
        return False

    @singledispatchmethod
    def _on_event(self, event: m.Event) -> None:
        raise ThemisError(f"{event!r} is not an event the arbiter knows; see themis_bridge.messages")

    @_on_event.register
    def _on_tick(self, event: m.Tick) -> None:
        pass

    @_on_event.register
    def _on_gpu_joined(self, event: m.GpuJoined) -> None:
        self.gpus[event.gpu.id] = event.gpu
        self._soon()

    @_on_event.register
    def _on_gpu_left(self, event: m.GpuLeft) -> None:
        self.gpus.pop(event.gpu, None)
        self._backoff.forget(gpu=event.gpu)
        lease = self.leases.get(event.gpu)
        if lease is not None:
            # Ray has removed what was on it, or will when the node is back: the token is never used again.
            self.leases.drop(lease)
            self._tell(lease.app)

    @_on_event.register
    def _on_app_joined(self, event: m.AppJoined) -> None:
        app = self.apps.get(event.app)
        if app is not None and app.session not in (event.session, ""):
            if self.clock - app.heard <= self.settings.patience_s / 2:
                why = f"another app of the name {event.app!r} is running; give this one a name of its own"
                self._out.append(m.Refused(event.app, event.session, why, final=True))
                return
            self._forget(event.app)
            app = None
        if app is None:
            app = self.apps[event.app] = AppRecord(event.session, self.clock, self.clock)
            if self._policy.recalls:
                for lease in leases_to_recall(event.app, self.gpus, self.leases, self.apps, self.settings, self.clock):
                    lease.recalled = True
        app.session, app.heard = event.session, self.clock
        self._tell(event.app)
        self._soon()

    @_on_event.register
    def _on_app_left(self, event: m.AppLeft) -> None:
        self._forget(event.app)

    @_on_event.register
    def _on_heard(self, event: m.Heard) -> None:
        self._tell(event.app)

    @_on_event.register
    def _on_rho_answer(self, event: m.RhoAnswer) -> None:
        round_ = self._awaiting(event)
        if round_ is None:
            return
        try:
            round_.take_report(event.app, event.report)
        except (ThemisError, TypeError, AttributeError) as error:
            self._refuse(round_, event, str(error))
            return
        known = self.apps[event.app]
        held = sorted(lease.token for lease in self.leases.of(event.app))
        known.take_report(event.report, held, len(self.gpus), self.clock - known.joined, self.contention(event.app))

    @_on_event.register
    def _on_bid_answer(self, event: m.BidAnswer) -> None:
        round_ = self._awaiting(event)
        if round_ is None:
            return
        try:
            round_.take_bid(event.app, event.bid, self._room(event.app, round_))
        except (ThemisError, TypeError, AttributeError) as error:
            self._refuse(round_, event, str(error))

    @_on_event.register
    def _on_release(self, event: m.Release) -> None:
        lease = self.leases.current(event.gpu, event.token)
        if lease is not None and lease.app == event.app and not lease.closing:
            self._close(lease)

    @_on_event.register
    def _on_removed(self, event: m.Removed) -> None:
        lease = self.leases.current(event.gpu, event.token)
        if lease is None:
            return
        self.leases.drop(lease)
        if not lease.closing:
            self._tell(lease.app)
        heir = lease.heir
        if heir in self.apps and event.gpu in self.gpus and self._room(heir) > 0:
            self._grant(event.gpu, heir, lease.heir_leftover)
            self._tell(heir)
        self._soon()

    @_on_event.register
    def _on_reserved(self, event: m.Reserved) -> None:
        lease = self.leases.current(event.gpu, event.token)
        if lease is None or lease.closing or not self._backoff.record_success(lease.gpu, lease.app):
            return
        if self._room(lease.app) < 0:
            # Others were won meanwhile.
            self._close(lease)
        self._tell(lease.app)

    @_on_event.register
    def _on_reserve_failed(self, event: m.ReserveFailed) -> None:
        lease = self.leases.current(event.gpu, event.token)
        if lease is None:
            return
        self.leases.drop(lease)
        self._backoff.record_failure(lease.gpu, lease.app, self.clock, self._retry)
        self._tell(lease.app)

    @_on_event.register
    def _on_configured(self, event: m.Configured) -> None:
        self.settings = self.settings.changed(event.changes)
        for app in self.apps:
            over = -self._room(app)
            for lease in self.leases.of(app)[: max(0, over)]:
                lease.ending, lease.heir = True, None
            self._tell(app)
        self._soon()

    # --- time

    def _expire(self) -> None:
        for name, app in list(self.apps.items()):
            if self.clock - app.heard > self.settings.patience_s:
                self._forget(name)
        for lease in list(self.leases):
            if not lease.closing and self.clock >= lease.expires:
                self._close(lease)
                self._tell(lease.app)

    def _forget(self, name: str) -> None:
        """The app is gone: end its leases and leave it out of the round."""
        self.apps.pop(name, None)
        self._backoff.forget(app=name)
        for lease in self.leases.of(name):
            self._close(lease)
        for lease in self.leases:
            if lease.heir == name:
                lease.heir = None
        if self.round is not None:
            self.round.forget(name)
        self._soon()

    def _close(self, lease: Lease) -> None:
        lease.closing = True
        self._out.append(m.Remove(lease.gpu, lease.app, lease.token))

    def _soon(self) -> None:
        self._next = min(self._next, self.clock)

    # --- rounds

    def _offerable(self) -> dict[str, Gpu]:
        """GPUs that are free for some app, or whose leases are on offer."""
        found = {}
        for name, gpu in self.gpus.items():
            lease = self.leases.get(name)
            if lease is None:
                if not self.apps.keys() <= self._backoff.barred_apps(name, self.clock):
                    found[name] = gpu
            elif lease.on_offer(self.clock, self.settings.notice_s):
                found[name] = gpu
        return found

    def _advance(self) -> None:
        round_ = self.round
        if round_ is None:
            self._begin()
            return
        late = round_.awaited
        if late and self.clock < round_.deadline:
            return
        if late:
            logger.warning("themis: round %d goes on without an answer of %s", round_.number, ", ".join(sorted(late)))
        try:
            if not round_.bidders:
                self._offer(round_)
            else:
                self._clear(round_)
        except Exception:
            # A round that stays open would be the last one, and no lease would end.
            logger.exception("themis: round %d failed; nothing is leased in it", round_.number)
            self.failed += 1
            self._settle(round_, Outcome())

    def _begin(self) -> None:
        offer = self._offerable()
        if not offer or not self.apps or self.clock < self._next:
            return
        # One round is about GPUs that the same apps may have; other GPUs are the next one's.
        groups: dict[frozenset[str], dict[str, Gpu]] = {}
        for name, gpu in offer.items():
            groups.setdefault(self._backoff.barred_apps(name, self.clock), {})[name] = gpu
        self.rounds += 1
        self._next = self.clock + self._retry / len(groups)
        barred = list(groups)[self.rounds % len(groups)]
        asked = {name: app.session for name, app in self.apps.items() if name not in barred}
        self.round = Round(self.rounds, self.clock + self.settings.answer_s, asked, groups[barred])
        for name, session in asked.items():
            self._out.append(m.AskRho(name, session, self.rounds, self.contention(name), len(self.gpus)))

    def _offer(self, round_: Round) -> None:
        round_.narrow(self._offerable())
        situation = self._situation(round_)
        round_.bidders = self._policy.bidders(situation) if round_.offer and round_.reports else []
        if not round_.bidders:
            self._settle(round_, self._policy.decide(situation, {}) if round_.offer else Outcome())
            return
        round_.deadline = self.clock + self.settings.answer_s
        for app in round_.bidders:
            self._out.append(
                m.Offer(
                    app,
                    self.apps[app].session,
                    round_.number,
                    tuple(round_.offer.values()),
                    self.contention(app),
                    len(self.gpus),
                    situation.held[app],
                    self.settings.quotas.get(app),
                )
            )

    def _clear(self, round_: Round) -> None:
        round_.narrow(self._offerable())
        situation = self._situation(round_)
        self._settle(round_, self._policy.decide(situation, round_.bids) if round_.offer else Outcome())

    def _settle(self, round_: Round, outcome: Outcome) -> None:
        """Make leases of an outcome: renew, promise what its holder has to leave, grant what is free."""
        self.round, self.last = None, outcome
        told = set()
        for gpu in round_.offer:
            lease, winner = self.leases.get(gpu), outcome.grants.get(gpu)
            leftover = gpu in outcome.leftovers
            if winner is not None and winner not in self.apps:
                winner = None
            if lease is None:
                if winner is not None:
                    self._grant(gpu, winner, leftover)
                    told.add(winner)
            elif winner == lease.app:
                if not lease.recalled:
                    lease.expires += self.settings.lease_s
                    lease.leftover = leftover
                    told.add(winner)
            elif winner is not None:
                lease.heir, lease.ending, lease.heir_leftover = winner, True, leftover
                if lease.recalled:
                    lease.expires = min(lease.expires, self.clock + self.settings.notice_s)
                told.add(lease.app)
            else:
                # Nobody wants it, its holder neither: at its end it is free.
                told.add(lease.app)
            if lease is not None:
                lease.recalled = False
        for app in sorted(told):
            self._tell(app)

    @property
    def _retry(self) -> float:
        """Shorter if the notice is, so that a lease is offered several times before it ends."""
        return min(self.settings.pace_s, self.settings.notice_s / 4) or self.settings.pace_s

    @property
    def due(self) -> float:
        """Seconds until the next `Tick` that could change anything, if no other event comes first."""
        if self.round is not None:
            return max(0.0, self.round.deadline - self.clock)
        times = [until for gpu, until in self._backoff.retry_times(self.clock) if not self.leases.get(gpu)]
        for lease in self.leases:
            if not lease.closing:
                settled = lease.ending or lease.expires - self.clock <= self.settings.notice_s
                times.append(lease.expires - (0.0 if settled else self.settings.notice_s))
        if self.apps and self._offerable():
            times.append(self._next)
        return max(0.0, min(times, default=math.inf) - self.clock)

    @property
    def _policy(self) -> Policy:
        return self._given or Themis(self.settings.f)

    def _situation(self, round_: Round) -> Situation:
        reports = {app: report for app, report in round_.reports.items() if app in self.apps}
        held = {}
        for app in reports:
            held[app] = tuple(self.gpus[each.gpu] for each in self.leases.of(app) if self._keeps(each, round_))
        for lease in self.leases:
            if lease.heir in held:
                held[lease.heir] += (self.gpus[lease.gpu],)
        for app, weight in self.settings.weights.items():
            if app in reports:
                known = reports[app]
                reports[app] = replace(known, rho=known.rho * weight, best=known.best * weight)
        for app, known in reports.items():
            doubt = self.apps[app].doubt
            reports[app] = replace(known, rho=known.rho / doubt, best=known.best / doubt)
        holder = {lease.gpu: lease.app for lease in self.leases if lease.gpu in round_.offer}
        return Situation(reports, held, round_.offer, holder, self.settings.quotas)

    def _keeps(self, lease: Lease, round_: Round) -> bool:
        settled = lease.gpu not in round_.offer and lease.heir is None and not lease.ending
        return settled and (lease.gpu, lease.app) not in self._backoff

    def _room(self, app: str, round_: Round | None = None) -> int:
        """How many more GPUs the app may hold; those on offer do not count as held."""
        quota = self.settings.quotas.get(app)
        if quota is None:
            return NO_QUOTA
        held = [lease for lease in self.leases.of(app) if round_ is None or self._keeps(lease, round_)]
        return quota - len(held)

    def _grant(self, gpu: str, app: str, leftover: bool, expires: float | None = None) -> None:
        if expires is None:
            expires = self.clock + first_length(gpu, self.gpus, self.clock, self.settings.lease_s)
        lease = self.leases.grant(gpu, app, expires, leftover)
        self._out.append(m.Reserve(gpu, app, lease.token))

    def _awaiting(self, event: m.RhoAnswer | m.BidAnswer) -> Round | None:
        """The round, if it waits for this answer."""
        if self.round is not None and self.round.awaits(event):
            return self.round
        self.late += 1
        return None

    def _refuse(self, round_: Round, event: m.AppEvent, why: str) -> None:
        round_.out.add(event.app)
        why = f"app {event.app!r}, round {round_.number}: {why}"
        logger.warning("themis: an answer is refused: %s", why)
        self._out.append(m.Refused(event.app, event.session, why))

    # --- what others see

    def contention(self, app: str) -> float:
        """N_avg: apps in the system, averaged over this one's life."""
        known = self.apps[app]
        life = self.clock - known.joined
        return max(1.0, known.crowd / life) if life > 0 else float(len(self.apps))

    def _tell(self, name: str) -> None:
        app = self.apps.get(name)
        if app is None:
            return
        self._version += 1
        views = tuple(
            m.LeaseView(self.gpus[each.gpu], each.token, each.expires - self.clock, each.ending, each.leftover)
            for each in self.leases.of(name)
            if (each.gpu, name) not in self._backoff
        )
        self._out.append(m.Leases(name, app.session, (self._epoch, self._version), views))

    def validate_state(self) -> None:
        """Asserts every invariant; for tests, after any event."""
        for lease in self.leases:
            assert lease.gpu in self.gpus, f"{lease} of a GPU that is not there"
            assert lease.token <= self.leases.token
            assert lease.closing or lease.app in self.apps, f"{lease} of an app that is not there"
            assert lease.heir is None or lease.heir in self.apps
        assert not self.failed, "a policy raised something; the log says what"
        assert self.round is None or set(self.round.bidders) <= self.round.asked.keys()
        assert not self._out, "instructions that nobody was given"
