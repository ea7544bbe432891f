"""A round in progress: which apps were asked, what is on offer or set aside, and which answers count.

In its first stage a round waits for a `Report` of every app that was asked. Then GPUs for reserves are set aside,
before the policy sees the offer, so that every policy keeps them. When ``bidders`` are chosen the second stage begins,
in which the round waits for a `Bid` of each of them. `auctioneer` begins and ends rounds; `policy` decides who bids and
who wins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from themis_bridge import messages as m
from themis_bridge.arbiter_state import ArbiterState
from themis_bridge.auction import Bid
from themis_bridge.bids import most_rows
from themis_bridge.errors import ThemisError
from themis_bridge.locality import Gpu, cut_in_gangs
from themis_bridge.plain import number, plain, shown, whole
from themis_bridge.settings import NO_QUOTA

#: A bid may have this many times the rows that an agent of this version lists at most. Judgement: agents of other
#: versions may list more, and what a bid costs grows with the square.
SPARE_ROWS = 2


@dataclass
class Round:
    number: int
    #: End of the present stage on the arbiter's clock.
    deadline: float
    #: App -> its session, for every app that was asked for a report.
    asked: dict[str, str]
    #: GPU id -> the GPU, for all on offer.
    offer: dict[str, Gpu]
    #: GPU id -> the app to whose reserve it goes; these are not in the offer any more.
    reserved: dict[str, str] = field(default_factory=dict)
    reports: dict[str, m.Report] = field(default_factory=dict)
    #: App -> what it was offered; empty in the first stage.
    bidders: dict[str, m.Offer] = field(default_factory=dict)
    bids: dict[str, Bid] = field(default_factory=dict)
    #: Apps whose answer was refused; they are not waited for.
    refused: set[str] = field(default_factory=set)

    def awaits(self, event: m.RhoAnswer | m.BidAnswer) -> bool:
        """Whether the present stage waits for this answer; if not, it is late or was not asked for."""
        if event.round != self.number or self.asked.get(event.app) != event.session:
            return False
        if isinstance(event, m.RhoAnswer):
            return not self.bidders
        return event.app in self.bidders and event.app not in self.refused

    def plain_report(self, event: m.RhoAnswer) -> m.Report:
        """The report with plain values. Raises ThemisError or AttributeError for one that cannot be true."""
        if not isinstance(event.report, m.Report):
            raise ThemisError(f"{shown(event.report)} is no report")
        report = plain(event.report, m.Report)
        _check_report(report)
        return report

    def plain_bid(self, event: m.BidAnswer) -> Bid:
        """The bid with plain values. Raises ThemisError, TypeError or AttributeError for one that cannot be true."""
        bid, offer, gpus = event.bid, self.bidders[event.app], frozenset(self.offer)
        if not isinstance(bid, Bid) or not isinstance(bid.rho, dict):
            raise ThemisError(f"{shown(bid)} is no bid")
        if bid.app != event.app:
            raise ThemisError(f"it bids in the name of {shown(bid.app)}")
        most = SPARE_ROWS * most_rows(self.offer.values())
        if len(bid.rho) > most:
            raise ThemisError(f"it bids on {len(bid.rho)} subsets; expected at most {most} for {len(gpus)} GPUs")
        for row in bid.rho:
            if type(row) is not frozenset or not row <= gpus or set(map(type, row)) - {str}:
                raise ThemisError(f"it bids on {shown(row)}, which is not on offer; bid on subsets of the offer")
        # A larger gang than the offer can hold is cut into the same pieces.
        gang = min(whole(bid.gang), 1 << len(gpus).bit_length())
        bid = Bid(event.app, {row: number(rho) for row, rho in bid.rho.items()}, gang)
        bid.check(gpus)
        room = NO_QUOTA if offer.most is None else offer.most - len(offer.held)
        if max(map(len, bid.rho)) > room:
            raise ThemisError(f"the bid is over its quota; it may bid for {room} GPUs")
        return bid

    @property
    def awaited(self) -> set[str]:
        """Apps whose answer the present stage still waits for."""
        if not self.bidders:
            return self.asked.keys() - self.reports.keys() - self.refused
        return self.bidders.keys() - self.bids.keys() - self.refused

    def forget_app(self, app: str) -> None:
        self.asked.pop(app, None)
        self.reports.pop(app, None)
        self.bidders.pop(app, None)
        self.bids.pop(app, None)

    def narrow_offer(self, still: Container[str]) -> None:
        """Keep only these GPUs: the others leave the offer, and with them every row of a bid that has one."""
        self.offer = {gpu: place for gpu, place in self.offer.items() if gpu in still}
        self.reserved = {gpu: app for gpu, app in self.reserved.items() if gpu in still}
        here = frozenset(self.offer)
        self.bids = {
            app: replace(bid, rho={row: rho for row, rho in bid.rho.items() if row <= here})
            for app, bid in self.bids.items()
        }


def _check_report(report: m.Report) -> None:
    """Raise ThemisError for a report, of plain values, that cannot be true."""
    for name in ("rho", "best", "left", "whole", "fair", "ends"):
        value = getattr(report, name)
        if value is not None and value < 0:
            raise ThemisError(f"{name}={value!r}; expected a number >= 0")
    if report.useful < 0 or report.gang < 1:
        raise ThemisError(f"useful={report.useful}, gang={report.gang}; expected numbers of GPUs, >= 0 and >= 1")
    if report.endless and (report.useful < 1 or report.gang > 1):
        raise ThemisError(
            f"endless=True, useful={report.useful}, gang={report.gang}; expected of an app that never ends at least "
            "one GPU and no gang"
        )
    if report.useful and not report.endless and not (report.left and report.whole):
        raise ThemisError(
            f"useful={report.useful}, left={report.left!r}, whole={report.whole!r}; expected work where GPUs are "
            "of use: seconds > 0"
        )


def set_aside(state: ArbiterState, asked: Iterable[str], offer: Mapping[str, Gpu]) -> dict[str, str]:
    """GPUs of the offer that go to reserves: GPU -> app.

    Each app first gets back what it holds itself, up to its reserve. What is missing is taken from free GPUs, and then
    from the apps that hold most on offer. If there is too little for all, the app that came first is first. So an app
    may lose its last GPU to the reserve of another one, but never a GPU of its own reserve. A user's quota is kept.
    ``asked``: the apps that take part in the round. ``offer``: GPU id -> the GPU.
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
