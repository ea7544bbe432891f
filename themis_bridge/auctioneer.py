"""Clears the GPUs on offer: from the newest reports of all apps to grants, renewals and promises, at one moment.

A clearing is a function of the state: who needs what (`app_record`), what is on offer, and what is set aside for
reserves. The policy then chooses bidders, the arbiter makes their bids of their reports, and the policy's decision
becomes leases. (It is the visibility phase and the allocation phase of the paper's section 4.2.2; an app's word comes
before the GPU is free and not after it.) `policy` decides which apps bid and which win.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from themis_bridge.arbiter_state import ArbiterState
from themis_bridge.bids import Endless, make_bid
from themis_bridge.fairness import equal_shares
from themis_bridge.lease_manager import LeaseManager
from themis_bridge.locality import Gpu, cut_in_gangs
from themis_bridge.policy import Need, Policy, Situation, tie_break, whole
from themis_bridge.preemption import leases_to_recall
from themis_bridge.settings import NO_QUOTA
from themis_bridge.winner_determination import EQUAL

logger = logging.getLogger(__name__)


class Auctioneer:
    """See the module.

    leases: makes and ends the leases.
    policy: makes the policy with the f of the settings, whatever that is at the time.
    """

    def __init__(self, state: ArbiterState, leases: LeaseManager, policy: Callable[[float], Policy]):
        self._state, self._leases, self._policy = state, leases, policy
        #: What the next round may be about: as of the last round, and when it comes although nothing has changed, s.
        self._seen: Any = None
        self._again = 0.0
        #: When the arbiter began, without reports.
        self._began = state.clock
        #: Number of times that a round, or one app's part in it, raised an exception, which is a bug.
        self.failed = 0

    # --- when

    @property
    def due(self) -> float:
        """When there is something to clear or to recall, s on the arbiter's clock; infinite if only an event can tell.

        At once if an app is new, or if something has changed since the last round that the next one is about.
        """
        state = self._state
        if state.gpus and any(state.apps[name].rho is None for name in self._here()):
            return state.clock
        if not state.apps or not state.offerable():
            return math.inf
        return self._again if self._seen == self._subject() else state.clock

    def _here(self) -> list[str]:
        """The apps whose reports are new enough to take part in a round."""
        state, oldest = self._state, self._state.clock - self._state.settings.answer_s
        return [name for name, app in state.apps.items() if name in state.reports and app.heard >= oldest]

    def _subject(self) -> Any:
        """Who takes part, by which settings, and which GPUs are free for whom."""
        state = self._state
        barred = {name: state.barred(name) for name in filter(state.leases.is_free, state.gpus)}
        return {name: app.session for name, app in state.apps.items()}, state.settings, barred

    def advance(self) -> None:
        """Recall leases for apps that are new, and clear what is on offer, if that is due."""
        state, oldest = self._state, self._state.clock - self._state.settings.answer_s
        # After a restart of the arbiter, apps have to say first how things are.
        if state.clock < self.due or (state.apps.keys() - state.reports.keys() and self._began > oldest):
            return
        recalled = set[str]()
        # Those that are new come first: for them leases are recalled by the order of the last round.
        here = sorted(self._here(), key=lambda name: state.apps[name].rho is not None)
        apps = [name for name in here if self._take_report(name, recalled)]
        offer = state.offerable(recalled)
        # A round is about GPUs that the same apps may have.
        groups: dict[frozenset[str], dict[str, Gpu]] = {}
        for name in offer if apps else ():
            groups.setdefault(state.barred(name), {})[name] = offer[name]
        for barred, part in groups.items():
            state.rounds += 1
            self._clear(part, [app for app in apps if app not in barred], recalled)
        if groups:
            self._seen, self._again = self._subject(), state.clock + state.settings.retry_s

    def _take_report(self, app: str, recalled: set[str]) -> bool:
        """Take an app's newest report, and recall leases for it if it is new. Returns whether it can take part."""
        state, record = self._state, self._state.apps[app]
        try:
            if record.rho is None and self._policy(state.settings.f).recalls:
                recalled.update(leases_to_recall(app, state, recalled))
            state.take_report(app)
        except Exception:
            logger.exception("themis: the report of %s cannot be used; the app is left out of this round", app)
            self.failed += 1
            # Else it would be new for ever, and a round due at each tick.
            record.rho = record.rho or 0.0
            return False
        return True

    # --- one round

    def _clear(self, offer: dict[str, Gpu], apps: list[str], recalled: set[str]) -> None:
        """Clear one offer. ``apps``: those that may have its GPUs. ``recalled``: GPUs whose notice has not begun."""
        state = self._state
        aside = grants = dict[str, str]()
        try:
            grants = aside = set_aside(state, apps, offer)
            rest = {gpu: place for gpu, place in offer.items() if gpu not in aside}
            if rest and apps:
                situation, policy = self._situation(rest, aside, apps), self._policy(state.settings.f)
                bids = {}
                for app in policy.bidders(situation):
                    # It says what the app would with its report, as far as that is believed.
                    held, own = situation.held[app], {lease.gpu for lease in state.leases.of(app)}
                    bids[app] = make_bid(app, state.worth(app), held, rest.values(), situation.quota.get(app), own)
                grants = aside | whole(situation, policy.decide(situation, bids))
        except Exception:
            # If this round were not ended, no other one could ever be.
            logger.exception("themis: round %d failed; nothing is leased in it", state.rounds)
            self.failed += 1
        for gpu in dict.fromkeys((*aside, *offer)):
            self._settle(gpu, grants.get(gpu), gpu in recalled)
        for app in state.apps:
            self._leases.align_ends(app)

    def _settle(self, gpu: str, winner: str | None, recalled: bool) -> None:
        """Grant a GPU that is free, renew its lease, or promise it to its next holder."""
        state, lease = self._state, self._state.leases.get(gpu)
        if lease is None or lease.waits:
            # His leases that no app has won count until they end.
            if winner is not None and state.quota_left(state.user_of(winner)) > 0:
                # A reservation that waits makes way for that of an app that needs less beside the GPU.
                if lease is not None:
                    state.leases.drop(lease)
                self._leases.grant_gpu(gpu, winner)
            return
        # A recalled lease that stays with its holder keeps the end that it had. Without a winner nothing is promised:
        # the lease is offered again, and at its end the GPU is free.
        if winner == lease.app and not recalled:
            lease.expires = self._leases.next_end(gpu, lease.expires)
        elif winner not in (None, lease.app):
            lease.heir, lease.ending = winner, True
            if recalled:
                lease.expires = min(lease.expires, state.clock + state.settings.notice_s)

    # --- helpers

    def _situation(self, offer: Mapping[str, Gpu], aside: Mapping[str, str], apps: Iterable[str]) -> Situation:
        """The facts for the policy. ``aside``: GPU -> the app to whose reserve it goes."""
        state, weights = self._state, self._state.weights()
        held = {
            app: tuple(state.gpus[each.gpu] for each in state.leases.of(app) if state.is_kept(each, offer))
            for app in apps
        }
        promised = [(lease.gpu, lease.heir) for lease in state.leases if lease.heir is not None]
        for gpu, app in (*promised, *aside.items()):
            if app in held:
                held[app] += (state.gpus[gpu],)
        needs = {}
        for app in held:
            record, worth, report = state.apps[app], state.worth(app), state.reports[app]
            factor = record.factor(app, weights)
            wanted = {record.wanted: 1} if record.wanted else {}
            left = 0.0 if isinstance(worth, Endless) else worth.finish((), wanted)
            rho, best = (record.rho or 0.0) * factor, record.best * factor
            tie = tie_break(app, record.joined, state.rounds)
            needs[app] = Need(rho, worth.useful, worth.gang, best, left, report, record.together, tie)
        holder = {lease.gpu: lease.app for lease in state.leases if lease.gpu in offer and not lease.waits}
        return Situation(needs, held, offer, holder, self._quotas(needs, held))

    def _quotas(self, needs: Mapping[str, Need], held: Mapping[str, tuple[Gpu, ...]]) -> dict[str, int]:
        """App -> the most GPUs that it may hold, for the apps of a user who has a quota or several apps.

        A user's apps use up his quota in turn, worst rho first. A user of several apps is also limited to the GPUs that
        are his share if every user has an equal share (or fewer, if he can use fewer): rho goes by app, so that many
        apps that take turns at being the worst would get more than one app does.
        """
        state = self._state
        own: dict[str, list[str]] = defaultdict(list)
        for app in sorted(needs, key=lambda app: (-needs[app].rho, needs[app].tie)):
            own[state.user_of(app)].append(app)
        most = {
            user: min(sum(needs[app].useful for app in apps), state.settings.quotas.get(user, NO_QUOTA))
            for user, apps in own.items()
        }
        shares = equal_shares(most, len(state.gpus))
        quotas: dict[str, int] = {}
        for user, apps in own.items():
            if len(apps) == 1 and user not in state.settings.quotas:
                continue
            left = most[user] if len(apps) == 1 else math.ceil(shares[user] - EQUAL)
            left -= sum(len(held[app]) for app in apps)
            for app in apps:
                more = max(0, min(left, needs[app].useful - len(held[app])))
                together = needs[app].together
                more -= more % together
                if left > 0 and user not in state.settings.quotas and not any(held[each] for each in apps):
                    # A share that is less than a gang must not keep a user of several apps from ever having one.
                    more = max(more, min(together, needs[app].useful))
                quotas[app] = len(held[app]) + more
                left -= more
        return quotas


def set_aside(state: ArbiterState, apps: Iterable[str], offer: Mapping[str, Gpu]) -> dict[str, str]:
    """GPUs of the offer that go to reserves, whatever the policy: GPU -> app.

    Each app first gets back what it holds itself, up to its reserve. What is missing is taken from free GPUs, and then
    from the apps that hold most on offer. If there is too little for all, the app that came first is first. So an app
    may lose its last GPU to the reserve of another one, but never a GPU of its own reserve. A user's quota is kept.
    ``apps``: those that take part in the round. ``offer``: GPU id -> the GPU.
    """
    here = sorted(apps, key=lambda app: (state.apps[app].joined, app))
    owed = {app: state.reserve(app) for app in here}
    for lease in state.leases:
        app = lease.app if state.is_kept(lease, offer) else lease.heir
        if app in owed:
            owed[app] -= 1
    holder = {lease.gpu: lease.app for lease in state.leases if lease.gpu in offer and not lease.waits}
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
