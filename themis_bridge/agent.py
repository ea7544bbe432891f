"""The agent: speaks for one tuning app to the arbiter, and tells the app's executor which GPUs it has.

A state machine like the arbiter. What the app still has to do comes from the app (`Work`); from it the agent
answers rho and bids. The arbiter always tells the whole of what the app holds, so the agent finds out by itself
what was gained, what has to be left, and what is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from themis_bridge import messages as m
from themis_bridge.auction import Bid
from themis_bridge.bids import Valuation, make_bid
from themis_bridge.leases import Fence
from themis_bridge.locality import Gpu


class Work(Protocol):
    """What the agent has to know of its app."""

    def valuation(self, contention: float, cluster_gpus: int) -> Valuation:
        """The work left, as of now. ``contention``: N_avg, ``cluster_gpus``: R_C, both for T_id."""

    def facts(self) -> Any:
        """What the twin's baselines go by; None in an app that only meets Themis."""


class Notice:
    """What the executor is told."""


@dataclass(frozen=True)
class Gained(Notice):
    """Trials may run on the GPU, under this token."""

    gpu: Gpu
    token: int


@dataclass(frozen=True)
class Leave(Notice):
    """The lease ends in ``within`` seconds and is not renewed: commit, move away, then say `vacated`."""

    gpu: Gpu
    token: int
    within: float


@dataclass(frozen=True)
class Lost(Notice):
    """The GPU is not the app's any more; what still runs there is killed."""

    gpu: Gpu
    token: int


class Agent:
    """Of one app. ``session``: unique to this run of its driver."""

    def __init__(self, app: str, session: str, work: Work):
        self.app, self.session = app, session
        self.work = work
        #: GPU id -> its lease, as last told.
        self.leases: dict[str, m.LeaseView] = {}
        self.fence = Fence()
        #: Why the arbiter does not want this app, None as long as it does.
        self.refused: str | None = None
        #: GPU id -> token of the last lease that the executor left by itself.
        self._left: dict[str, int] = {}
        self._version = (0, 0)
        #: The last bid, as long as it may speak for leftovers, and the GPUs that were sure then.
        self._bid: Bid | None = None
        self._sure: set[str] = set()

    def handle(self, instruction: m.Instruction) -> tuple[list[m.AppEvent], list[Notice]]:
        """Take one instruction of the arbiter. Returns what to send it and what to tell the executor."""
        if isinstance(instruction, m.AskRho):
            return [self._rho(instruction)], []
        if isinstance(instruction, m.Offer):
            return [self._offer(instruction)], []
        if isinstance(instruction, m.Leases):
            return self._told(instruction)
        if isinstance(instruction, m.Refused):
            if instruction.final:
                self.refused = instruction.why
                return [], self._drop(self.leases)
            if instruction.unknown:
                # The arbiter may have started anew, by a clock that was set back: what it says counts from now on.
                self._version, self.fence = (0, 0), Fence()
                return [m.AppJoined(self.app, self.session)], []
        return [], []

    def vacated(self, gpu: str) -> list[m.AppEvent]:
        """The executor has left the GPU for good; it needs no answer."""
        view = self.leases.pop(gpu, None)
        if view is None:
            return []
        self._left[gpu] = view.token
        return [m.Release(self.app, self.session, gpu, view.token)]

    def _rho(self, ask: m.AskRho) -> m.RhoAnswer:
        value = self.work.valuation(ask.contention, ask.gpus)
        held = [view.gpu for view in self.leases.values()]
        tokens = tuple(sorted(view.token for view in self.leases.values()))
        rho = value.rho(held)
        own = {gpu for gpu, view in self.leases.items() if not view.leftover}
        leftover = len(self.leases) - len(own)
        if leftover and self._bid is not None and own == self._sure:
            # Leftovers were not bid for: what was said in the last auction stands until they end.
            rho = min(known for row, known in self._bid.rho.items() if len(row) <= leftover)
            tokens = ()
        most = min(value.useful, ask.gpus)
        left = value.finish((), {most: 1} if most else {})
        best = min(value.rho_after(left), rho)
        whole = value.independent / ask.contention
        report = m.Report(rho, value.useful, value.gang, self.work.facts(), best, left, whole, tokens)
        return m.RhoAnswer(self.app, self.session, ask.round, report)

    def _offer(self, offer: m.Offer) -> m.BidAnswer:
        value = self.work.valuation(offer.contention, offer.gpus)
        self._bid = make_bid(self.app, value, offer.held, offer.offered, offer.most, self.leases)
        self._sure = {gpu.id for gpu in offer.held}
        return m.BidAnswer(self.app, self.session, offer.round, self._bid)

    def _told(self, told: m.Leases) -> tuple[list[m.AppEvent], list[Notice]]:
        if told.session != self.session or told.version <= self._version:
            return [], []
        self._version = told.version
        new = {}
        again: list[m.AppEvent] = []
        for view in told.leases:
            if self._left.get(view.gpu.id) == view.token:
                # It was left, and the arbiter has not heard so.
                again.append(m.Release(self.app, self.session, view.gpu.id, view.token))
            elif self.fence.admit_token(view.gpu.id, view.token):
                new[view.gpu.id] = view
        out = self._drop(gpu for gpu, view in self.leases.items() if gpu not in new or new[gpu].token != view.token)
        for gpu, view in new.items():
            known = self.leases.get(gpu)
            if known is None:
                out.append(Gained(view.gpu, view.token))
            elif known.leftover and view.leftover and view.remaining > known.remaining:
                # A leftover again: the lease that the bid spoke for has ended.
                self._bid = None
            if view.ending and not (known is not None and known.ending):
                out.append(Leave(view.gpu, view.token, view.remaining))
            self.leases[gpu] = view
        return again, out

    def _drop(self, gpus: Iterable[str]) -> list[Notice]:
        return [Lost(view.gpu, view.token) for view in [self.leases.pop(gpu) for gpu in list(gpus)]]
