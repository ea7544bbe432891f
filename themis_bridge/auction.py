"""The partial-allocation auction (Themis, pseudocode 1): which app gets which GPUs on offer, and what it pays.

A bid lists subsets of the offer and the rho that the app would have with each; the valuation of a subset is 1/rho.
The proportionally fair allocation maximises the product of the valuations. A winner pays with a part of the GPUs that
it won, as large as the loss that its presence causes the other bidders. `bids` decides which subsets a bid lists;
`policy` decides which apps bid, and which app gets the GPUs that are left over.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from themis_bridge.errors import ThemisError
from themis_bridge.locality import Gpu
from themis_bridge.winner_determination import EQUAL, SOLVE_S, BidderRows, WinnerDetermination

Gpus = frozenset[Any]
#: (kind, machine) -> its GPUs on offer.
Free = dict[tuple[str, str], list[Any]]


@dataclass(frozen=True)
class Bid:
    """One app's bid.

    rho: by subset of the GPUs on offer (ids), the app's rho with that subset; the empty set must be listed. One that is
    no better than one that uses less counts for nothing, because the app could leave GPUs idle.
    gang: how many GPUs must be on one machine to be of full use to the app, a power of two.
    together: a payment leaves it a multiple of this number of GPUs, since fewer would be of no use to it.
    """

    app: str
    rho: Mapping[Gpus, float]
    gang: int = 1
    together: int = 1

    def check(self, gpus: Gpus) -> None:
        """Raise ThemisError, naming the app, if the bid cannot be true for an offer of ``gpus``."""
        who = f"the bid of app {self.app!r}"
        if self.gang < 1 or self.gang & (self.gang - 1):
            raise ThemisError(f"{who}: gang={self.gang!r}, expected a power of two")
        if frozenset() not in self.rho:
            raise ThemisError(f"{who} lacks the empty set; state the rho without any of the GPUs on offer")
        for row, rho in self.rho.items():
            if not isinstance(row, frozenset) or not row <= gpus:
                strange = sorted(map(str, set(row) - gpus)) if isinstance(row, frozenset) else row
                raise ThemisError(f"{who} asks for {strange}, which is not on offer; bid on subsets of the offer")
            if isinstance(rho, bool) or not isinstance(rho, (int, float)) or not math.isfinite(rho) or rho <= 0:
                raise ThemisError(f"{who}: rho={rho!r} for {len(row)} GPUs; expected a finite number > 0")


@dataclass(frozen=True)
class Clearing:
    """The outcome of an auction.

    proportional: by app, the GPUs that it wins in the proportionally fair allocation.
    payment: by app, c_i of pseudocode 1: the fraction of the won GPUs that it keeps, 0 < c_i <= 1.
    allocation: by app, the GPUs that it keeps.
    leftover: the GPUs on offer that no app keeps.
    value: sum of log(1/rho) over the proportionally fair allocation.
    bound: no allocation has a larger value.
    exact: whether the solver proved that all its solutions are optimal.
    """

    proportional: dict[str, Gpus]
    payment: dict[str, float]
    allocation: dict[str, Gpus]
    leftover: Gpus
    value: float
    bound: float
    exact: bool


def clear_auction(bids: Iterable[Bid], where: Mapping[Any, Gpu], *, seconds: float = SOLVE_S) -> Clearing:
    """Clear one auction (pseudocode 1).

    Args:
        bids: at most one of each app.
        where: by id, the place of every GPU on offer. A row of a bid stands for every set of GPUs of one kind with the
            same `shape`.
        seconds: limit of a single solution, see `WinnerDetermination`.

    Raises:
        ThemisError: a bid cannot be true, or an app has two bids.
    """
    bids = list(bids)
    offer = frozenset(where)
    for app, times in Counter(bid.app for bid in bids).items():
        if times > 1:
            raise ThemisError(
                f"app {app!r} has {times} bids; expected one bid from each app, and no two apps of one name"
            )
    for bid in bids:
        bid.check(offer)
    if not bids:
        return Clearing({}, {}, {}, offer, 0.0, 0.0, True)
    layout = Shaped(where)
    tables = [bidder_rows(bid, layout) for bid in bids]
    problem = WinnerDetermination([table for table, _ in tables], layout.capacity, seconds)
    best = problem.solve()
    won = {bid.app: rows[i] for bid, (_, rows), i in zip(bids, tables, best.rows, strict=True)}
    value, exact = best.value, best.bound <= best.value
    payment = {}
    for number, bid in enumerate(bids):
        payment[bid.app] = 1.0
        if won[bid.app]:
            others = best.value - float(tables[number][0].values[best.rows[number]])
            absent = problem.solve(number, best)
            exact = exact and absent.bound <= absent.value
            payment[bid.app] = min(1.0, math.exp(others - absent.value))
    placed = layout.place(bids, won)
    allocation = {bid.app: _kept(bid, placed[bid.app], payment[bid.app], layout) for bid in bids}
    return Clearing(
        proportional=placed,
        payment=payment,
        allocation=allocation,
        leftover=offer.difference(*allocation.values()),
        value=value,
        bound=best.bound,
        exact=exact,
    )


def _kept(bid: Bid, won: Gpus, share: float, layout: Shaped) -> Gpus:
    """The floor(c * k) of the k won GPUs that are kept: the listed subset with the lowest rho, else the densest one.

    GPUs are indivisible, and so are gangs, so the fraction is rounded down.
    """
    size = math.floor(share * len(won) + EQUAL)
    size -= size % bid.together
    if size == len(won):
        return won
    listed = [(rho, row) for row, rho in bid.rho.items() if len(row) == size and row <= won]
    if listed:
        return min(listed, key=lambda pair: (pair[0], sorted(map(str, pair[1]))))[1]
    return frozenset(layout.densest(won)[:size])


def bidder_rows(bid: Bid, layout: Shaped) -> tuple[BidderRows, list[Gpus]]:
    """The bid's rows for the solver, and the GPUs of each. A row is left out if a better one uses no more."""
    rows = sorted(bid.rho, key=lambda row: (bid.rho[row], len(row)))
    uses = layout.uses(rows, bid.gang)
    # better[i, j]: row i comes before row j and uses no more of anything.
    better = np.triu(np.ones((len(rows), len(rows)), dtype=bool), 1)
    for amounts in uses.T:
        better &= amounts[:, None] <= amounts[None, :]
    kept = np.flatnonzero(~better.any(axis=0))
    values = np.array([-math.log(bid.rho[rows[i]]) for i in kept])
    return BidderRows(values, uses[kept]), [rows[i] for i in kept]


