"""The partial-allocation auction (Themis, pseudocode 1): who gets which of the GPUs on offer, and what it pays.

A bid lists subsets of the offer and the rho that the app would have with each; its valuation is 1/rho. The
proportionally fair allocation maximises the product of valuations; a winner pays for what the others lose by its
presence with a share of what it won. Which subsets are listed is decided in `bids`, who may bid and who gets
what is left over in `arbiter`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from themis_bridge.errors import ThemisError
from themis_bridge.locality import Gpu
from themis_bridge.packing import Market, Row

#: Relative difference under which two rho count as equal.
EQUAL = 1e-9

Gpus = frozenset[Any]


@dataclass(frozen=True)
class Bid:
    """What one app offers: rho for subsets of the GPUs on offer, the empty set among them.

    ``gang``: GPUs that have to lie together for the app, a power of two; of use only where the auction knows
    where GPUs are.
    """

    app: str
    rho: Mapping[Gpus, float]
    gang: int = 1

    def check(self, gpus: Gpus) -> None:
        """Raises ThemisError, naming the app, if the table cannot be true for an offer of ``gpus``."""
        who = f"the bid of app {self.app!r}"
        if self.gang < 1 or self.gang & (self.gang - 1):
            raise ThemisError(f"{who}: gang={self.gang!r}, expected a power of two")
        if frozenset() not in self.rho:
            raise ThemisError(f"{who} lacks the empty set; say what rho is without any of the GPUs on offer")
        for row, rho in self.rho.items():
            if not isinstance(row, frozenset) or not row <= gpus:
                strange = sorted(map(str, set(row) - gpus)) if isinstance(row, frozenset) else row
                raise ThemisError(f"{who} asks for {strange}, not on offer; bid on subsets of the offer only")
            if isinstance(rho, bool) or not isinstance(rho, (int, float)) or not math.isfinite(rho) or rho <= 0:
                raise ThemisError(f"{who}: rho={rho!r} for {len(row)} GPUs; expected a finite number > 0")
        self._check_order()

    def _check_order(self) -> None:
        """More GPUs must not be worse: the app could leave some idle."""
        numbers: dict[Any, int] = {}
        rows = []
        for row, rho in self.rho.items():
            mask = 0
            for gpu in row:
                mask |= 1 << numbers.setdefault(gpu, len(numbers))
            rows.append((mask, rho, len(row)))
        rows.sort(key=lambda row: -row[1])
        # Only a row with a lower rho can be a subset that contradicts.
        for i, (mask, rho, size) in enumerate(rows):
            for other, better, fewer in rows[i + 1 :]:
                if fewer < size and not other & ~mask and better < rho * (1 - EQUAL):
                    raise ThemisError(
                        f"the bid of app {self.app!r} is inconsistent: rho={better!r} with {fewer} GPUs and "
                        f"{rho!r} with {size} that include them; more GPUs must not be worse"
                    )


@dataclass(frozen=True)
class Clearing:
    """The outcome of an auction.

    ``proportional``: the proportionally fair allocation, by app. ``payment``: c_i, the share that the app keeps,
    by app. ``allocation``: what it is granted, by app. ``leftover``: GPUs on offer that nobody is granted.
    ``value``: sum of log(1/rho) of the proportional allocation; ``bound``: no allocation has more. ``exact``: the
    solver proved that all solutions are best ones.
    """

    proportional: dict[str, Gpus]
    payment: dict[str, float]
    allocation: dict[str, Gpus]
    leftover: Gpus
    value: float
    bound: float
    exact: bool


def clear_auction(
    bids: Iterable[Bid],
    gpus: Iterable[Any],
    *,
    where: Mapping[Any, Gpu] | None = None,
    seconds: float = 10.0,
) -> Clearing:
    """Clear one auction.

    Args:
        bids: one of each app.
        gpus: ids of the GPUs on offer.
        where: their places. When given, a row stands for every set of the same shape, see `shape`, and GPUs of
            one kind are interchangeable otherwise; without it a row stands for itself alone.
        seconds: limit of a single solution; see `Market`.

    Raises:
        ThemisError: a bid that cannot be true, or two bids of one app.
    """
    bids = list(bids)
    offer = frozenset(gpus)
    for app, times in Counter(bid.app for bid in bids).items():
        if times > 1:
            raise ThemisError(f"app {app!r} has {times} bids; send one a round, and give every app its own name")
    for bid in bids:
        bid.check(offer)
    if where is not None and not offer <= where.keys():
        raise ThemisError(f"the places of {sorted(map(str, offer - where.keys()))} are not known; give all or none")
    if not bids:
        return Clearing({}, {}, {}, offer, 0.0, 0.0, True)
    layout = _Single(bids) if where is None else _Shaped(offer, where)
    tables = [_table(bid, layout) for bid in bids]
    market = Market([[row for row, _ in table] for table in tables], layout.capacity, seconds)
    best = market.best()
    won = {bid.app: table[i][1] for bid, table, i in zip(bids, tables, best.rows, strict=True)}
    value, exact = best.value, best.bound <= best.value
    payment = {}
    for number, bid in enumerate(bids):
        payment[bid.app] = 1.0
        if won[bid.app]:
            others = best.value - tables[number][best.rows[number]][0].value
            absent = market.without(number, best.rows)
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


def relaxed_value(bids: Iterable[Bid], gpus: Iterable[Any], *, where: Mapping[Any, Gpu] | None = None) -> float:
    """The optimum of the auction's linear relaxation: no allocation, whole or in parts, is worth more."""
    bids = list(bids)
    layout = _Single(bids) if where is None else _Shaped(frozenset(gpus), where)
    return Market([[row for row, _ in _table(bid, layout)] for bid in bids], layout.capacity).relaxed()


