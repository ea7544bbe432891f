"""The paper's priority queue: the upper convex hull of points (alpha, beta) under insertion and deletion.

While a request's slack stays between two edges of the batch's time, its score is ``alpha * exp(b (t - base)) + beta``
(section 4.4.4). So the request with the highest score at t is the vertex of the upper hull that lies furthest in the
direction (exp(b (t - base)), 1). `Hull` is the structure of Overmars and van Leeuwen (1981), without concatenable
queues: the points are the leaves of an AVL tree, sorted by alpha. Each inner node keeps the bridge, which is the edge
that joins the hulls of its two halves. One descent of both halves at once finds it, also if a half's own hull is
partly hidden: the ends of the bridge lie on the hulls of the smaller parts, too. An insertion or a deletion visits
O(log^2 n) nodes, a query O(log n).

`Pending` itself is faster, because the requests of a queue share one batch time. The hull is the structure for requests
that each have their own alpha and beta.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from symphony_serve.batching.orloj_histograms import Histogram
from symphony_serve.batching.orloj_queues import Key, Pending
from symphony_serve.batching.orloj_scores import ScoreTable

#: The base of time is reset when b times the time since the last reset is this: exp(709.78) is the largest
#: float, and a bridge multiplies two numbers of which each is as small as exp(-this - b * the slack).
RESET_AT = 100.0

#: Below this part of its terms a sum of products may have the wrong sign. Source: four roundings of 2**-53 each.
#: Below `TINY` a product may have lost digits, because the smallest float of full precision is 2e-308. In both cases
#: the sign is found with fractions. This happens: alphas span exp(b * the spread of the deadlines), which is 1e21 for
#: b = 100 per second and half a second.
ROUNDING = 1e-15
TINY = 1e-290

#: A request in a hull, in the order in which those with one alpha are preferred: (-beta, deadline, number).
Entry = tuple[float, float, int]


class _Leaf:
    """All requests with one alpha; the first entry is the one on the hull."""

    __slots__ = ("alpha", "entries", "height", "left_end", "right_end")

    def __init__(self, alpha: float, entry: Entry) -> None:
        self.alpha = alpha
        self.entries = [entry]
        self.height = 0
        self.left_end = self.right_end = self

    @property
    def beta(self) -> float:
        return -self.entries[0][0]


class _Node:
    """Two halves, and the bridge between their hulls: ``left_end`` is in the left half, ``right_end`` in the right."""

    __slots__ = ("height", "left", "left_end", "right", "right_end", "split")

    def __init__(self, left: _Leaf | _Node, right: _Leaf | _Node, split: float) -> None:
        self.left = left
        self.right = right
        #: The smallest alpha of the right half.
        self.split = split
        self.height = 0
        self.left_end: _Leaf
        self.right_end: _Leaf


class Hull:
    """The upper hull of points. ``visits``: how many nodes were visited so far, by updates and queries."""

    def __init__(self) -> None:
        self.visits = 0
        self._root: _Leaf | _Node | None = None

    def insert(self, alpha: float, entry: Entry) -> None:
        """Add a point."""
        self._root = _Leaf(alpha, entry) if self._root is None else self._inserted(self._root, alpha, entry)

    def remove(self, alpha: float, entry: Entry) -> None:
        """Remove a point that was inserted. Raises KeyError if there is none."""
        if self._root is None:
            raise KeyError(entry)
        self._root = self._removed(self._root, alpha, entry)

    def top(self, grown: float) -> tuple[float, Entry] | None:
        """(alpha, entry) of the point with the largest ``alpha * grown + beta``; None if there is no point.

        Of equal ones the point with the earlier deadline, then with the smaller number, is taken.
        """
        node = self._root
        if node is None:
            return None
        while isinstance(node, _Node):
            self.visits += 1
            left, right = node.left_end, node.right_end
            low, high = left.alpha * grown + left.beta, right.alpha * grown + right.beta
            if low == high:
                node = node.left if left.entries[0][1:] < right.entries[0][1:] else node.right
            else:
                node = node.left if low > high else node.right
        return node.alpha, node.entries[0]

    def _inserted(self, node: _Leaf | _Node, alpha: float, entry: Entry) -> _Leaf | _Node:
        self.visits += 1
        if isinstance(node, _Leaf):
            if node.alpha == alpha:
                heapq.heappush(node.entries, entry)
                return node
            new = _Leaf(alpha, entry)
            halves = (new, node) if alpha < node.alpha else (node, new)
            return self._updated(_Node(*halves, halves[1].alpha))
        if alpha < node.split:
            node.left = self._inserted(node.left, alpha, entry)
        else:
            node.right = self._inserted(node.right, alpha, entry)
        return self._balanced(node)

    def _removed(self, node: _Leaf | _Node, alpha: float, entry: Entry) -> _Leaf | _Node | None:
        self.visits += 1
        if isinstance(node, _Leaf):
            if node.alpha != alpha or entry not in node.entries:
                raise KeyError(entry)
            node.entries.remove(entry)
            heapq.heapify(node.entries)
            return node if node.entries else None
        if alpha < node.split:
            left = self._removed(node.left, alpha, entry)
            if left is None:
                return node.right
            node.left = left
        else:
            right = self._removed(node.right, alpha, entry)
            if right is None:
                return node.left
            node.right = right
        return self._balanced(node)

    def _balanced(self, node: _Node) -> _Node:
        """The node after an update below it: rotated if one half is two higher than the other, with its bridge."""
        lean = node.left.height - node.right.height
        if lean > 1 and isinstance(node.left, _Node):
            if isinstance(node.left.right, _Node) and node.left.left.height < node.left.right.height:
                node.left = self._rotated_left(node.left)
            return self._rotated_right(node)
        if lean < -1 and isinstance(node.right, _Node):
            if isinstance(node.right.left, _Node) and node.right.right.height < node.right.left.height:
                node.right = self._rotated_right(node.right)
            return self._rotated_left(node)
        return self._updated(node)

    def _rotated_right(self, node: _Node) -> _Node:
        top = node.left
        assert isinstance(top, _Node)
        node.left, top.right = top.right, node
        self._updated(node)
        return self._updated(top)

    def _rotated_left(self, node: _Node) -> _Node:
        top = node.right
        assert isinstance(top, _Node)
        node.right, top.left = top.left, node
        self._updated(node)
        return self._updated(top)

    def _updated(self, node: _Node) -> _Node:
        """The node with its height and its bridge found anew: descend both halves until one point of each is left."""
        node.height = 1 + max(node.left.height, node.right.height)
        left, right, split = node.left, node.right, node.split
        while isinstance(left, _Node) or isinstance(right, _Node):
            self.visits += 1
            a, b, c, d = left.left_end, left.right_end, right.left_end, right.right_end
            if isinstance(left, _Node) and _turn(a, b, c) > 0:
                left = left.left
            elif isinstance(right, _Node) and _turn(b, c, d) > 0:
                right = right.right
            elif not isinstance(left, _Node):
                assert isinstance(right, _Node)
                right = right.left
            elif not isinstance(right, _Node) or _crosses_left(a, b, c, d, split):
                left = left.right
            else:
                right = right.left
        node.left_end, node.right_end = left, right
        return node


def _turn(a: _Leaf, b: _Leaf, c: _Leaf) -> float:
    """Above 0 if c lies above the line from a to b, where alpha rises from a to b; 0 if it lies on it."""
    first = (b.alpha - a.alpha) * (c.beta - a.beta)
    second = (b.beta - a.beta) * (c.alpha - a.alpha)
    turn = first - second
    if abs(turn) > ROUNDING * (abs(first) + abs(second)) + TINY:
        return turn
    exact = _exact_turn(a, b, c) if b.beta != a.beta or c.beta != a.beta else 0
    return float((exact > 0) - (exact < 0))


def _exact_turn(a: _Leaf, b: _Leaf, c: _Leaf) -> Fraction:
    left, bottom = Fraction(a.alpha), Fraction(a.beta)
    over, up = Fraction(b.alpha) - left, Fraction(b.beta) - bottom
    return over * (Fraction(c.beta) - bottom) - up * (Fraction(c.alpha) - left)


def _crosses_left(a: _Leaf, b: _Leaf, c: _Leaf, d: _Leaf, split: float) -> bool:
    """Whether the lines a-b and c-d meet left of ``split``, or are parallel.

    Then no point of the left half that is left of b can be an end of the bridge. With the heights of c and d over the
    line a-b, the lines meet where ``height(c) * (d.alpha - x) = height(d) * (c.alpha - x)``.
    """
    over, up = b.alpha - a.alpha, b.beta - a.beta
    if a.beta == b.beta == c.beta == d.beta:
        return True
    far, near = d.alpha - split, c.alpha - split
    terms = (
        over * (c.beta - a.beta) * far,
        -up * (c.alpha - a.alpha) * far,
        -over * (d.beta - a.beta) * near,
        up * (d.alpha - a.alpha) * near,
    )
    side = math.fsum(terms)
    if abs(side) > 2 * ROUNDING * sum(map(abs, terms)) + TINY:
        return side < 0
    before, after = _exact_turn(a, b, c), -_exact_turn(a, b, d)
    at = Fraction(split)
    exact = before * (Fraction(d.alpha) - at) + after * (Fraction(c.alpha) - at)
    return exact < 0 or before + after == 0


@dataclass
class _Place:
    """Where a request is in the hull of one batch size."""

    deadline: float
    interval: int
    alpha: float
    entry: Entry


class _SizeHull:
    """The requests that are feasible for one batch size, as points that move to new lines at their milestones."""

    def __init__(self, time: Histogram, b: float, base: float) -> None:
        self.hull = Hull()
        self.places: dict[int, _Place] = {}
        self.base = base
        self.time = time
        self.b = b
        self._table = ScoreTable.of(time, b)
        #: (milestone, number): when the slack of a request passes an edge. Those of requests that left are skipped.
        self._milestones: list[tuple[float, int]] = []
        #: The same requests by deadline, to find those that are not feasible any more.
        self._deadlines: list[Key] = []

    def insert(self, deadline: float, number: int, now: float) -> None:
        heapq.heappush(self._deadlines, (deadline, number))
        self._put(deadline, number, now)

    def remove(self, number: int) -> None:
        place = self.places.pop(number, None)
        if place is not None:
            self.hull.remove(place.alpha, place.entry)

    def advance(self, now: float) -> None:
        """Drop what is not feasible any more, and move the points whose milestone has passed."""
        while self._deadlines and self._deadlines[0][0] - self.time.mean < now:
            self.remove(heapq.heappop(self._deadlines)[1])
        while self._milestones and self._milestones[0][0] < now:
            milestone, number = heapq.heappop(self._milestones)
            place = self.places.get(number)
            if place is not None and self._milestone(place) == milestone:
                self.remove(number)
                self._put(place.deadline, number, now)

    def top(self, now: float) -> int | None:
        """The request with the highest score."""
        found = self.hull.top(math.exp(self.b * (now - self.base)))
        return None if found is None else found[1][2]

    def _put(self, deadline: float, number: int, now: float) -> None:
        table = self._table
        interval = table.interval(deadline - now)
        # A milestone that rounding has put before now has passed.
        while interval >= 0 and deadline - table.edges[interval] < now:
            interval -= 1
        alpha, beta = _line(table, deadline, interval, self.base)
        place = _Place(deadline, interval, alpha, (-beta, deadline, number))
        self.places[number] = place
        self.hull.insert(alpha, place.entry)
        if interval >= 0:
            heapq.heappush(self._milestones, (self._milestone(place), number))

    def _milestone(self, place: _Place) -> float:
        """When the request's score becomes another line: ``D - edge``."""
        return place.deadline - self._table.edges[place.interval] if place.interval >= 0 else math.inf