def shape(counts: Iterable[int], gang: int) -> Counter[int]:
    """Cut a set of GPUs into pieces that each lie on one machine; returns size -> number of pieces.

    ``counts``: by machine, how many GPUs of the set it has. Each machine's GPUs are cut into gangs, and the rest into
    powers of two: 7 GPUs are 4 + 2 + 1 for a gang of 4, and seven pieces for a gang of 1.
    """
    pieces: Counter[int] = Counter()
    for count in counts:
        size = gang
        while size:
            pieces[size] += count // size
            count %= size
            size //= 2
    return +pieces


class Shaped:
    """The resources of an auction: a row stands for its `shape`, and the solver needs no machine.

    Sizes of pieces are powers of two. Therefore a set of pieces fits into the machines if and only if, for every size
    s, the GPUs of all pieces of size >= s are at most the sum over machines of the free GPUs rounded down to a multiple
    of s: placed largest first, each piece then finds room. So one resource for each size and kind of GPU is enough,
    however many machines there are.
    """

    def __init__(self, where: Mapping[Any, Gpu]):
        self._where = where
        self._free: Free = defaultdict(list)
        for gpu in sorted(where, key=str):
            self._free[where[gpu].kind, where[gpu].machine].append(gpu)
        self._places = list(self._free)
        self._number = {gpu: number for number, place in enumerate(self._places) for gpu in self._free[place]}
        sizes = np.array([len(self._free[place]) for place in self._places], dtype=np.int64)
        #: By resource, the numbers of the places that have its kind of GPU, and its size of pieces.
        self._resources: list[tuple[np.ndarray, int]] = []
        self.capacity: list[int] = []
        for kind in dict.fromkeys(kind for kind, _ in self._places):
            own = np.array([number for number, place in enumerate(self._places) if place[0] == kind])
            size = 1
            while size <= sizes[own].max():
                self._resources.append((own, size))
                self.capacity.append(int((sizes[own] // size * size).sum()))
                size *= 2

    def pieces(self, row: Gpus, gang: int) -> Counter[tuple[str, int]]:
        """The row's `shape` by kind of GPU: (kind, size) -> number of pieces."""
        counts = Counter(self._places[self._number[gpu]] for gpu in row)
        found: Counter[tuple[str, int]] = Counter()
        for (kind, _), count in counts.items():
            for size, number in shape([count], gang).items():
                found[kind, size] += number
        return found

    def uses(self, rows: Sequence[Gpus], gang: int) -> np.ndarray:
        """By row and resource, the GPUs in the row's pieces of at least the resource's size."""
        lengths = [len(row) for row in rows]
        numbers = np.fromiter(map(self._number.__getitem__, chain.from_iterable(rows)), np.int64, sum(lengths))
        cells = np.repeat(np.arange(len(rows)), lengths) * len(self._places) + numbers
        counts = np.bincount(cells, minlength=len(rows) * len(self._places)).reshape(len(rows), -1)
        uses = np.zeros((len(rows), len(self.capacity)), dtype=np.int64)
        for resource, (own, size) in enumerate(self._resources):
            if size <= gang:
                uses[:, resource] = (counts[:, own] // size * size).sum(axis=1)
        return uses

    def place(self, bids: Sequence[Bid], won: Mapping[str, Gpus]) -> dict[str, Gpus]:
        """GPUs for every winner's pieces: those of its own row where they are free, else those of the tightest fit."""
        free = {place: list(gpus) for place, gpus in self._free.items()}
        got: dict[str, list[Any]] = {bid.app: [] for bid in bids}
        todo: dict[int, list[tuple[str, str, int]]] = defaultdict(list)
        for bid in bids:
            for (kind, size), number in self.pieces(won[bid.app], bid.gang).items():
                todo[size].append((bid.app, kind, number))
        for size in sorted(todo, reverse=True):
            missing = []
            for app, kind, number in todo[size]:
                missing.append((app, kind, number - self._take(kind, size, number, won[app], got[app], free)))
            for app, kind, number in missing:
                self._take(kind, size, number, self._number.keys(), got[app], free)
        return {app: frozenset(gpus) for app, gpus in got.items()}

    def _take(self, kind: str, size: int, number: int, among: Set[Any], got: list[Any], free: Free) -> int:
        """Add up to ``number`` pieces, all of GPUs ``among`` these, to ``got``. Returns how many there were.

        They are taken from ``free``: first in racks where the app has others, and where least is left over.
        """
        racks, left = {self._where[gpu].rack for gpu in got}, number
        own = {place: [gpu for gpu in gpus if gpu in among] for place, gpus in free.items() if place[0] == kind}
        while left and (rooms := {place: len(gpus) for place, gpus in own.items() if len(gpus) >= size}):
            far = {place: self._where[own[place][0]].rack not in racks for place in rooms}
            _, _, room, place = min((far[place], room % size, room, place) for place, room in rooms.items())
            pieces = min(left, room // size)
            taken, own[place] = own[place][: pieces * size], own[place][pieces * size :]
            free[place] = [gpu for gpu in free[place] if gpu not in taken]
            got += taken
            racks.add(self._where[taken[-1]].rack)
            left -= pieces
        return number - left

    def densest(self, won: Gpus) -> list[Any]:
        """The GPUs in an order of which any beginning is dense: machines with most of them come first."""
        count = Counter(self._where[gpu].machine for gpu in won)
        return sorted(won, key=lambda gpu: (-count[self._where[gpu].machine], self._where[gpu].machine, str(gpu)))