def _kept(bid: Bid, won: Gpus, share: float, layout: _Single | _Shaped) -> Gpus:
    """floor(c * k) of the k GPUs won: the listed subset with the lowest rho, else the densest placement."""
    size = math.floor(share * len(won) + EQUAL)
    if size == len(won):
        return won
    listed = [(rho, row) for row, rho in bid.rho.items() if len(row) == size and row <= won]
    if listed:
        return min(listed, key=lambda pair: (pair[0], sorted(map(str, pair[1]))))[1]
    return frozenset(layout.densest(won)[:size])


def _table(bid: Bid, layout: _Single | _Shaped) -> list[tuple[Row, Gpus]]:
    """The rows worth solving for: none that uses as much as another and is worth no more."""
    rows = sorted(
        ((Row(-math.log(rho), layout.uses(row, bid.gang)), row) for row, rho in bid.rho.items()),
        key=lambda pair: (-pair[0].value, len(pair[1]), sorted(map(str, pair[1]))),
    )
    kept: list[tuple[Row, Gpus]] = []
    for row, gpus in rows:
        if not any(all(row.uses.get(r, 0) >= amount for r, amount in better.uses.items()) for better, _ in kept):
            kept.append((row, gpus))
    return kept


class _Single:
    """Every GPU is itself. Those that are in the same rows of the same bids are one resource."""

    def __init__(self, bids: Sequence[Bid]):
        inside: dict[Any, list[tuple[int, int]]] = defaultdict(list)
        for b, bid in enumerate(bids):
            for i, row in enumerate(bid.rho):
                for gpu in row:
                    inside[gpu].append((b, i))
        numbers: dict[tuple[tuple[int, int], ...], int] = {}
        self._resource = {gpu: numbers.setdefault(tuple(rows), len(numbers)) for gpu, rows in inside.items()}
        self.capacity = [1] * len(numbers)

    def uses(self, row: Gpus, gang: int) -> dict[int, int]:
        return {self._resource[gpu]: 1 for gpu in row}

    def place(self, bids: Sequence[Bid], won: Mapping[str, Gpus]) -> dict[str, Gpus]:
        return dict(won)

    def densest(self, won: Gpus) -> list[Any]:
        return sorted(won, key=lambda gpu: (str(type(gpu)), gpu))


def shape(counts: Iterable[int], gang: int) -> Counter[int]:
    """Pieces of GPUs that lie together, size -> how many, of a set with so many GPUs on each machine.

    Whole gangs, and what is over in powers of two: 7 GPUs are 4+2+1 for a gang of 4 and seven pieces for 1.
    """
    pieces: Counter[int] = Counter()
    for count in counts:
        size = gang
        while size:
            pieces[size] += count // size
            count %= size
            size //= 2
    return +pieces


