"""Runs the rounds: begins them, collects reports and bids, and makes leases of what the policy decides.

A round has two stages, each of which waits for answers. In the first one every app is asked for its rho. Then the
policy chooses bidders; in the second stage they are offered the GPUs and send bids. At the end the policy's decision
becomes leases. A stage ends when all answers are there, or at its deadline without those that are late. (Both stages
together are the visibility phase of the paper, section 4.2.2. The decision and the leases are its allocation phase.)
`policy` decides which apps bid and which win.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from themis_bridge import messages as m
from themis_bridge.arbiter_state import ArbiterState
from themis_bridge.auction import Bid
from themis_bridge.errors import ThemisError
from themis_bridge.fairness import equal_shares
from themis_bridge.lease_manager import LeaseManager
from themis_bridge.leases import Lease
from themis_bridge.locality import Gpu, whole_gangs
from themis_bridge.policy import Outcome, Policy, Situation, Themis, tie_break, whole
from themis_bridge.preemption import leases_to_recall
from themis_bridge.rounds import Round, set_aside
from themis_bridge.settings import NO_QUOTA
from themis_bridge.winner_determination import EQUAL

logger = logging.getLogger(__name__)

#: A lease is offered at least this often before it ends: in one round the bidders may be late.
OFFERS_IN_NOTICE = 4
#: The exceptions of the checks, for an answer that cannot be true or does not have the types of `messages`, and of
#: computing with numbers that are too large.
BAD_ANSWER = (ThemisError, TypeError, AttributeError, ArithmeticError)


@dataclass
class Tally:
    """What has become of the GPUs on offer since the arbiter started. All are numbers of rounds or of GPUs."""

    #: Rounds in which apps bid.
    auctions: int = 0
    #: Of these, the rounds with several bids.
    contested: int = 0
    #: GPUs that bidders won.
    won: int = 0
    #: Of these, the GPUs that they kept; the others were their payments.
    kept: int = 0
    #: GPUs that apps were given without having won them.
    leftovers: int = 0
    #: GPUs that stayed with their holder although another app would have got them.
    overridden: int = 0

    def add(self, number: int, outcome: Outcome) -> None:
        """Count round ``number`` and log its auction."""
        self.leftovers += len(outcome.leftovers)
        self.overridden += len(outcome.overridden)
        clearing = outcome.clearing
        if clearing is None:
            return
        won = {app: len(gpus) for app, gpus in clearing.proportional.items()}
        kept = {app: len(gpus) for app, gpus in clearing.allocation.items()}
        self.auctions += bool(won)
        self.contested += len(won) > 1
        self.won += sum(won.values())
        self.kept += sum(kept.values())
        paid = clearing.payment
        bids = ", ".join(f"{app} kept {kept[app]} of {won[app]} (c = {paid[app]:.3g})" for app in sorted(won))
        logger.info(
            "themis: round %d: %s; %d leftover, %d stay with their holder",
            number,
            bids or "no bids",
            len(outcome.leftovers),
            len(outcome.overridden),
        )


class Auctioneer:
    """See the module.

    leases: makes, ends and announces the leases.
    out: the list to which the arbiter's instructions are appended.
    policy: None for Themis with the f of the settings, whatever that is at the time.
    """

    def __init__(
        self, state: ArbiterState, leases: LeaseManager, out: list[m.Instruction], policy: Policy | None = None
    ):
        self._state, self._leases, self._out, self._given = state, leases, out, policy
        #: The round in progress; None between rounds.
        self.round: Round | None = None
        #: No round begins before this time on the arbiter's clock; `begin_soon` makes it earlier.
        self.not_before = 0.0
        #: Number of answers that no round was waiting for.
        self.late = 0
        #: Number of rounds in which the policy raised an exception, which is a bug.
        self.failed = 0
        self.tally = Tally()

    # --- what the arbiter asks for

    def begin_soon(self) -> None:
        """Something changed: a round may begin at once."""
        self.not_before = min(self.not_before, self._state.clock)

    def recall_leases_for(self, newcomer: str) -> None:
        """Put leases on offer for an app that has just joined, if the policy has recalls."""
        state = self._state
        if self._policy.recalls:
            settings = replace(state.settings, weights=state.weights())
            for lease in leases_to_recall(newcomer, state.gpus, state.leases, state.apps, settings, state.clock):
                lease.recalled = True

    def forget_app(self, name: str) -> None:
        if self.round is not None:
            self.round.forget_app(name)

    def take_answer(self, event: m.RhoAnswer | m.BidAnswer) -> None:
        """Note an app's answer to `messages.AskRho` or `messages.Offer`, or refuse it."""
        round_, state = self.round, self._state
        if round_ is None or not round_.awaits(event):
            self.late += 1
            return
        gpus, contention = len(state.gpus), state.contention(event.app)
        app = state.apps[event.app]
        elapsed = state.clock - app.joined
        try:
            if isinstance(event, m.RhoAnswer):
                report = round_.plain_report(event)
                held = sorted(lease.token for lease in state.leases.of(event.app))
                app.take_report(report, held, gpus, elapsed, contention)
                round_.reports[event.app] = report
            else:
                kept = whole_gangs(round_.bidders[event.app].held, app.together)
                bid, report = replace(round_.plain_bid(event), together=app.together), round_.reports[event.app]
                round_.bids[event.app] = app.own_bid(bid, report, kept, gpus, elapsed, contention)
        except BAD_ANSWER as error:
            round_.refused.add(event.app)
            why = f"app {event.app!r}, round {round_.number}: {error}"
            logger.warning("themis: an answer is refused: %s", why)
            self._out.append(m.Refused(event.app, event.session, why))

    def advance(self) -> None:
        """Begin a round if one is due, or take the round in progress as far as it can go now."""
        round_ = self.round
        if round_ is None:
            self._begin()
            return
        late = round_.awaited
        if late and self._state.clock < round_.deadline:
            return
        if late:
            logger.warning("themis: round %d goes on without an answer of %s", round_.number, ", ".join(sorted(late)))
        try:
            if not round_.bidders:
                self._make_offers(round_)
            else:
                round_.narrow_offer(self._state.offerable())
                self._settle(round_, self._decided(self._situation(round_), round_.bids))
        except Exception:
            # If this round stayed open, no other round could ever begin.
            logger.exception("themis: round %d failed; nothing is leased in it", round_.number)
            self.failed += 1
            self._settle(round_, Outcome())

    @property
    def retry_s(self) -> float:
        """Seconds between rounds while nothing changes."""
        settings = self._state.settings
        return min(settings.pace_s, settings.notice_s / OFFERS_IN_NOTICE) or settings.pace_s

    # --- the stages of a round

    def _begin(self) -> None:
        state = self._state
        offer = state.offerable()
        if not offer or not state.apps or state.clock < self.not_before:
            return
        # A round is about GPUs that the same apps may have. Other groups of GPUs have their turn in the next rounds.
        groups: dict[frozenset[str], dict[str, Gpu]] = {}
        for name, barred in state.barred(offer).items():
            groups.setdefault(barred, {})[name] = offer[name]
        state.rounds += 1
        self.not_before = state.clock + self.retry_s / len(groups)
        chosen = list(groups)[state.rounds % len(groups)]
        asked = {name: app.session for name, app in state.apps.items() if name not in chosen}
        self.round = Round(state.rounds, state.clock + state.settings.answer_s, asked, groups[chosen])
        for name, session in asked.items():
            self._out.append(m.AskRho(name, session, state.rounds, state.contention(name), len(state.gpus)))

    def _make_offers(self, round_: Round) -> None:
        """End the first stage: choose the bidders and send them the offer."""
        state = self._state
        round_.narrow_offer(state.offerable())
        aside = set_aside(state, round_.asked, round_.offer)
        round_.narrow_offer(round_.offer.keys() - aside.keys())
        round_.reserved = aside
        situation = self._situation(round_)
        bidders = self._policy.bidders(situation) if round_.offer and round_.reports else []
        if not bidders:
            self._settle(round_, self._decided(situation, {}))
            return
        round_.deadline = state.clock + state.settings.answer_s
        offered, gpus = tuple(round_.offer.values()), len(state.gpus)
        for app in bidders:
            session, contention = state.apps[app].session, state.contention(app)
            held, most = situation.held[app], situation.quota.get(app)
            round_.bidders[app] = m.Offer(app, session, round_.number, offered, contention, gpus, held, most)
        self._out += round_.bidders.values()

    def _decided(self, situation: Situation, bids: Mapping[str, Bid]) -> Outcome:
        return whole(situation, self._policy.decide(situation, bids)) if situation.offer else Outcome()

    def _settle(self, round_: Round, outcome: Outcome) -> None:
        """Make leases of an outcome: grant free GPUs, renew leases, and promise the other GPUs to their heirs."""
        state = self._state
        self.round = None
        self.tally.add(round_.number, outcome)
        told, gangs = set(), state.gangs()
        for gpu in (*round_.reserved, *round_.offer):
            lease, winner = state.leases.get(gpu), round_.reserved.get(gpu) or outcome.grants.get(gpu)
            leftover = gpu in outcome.leftovers
            if winner is not None and winner not in state.apps:
                winner = None
            if lease is None:
                # His leases that no app has won count until they end.
                if winner is not None and state.quota_left(state.user_of(winner)) > 0:
                    self._leases.grant_gpu(gpu, winner, leftover)
                    told.add(winner)
                continue
            if winner == lease.app:
                # A recalled lease that stays with its holder keeps the end that it had.
                if not lease.recalled:
                    lease.expires = self._leases.next_end(gpu, lease.expires, bool(gangs))
                    lease.leftover = leftover
                    told.add(winner)
            else:
                # Without a winner nothing is promised: the lease is offered again, and at its end the GPU is free.
                if winner is not None:
                    self._promise(lease, winner, leftover)
                told.add(lease.app)
            lease.recalled = False
        if gangs:
            told |= {lease.heir for lease in state.leases if lease.heir in gangs}
        for app in sorted(told):
            self._leases.align_ends(app)
            self._leases.tell_app(app)

    def _promise(self, lease: Lease, heir: str, leftover: bool) -> None:
        """Let a lease end for another app that has won its GPU."""
        lease.heir, lease.ending, lease.heir_leftover = heir, True, leftover
        if lease.recalled:
            lease.expires = min(lease.expires, self._state.clock + self._state.settings.notice_s)

    # --- helpers

    @property
    def _policy(self) -> Policy:
        return self._given or Themis(self._state.settings.f)

    def _situation(self, round_: Round) -> Situation:
        """The facts for the policy. In them an app's rho is multiplied by its weight and divided by its doubt."""
        state = self._state
        reports = {app: report for app, report in round_.reports.items() if app in state.apps}
        held = {
            app: tuple(state.gpus[each.gpu] for each in state.leases.of(app) if state.is_kept(each, round_.offer))
            for app in reports
        }
        for lease in state.leases:
            if lease.heir in held:
                held[lease.heir] += (state.gpus[lease.gpu],)
        for gpu, app in round_.reserved.items():
            if app in held:
                held[app] += (state.gpus[gpu],)
        weights = state.weights()
        for app, known in reports.items():
            record = state.apps[app]
            factor = record.factor(app, weights)
            rho = known.rho if record.rho is None else record.rho
            reports[app] = replace(known, rho=rho * factor, best=record.best * factor)
        holder = {lease.gpu: lease.app for lease in state.leases if lease.gpu in round_.offer}
        joined = {app: state.apps[app].joined for app in reports}
        quotas = self._quotas(reports, held, round_.number)
        return Situation(reports, held, round_.offer, holder, quotas, joined, round_.number, state.gangs())

    def _quotas(
        self, reports: Mapping[str, m.Report], held: Mapping[str, tuple[Gpu, ...]], number: int
    ) -> dict[str, int]:
        """App -> the most GPUs that it may hold, for the apps of a user who has a quota or several apps.

        A user's apps use up his quota in turn, worst rho first. A user of several apps is also limited to the GPUs that
        are his share if every user has an equal share (or fewer, if he can use fewer): rho goes by app, so that many
        apps that take turns at being the worst would get more than one app does.
        """
        state = self._state
        own: dict[str, list[str]] = defaultdict(list)
        for app in sorted(reports, key=lambda app: (-reports[app].rho, tie_break(app, state.apps[app].joined, number))):
            own[state.user_of(app)].append(app)
        most = {
            user: min(sum(reports[app].useful for app in apps), state.settings.quotas.get(user, NO_QUOTA))
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
                more = max(0, min(left, reports[app].useful - len(held[app])))
                together = state.apps[app].together
                more -= more % together
                if left > 0 and user not in state.settings.quotas and not any(held[each] for each in apps):
                    # A share that is less than a gang must not keep a user of several apps from ever having one.
                    more = max(more, min(together, reports[app].useful))
                quotas[app] = len(held[app]) + more
                left -= more
        return quotas
