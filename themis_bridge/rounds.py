"""A round in progress: who was asked, what is on offer, and which answers count.

Two phases: everybody's `Report` is awaited until there are ``bidders``, then each one's `Bid`. When a round begins and
ends, and what becomes of it, is decided in `arbiter`, who bids and who wins in `policy`.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, field, replace

from themis_bridge import messages as m
from themis_bridge.auction import Bid
from themis_bridge.errors import ThemisError
from themis_bridge.locality import Gpu


@dataclass
class Round:
    """See the module. ``asked``: app -> its session. ``deadline``: of the phase, on the arbiter's clock."""

    number: int
    deadline: float
    asked: dict[str, str]
    offer: dict[str, Gpu]
    reports: dict[str, m.Report] = field(default_factory=dict)
    bidders: list[str] = field(default_factory=list)
    bids: dict[str, Bid] = field(default_factory=dict)
    #: Apps whose answer was refused.
    out: set[str] = field(default_factory=set)

    def awaits(self, event: m.RhoAnswer | m.BidAnswer) -> bool:
        """Whether this is an answer that the round's phase waits for; else it is late, or nobody asked."""
        if event.round != self.number or self.asked.get(event.app) != event.session:
            return False
        if isinstance(event, m.RhoAnswer):
            return not self.bidders
        return event.app in self.bidders and event.app not in self.out

    def take_report(self, app: str, report: m.Report) -> None:
        """Raises ThemisError, or TypeError or AttributeError, for one that cannot be true."""
        for name, value in (("rho", report.rho), ("best", report.best), ("left", report.left), ("whole", report.whole)):
            if not math.isfinite(value) or value < 0:
                raise ThemisError(f"{name}={value!r}; expected a finite number >= 0")
        whole = isinstance(report.useful, int) and isinstance(report.gang, int)
        if not whole or report.useful < 0 or report.gang < 1:
            raise ThemisError(f"{report.useful!r} GPUs in gangs of {report.gang!r} of use; expected whole numbers")
        self.reports[app] = report

    def take_bid(self, app: str, bid: Bid, room: int) -> None:
        """``room``: GPUs that the app may win. Raises ThemisError, or TypeError or AttributeError, for a bad one."""
        if bid.app != app:
            raise ThemisError(f"it bids in the name of {bid.app!r}")
        bid.check(frozenset(self.offer))
        if max(map(len, bid.rho)) > room:
            raise ThemisError(f"the bid is over its quota; it may bid for {room} GPUs")
        self.bids[app] = bid

    @property
    def awaited(self) -> set[str]:
        """Apps whose answer this phase still waits for."""
        if not self.bidders:
            return self.asked.keys() - self.reports.keys() - self.out
        return set(self.bidders) - self.bids.keys() - self.out

    def forget(self, app: str) -> None:
        """The app is gone."""
        self.asked.pop(app, None)
        self.reports.pop(app, None)
        self.bids.pop(app, None)
        self.bidders = [each for each in self.bidders if each != app]

    def narrow(self, still: Container[str]) -> None:
        """Only these GPUs are still to be had: the others go from the offer, and every row that has them."""
        self.offer = {gpu: place for gpu, place in self.offer.items() if gpu in still}
        here = frozenset(self.offer)
        self.bids = {
            app: replace(bid, rho={row: rho for row, rho in bid.rho.items() if row <= here})
            for app, bid in self.bids.items()
        }