class _Shaped:
    """GPUs on machines, rows as shapes.

    Pieces are powers of two, so they fit if and only if, for every size s, those of at least s take no more
    than the machines' free GPUs in multiples of s: laid out largest first, none ever lacks a place. One
    capacity a size and kind of GPU is thus all that the solver has to know, however many machines there are.
    """

    def __init__(self, offer: Gpus, where: Mapping[Any, Gpu]):
        self._where = where
        self._free: dict[tuple[str, str], list[Any]] = defaultdict(list)
        for gpu in sorted(offer, key=lambda gpu: (where[gpu].slot, str(gpu))):
            self._free[where[gpu].kind, where[gpu].machine].append(gpu)
        self._resource: dict[tuple[str, int], int] = {}
        self.capacity: list[int] = []
        for (kind, _), free in self._free.items():
            size = 1
            while size <= len(free):
                if (kind, size) not in self._resource:
                    self._resource[kind, size] = len(self.capacity)
                    self.capacity.append(0)
                self.capacity[self._resource[kind, size]] += len(free) // size * size
                size *= 2

    def pieces(self, row: Gpus, gang: int) -> Counter[tuple[str, int]]:
        """(kind, size) -> how many pieces."""
        counts = Counter((self._where[gpu].kind, self._where[gpu].machine) for gpu in row)
        found: Counter[tuple[str, int]] = Counter()
        for (kind, _), count in counts.items():
            for size, number in shape([count], gang).items():
                found[kind, size] += number
        return found

    def uses(self, row: Gpus, gang: int) -> dict[int, int]:
        pieces = self.pieces(row, gang)
        uses = {}
        for (kind, size), resource in self._resource.items():
            amount = sum(s * number for (k, s), number in pieces.items() if k == kind and s >= size)
            if amount:
                uses[resource] = amount
        return uses

    def place(self, bids: Sequence[Bid], won: Mapping[str, Gpus]) -> dict[str, Gpus]:
        """Real GPUs for every winner's pieces: its own row's where they are free, else the tightest fit."""
        free = {place: list(gpus) for place, gpus in self._free.items()}
        got: dict[str, list[Any]] = {bid.app: [] for bid in bids}
        todo: dict[int, list[tuple[str, str]]] = defaultdict(list)
        for bid in bids:
            for (kind, size), number in self.pieces(won[bid.app], bid.gang).items():
                todo[size] += [(bid.app, kind)] * number
        for size in sorted(todo, reverse=True):
            elsewhere = []
            for app, kind in todo[size]:
                if not self._at_home(app, kind, size, won[app], free, got):
                    elsewhere.append((app, kind))
            for app, kind in elsewhere:
                fits = [place for place, gpus in free.items() if place[0] == kind and len(gpus) >= size]
                racks = {self._where[gpu].rack for gpu in got[app]}
                far = {place: self._where[free[place][0]].rack not in racks for place in fits}
                place = min((far[p], len(free[p]) % size, len(free[p]), p) for p in fits)[-1]
                got[app] += free[place][:size]
                del free[place][:size]
        return {app: frozenset(gpus) for app, gpus in got.items()}

    @staticmethod
    def _at_home(
        app: str,
        kind: str,
        size: int,
        row: Gpus,
        free: dict[tuple[str, str], list[Any]],
        got: dict[str, list[Any]],
    ) -> bool:
        for place, gpus in free.items():
            own = [gpu for gpu in gpus if gpu in row] if place[0] == kind else []
            if len(own) >= size:
                got[app] += own[:size]
                free[place] = [gpu for gpu in gpus if gpu not in set(own[:size])]
                return True
        return False

    def densest(self, won: Gpus) -> list[Any]:
        """Machines with most of the GPUs first, so that a cut at any point leaves them together."""
        count = Counter(self._where[gpu].machine for gpu in won)
        return sorted(won, key=lambda gpu: (-count[self._where[gpu].machine], self._where[gpu].machine, str(gpu)))