def _line(table: ScoreTable, deadline: float, interval: int, base: float) -> tuple[float, float]:
    """(alpha, beta) with score = ``alpha * exp(b (t - base)) + beta`` while the slack is in ``interval``.

    This is the form of section 4.4.4. Interval -1 is below the first edge.
    """
    if interval < 0:
        return 0.0, 0.0
    beta = table.density[interval] / table.b
    grown = math.exp(table.b * (table.edges[interval] - deadline + base))
    return (table.carried[interval] - beta) * grown, beta


class HullPending(Pending):
    """Keeps one hull for each batch size. Each is built anew when `RESET_AT` is reached or the times change."""

    def __init__(self, times: Mapping[int, Histogram], b: float) -> None:
        super().__init__(times, b)
        self._hulls: dict[int, _SizeHull] = {}
        #: The moment of the latest call that had one.
        self._now = 0.0
        #: The visits of hulls that were built anew.
        self._visits_before = 0
        self._build()

    @property
    def visits(self) -> int:
        """How many nodes of hulls were visited so far."""
        return self._visits_before + sum(one.hull.visits for one in self._hulls.values())

    def insert(self, deadline: float, number: int) -> None:
        super().insert(deadline, number)
        for one in self._hulls.values():
            if deadline - one.time.mean >= self._now:
                one.insert(deadline, number, self._now)

    def remove(self, number: int) -> None:
        super().remove(number)
        for one in self._hulls.values():
            one.remove(number)

    def late(self, now: float) -> list[int]:
        self._now = now
        return super().late(now)

    def best(self, size: int, now: float) -> list[int]:
        self._now = now
        if any(self.b * (now - one.base) >= RESET_AT for one in self._hulls.values()):
            self._build()
        one = self._hulls[size]
        one.advance(now)
        chosen: list[int] = []
        while len(chosen) < size and (number := one.top(now)) is not None:
            chosen.append(number)
            one.remove(number)
        for number in chosen:
            one.insert(self.deadlines[number], number, now)
        return chosen

    def _build(self) -> None:
        """Make the present moment the base of time and build all hulls anew."""
        now = self._now
        self._visits_before = self.visits
        self._hulls = {size: _SizeHull(time, self.b, now) for size, time in self.times.items()}
        for number, deadline in self.deadlines.items():
            for one in self._hulls.values():
                if deadline - one.time.mean >= now:
                    one.insert(deadline, number, now)
