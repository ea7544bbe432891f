"""A round in progress: which apps were asked, what is on offer, and which answers count.

In its first stage a round waits for a `Report` of every app that was asked. When ``bidders`` are chosen its second
stage begins, in which it waits for a `Bid` of each of them. `auctioneer` begins and ends rounds; `policy` decides who
bids and who wins.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, field, replace

from themis_bridge import messages as m
from themis_bridge.auction import Bid
from themis_bridge.errors import ThemisError
from themis_bridge.locality import Gpu
from themis_bridge.settings import NO_QUOTA


@dataclass
class Round:
    """See the module."""

    number: int
    #: End of the present stage on the arbiter's clock.
    deadline: float
    #: App -> its session, for every app that was asked for a report.
    asked: dict[str, str]
    #: GPU id -> the GPU, for all on offer.
    offer: dict[str, Gpu]
    #: GPU id -> the app to whose reserve it goes; these are not in the offer any more, see `reserves`.
    reserved: dict[str, str] = field(default_factory=dict)
    reports: dict[str, m.Report] = field(default_factory=dict)
    #: Apps that are offered the GPUs; empty in the first stage.
    bidders: list[str] = field(default_factory=list)
    bids: dict[str, Bid] = field(default_factory=dict)
    #: Bidder -> the most GPUs that it may win.
    rooms: dict[str, int] = field(default_factory=dict)
    #: Bidder -> how many GPUs it keeps whatever it wins.
    kept: dict[str, int] = field(default_factory=dict)
    #: Apps whose answer was refused; they are not waited for.
    refused: set[str] = field(default_factory=set)

    def awaits(self, event: m.RhoAnswer | m.BidAnswer) -> bool:
        """Whether the present stage waits for this answer; if not, it is late or nobody asked for it."""
        if event.round != self.number or self.asked.get(event.app) != event.session:
            return False
        if isinstance(event, m.RhoAnswer):
            return not self.bidders
        return event.app in self.bidders and event.app not in self.refused

    def take_report(self, app: str, report: m.Report) -> None:
        """Note a report. Raises ThemisError, TypeError or AttributeError for one that cannot be true."""
        for name, value in (
            ("rho", report.rho),
            ("best", report.best),
            ("left", report.left),
            ("whole", report.whole),
            ("fair", report.fair),
            ("ends", 0.0 if report.ends is None else report.ends),
        ):
            if not math.isfinite(value) or value < 0:
                raise ThemisError(f"{name}={value!r}; expected a finite number >= 0")
        whole = all(isinstance(number, int) for number in (report.useful, report.gang, report.demand))
        if not whole or report.useful < 0 or report.gang < 1:
            raise ThemisError(
                f"useful={report.useful!r}, gang={report.gang!r}; expected whole numbers of GPUs, >= 0 and >= 1"
            )
        if not isinstance(report.endless, bool) or (report.endless and (report.useful < 1 or report.gang > 1)):
            raise ThemisError(
                f"endless={report.endless!r}, useful={report.useful}, gang={report.gang}; expected True or False, and "
                "of an app that never ends at least one GPU and no gang"
            )
        if report.useful and not report.endless and not (report.left and report.whole):
            raise ThemisError(
                f"useful={report.useful}, left={report.left!r}, whole={report.whole!r}; expected work where GPUs are "
                "of use: seconds > 0"
            )
        self.reports[app] = report

    def take_bid(self, app: str, bid: Bid) -> None:
        """Note a bid.

        Raises ThemisError, TypeError or AttributeError for a bid that cannot be true.
        """
        if bid.app != app:
            raise ThemisError(f"it bids in the name of {bid.app!r}")
        bid.check(frozenset(self.offer))
        room = self.rooms.get(app, NO_QUOTA)
        if max(map(len, bid.rho)) > room:
            raise ThemisError(f"the bid is over its quota; it may bid for {room} GPUs")
        self.bids[app] = bid

    @property
    def awaited(self) -> set[str]:
        """Apps whose answer the present stage still waits for."""
        if not self.bidders:
            return self.asked.keys() - self.reports.keys() - self.refused
        return set(self.bidders) - self.bids.keys() - self.refused

    def forget_app(self, app: str) -> None:
        """Remove an app that is gone."""
        self.asked.pop(app, None)
        self.reports.pop(app, None)
        self.bids.pop(app, None)
        self.bidders = [each for each in self.bidders if each != app]

    def narrow_offer(self, still: Container[str]) -> None:
        """Keep only these GPUs: the others leave the offer, and with them every row of a bid that has one."""
        self.offer = {gpu: place for gpu, place in self.offer.items() if gpu in still}
        self.reserved = {gpu: app for gpu, app in self.reserved.items() if gpu in still}
        here = frozenset(self.offer)
        self.bids = {
            app: replace(bid, rho={row: rho for row, rho in bid.rho.items() if row <= here})
            for app, bid in self.bids.items()
        }
