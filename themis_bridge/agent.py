"""The agent: speaks to the arbiter for one tuning app, and tells the app's executor which GPUs the app holds.

It is a state machine like the arbiter. The app says what it still has to do (`Work`); from that the agent computes the
rho and the bids that it sends. The arbiter always sends all leases of the app, and the agent derives from them which
GPUs were gained, which have to be left and which are lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from themis_bridge import messages as m
from themis_bridge.auction import Bid
from themis_bridge.bids import Endless, Valuation, make_bid
from themis_bridge.locality import Gpu


class Work(Protocol):
    """What the agent asks its app."""

    def valuation(self, contention: float, cluster_gpus: int) -> Valuation | Endless:
        """The work left now. ``contention`` (N_avg) and ``cluster_gpus`` (R_C) are needed for T_id or the share."""


@dataclass(frozen=True)
class Notice:
    """News for the executor about a GPU and the token of its lease."""

    gpu: Gpu
    token: int


@dataclass(frozen=True)
class Gained(Notice):
    """From now on trials may run on the GPU, under this token."""


@dataclass(frozen=True)
class Leave(Notice):
    """The lease ends in ``within`` seconds and is not renewed: commit, leave the GPU, then call `Agent.vacated`."""

    within: float


@dataclass(frozen=True)
class Lost(Notice):
    """The app does not hold the GPU any more; what still runs there is killed."""


class Agent:
    """The agent of one app.

    session: a name that is unique to this run of the app's driver.
    user: whose app it is, together: how many GPUs of one machine each of its trials needs at once; see
        `messages.AppJoined`.
    """

    def __init__(self, app: str, session: str, work: Work, user: str = "", together: int = 1):
        self.app, self.session, self.user, self.together = app, session, user, together
        self.work = work
        #: GPU id -> its lease, by the arbiter's last message.
        self.leases: dict[str, m.LeaseView] = {}
        #: GPUs that it gets next, by the arbiter's last message; told only if it needs gangs.
        self.promised = 0
        #: GPU id -> the newest fencing token that the arbiter has named; older ones are refused.
        self._newest: dict[str, int] = {}
        #: Why the arbiter refused this app for good; None if it did not.
        self.refused: str | None = None
        #: Why the app has not joined yet; None if the arbiter has not said so.
        self.waits: str | None = None
        #: GPU id -> token of the last lease that the executor gave up by itself.
        self._left: dict[str, int] = {}
        #: Version of the newest `messages.Leases`; older ones are ignored.
        self._version = (0, 0)
        #: The last bid, reused to value leftovers; None once the leftovers that it was made for have ended.
        self._bid: Bid | None = None
        #: Ids of the GPUs that were guaranteed to the app when it made that bid.
        self._guaranteed: set[str] = set()

    def handle(self, instruction: m.Instruction) -> tuple[list[m.AppEvent], list[Notice]]:
        """Handle one instruction. Returns the answers to the arbiter and the notices to the executor."""
        if isinstance(instruction, m.AskRho):
            return [self._answer_rho(instruction)], []
        if isinstance(instruction, m.Offer):
            return [self._answer_offer(instruction)], []
        if isinstance(instruction, m.Leases):
            return self._update_leases(instruction)
        if isinstance(instruction, m.Refused):
            if instruction.final:
                self.refused = instruction.why
                return [], self._drop_leases(self.leases)
            if instruction.waits:
                self.waits = instruction.why
            if instruction.unknown:
                # The arbiter may be a new one whose clock was set back, so its versions and tokens may be smaller than
                # those known here. From now on they count.
                self._version, self._newest = (0, 0), {}
                return [m.AppJoined(self.app, self.session, self.user, together=self.together)], []
        return [], []

    def heartbeat(self) -> m.Heard:
        """What to send to the arbiter five times a second. The answer has the app's leases if they have changed."""
        return m.Heard(self.app, self.session, self._version)

    def vacated(self, gpu: str, token: int | None = None) -> list[m.AppEvent]:
        """The executor has left the GPU for good. Returns what to send to the arbiter, which does not answer it.

        token: of the lease that it has left; None: of the present one. A newer lease of the GPU, of which the executor
        may not have heard yet, is kept.
        """
        view = self.leases.get(gpu)
        if view is None or token not in (None, view.token):
            return []
        del self.leases[gpu]
        self._left[gpu] = view.token
        return [m.Release(self.app, self.session, gpu, view.token)]

    def _answer_rho(self, ask: m.AskRho) -> m.RhoAnswer:
        value = self.work.valuation(ask.contention, ask.gpus)
        held = [view.gpu for view in self.leases.values()]
        if isinstance(value, Endless):
            rho, best = value.rho(held), value.rho((), {1: value.useful})
            report = m.Report(rho, value.useful, best=min(best, rho), endless=True)
            return m.RhoAnswer(self.app, self.session, ask.round, report)
        tokens = tuple(sorted(view.token for view in self.leases.values()))
        rho = value.rho(held)
        own = {gpu for gpu, view in self.leases.items() if not view.leftover}
        leftover = len(self.leases) - len(own)
        if leftover and self._bid is not None and own == self._guaranteed:
            # The app did not bid for its leftovers. Until they end it reports the rho that it bid for this number of
            # GPUs, so that bidding the truth pays over several rounds (appendix, proof of theorem 3.3).
            rho = min(known for row, known in self._bid.rho.items() if len(row) <= leftover)
            tokens = ()
        most = min(value.useful, ask.gpus)
        left = value.finish((), {most: 1} if most else {})
        best = min(value.rho_after(left), rho)
        whole = value.independent / ask.contention if value.whole is None else value.whole
        fair = value.independent
        ends = max(0.0, rho * fair - value.elapsed)
        report = m.Report(rho, value.useful, value.gang, best, left, whole, tokens, fair, ends, value.demand)
        return m.RhoAnswer(self.app, self.session, ask.round, report)

    def _answer_offer(self, offer: m.Offer) -> m.BidAnswer:
        value = self.work.valuation(offer.contention, offer.gpus)
        self._bid = make_bid(self.app, value, offer.held, offer.offered, offer.most, self.leases)
        self._guaranteed = {gpu.id for gpu in offer.held}
        return m.BidAnswer(self.app, self.session, offer.round, self._bid)

    def _update_leases(self, told: m.Leases) -> tuple[list[m.AppEvent], list[Notice]]:
        if told.session != self.session or told.version <= self._version:
            return [], []
        self._version, self.promised = told.version, told.promised
        new = {}
        again: list[m.AppEvent] = []
        for view in told.leases:
            if self._left.get(view.gpu.id) == view.token:
                # The executor has left it, and the arbiter has not received the release.
                again.append(m.Release(self.app, self.session, view.gpu.id, view.token))
            elif view.token >= self._newest.get(view.gpu.id, 0):
                new[view.gpu.id] = view
                self._newest[view.gpu.id] = view.token
        lost = [gpu for gpu, view in self.leases.items() if gpu not in new or new[gpu].token != view.token]
        out = self._drop_leases(lost)
        for gpu, view in new.items():
            known = self.leases.get(gpu)
            if known is None:
                out.append(Gained(view.gpu, view.token))
            elif known.leftover and view.leftover and view.expires > known.expires:
                # The GPU is a leftover once more: the lease that was valued by the bid has ended.
                self._bid = None
            if view.ending and not (known is not None and known.ending):
                out.append(Leave(view.gpu, view.token, view.remaining))
            self.leases[gpu] = view
        return again, out

    def _drop_leases(self, gpus: Iterable[str]) -> list[Notice]:
        return [Lost(view.gpu, view.token) for view in [self.leases.pop(gpu) for gpu in list(gpus)]]
