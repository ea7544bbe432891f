"""Winner determination: one row of each bidder, all rows together within what is on offer, best sum of values.

An integer program, solved exactly. HiGHS solves the relaxation, warm from one bidder's absence to the next's;
reduced costs rule out most rows for good; HiGHS's branch and bound settles the few that remain. What a value
or a capacity means is the auction's affair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from themis_bridge.errors import ThemisError

#: How far two sums of logarithms may be apart and count as equal.
EQUAL = 1e-9


@dataclass(frozen=True)
class Row:
    """One row of a bidder's table. ``uses``: resource -> how much of it."""

    value: float
    uses: Mapping[int, int]


@dataclass(frozen=True)
class Choice:
    """``rows``: the index of each bidder's row. ``value``: their sum. ``bound``: no choice is worth more."""

    rows: tuple[int, ...]
    value: float
    bound: float


class Market:
    """Bidders' tables over common resources, best row first. Every table has a row that uses nothing.

    ``seconds``: after so long one solution is given up as it stands; its `bound` then says how good it is.
    """

    def __init__(self, tables: Sequence[Sequence[Row]], capacity: Sequence[int], seconds: float = 10.0):
        self._tables = tables
        self._capacity = capacity
        self._seconds = seconds
        self._empty = [next(i for i, row in enumerate(table) if not row.uses) for table in tables]
        self._first = np.cumsum([0] + [len(table) for table in tables])
        self._columns = [(bidder, i) for bidder, table in enumerate(tables) for i in range(len(table))]
        self._values = np.array([tables[b][i].value for b, i in self._columns])
        uses = [tables[b][i].uses for b, i in self._columns]
        self._lp = _relaxation(self._values, [b for b, _ in self._columns], uses, len(tables), capacity)
        self._solver = _quiet(self._lp)
        self._needs = [sum(row.values()) for row in uses]

    def best(self) -> Choice:
        """The best choice of all bidders."""
        return self._solve(None, self._empty)

    def without(self, bidder: int, start: Sequence[int]) -> Choice:
        """The best choice of the others. ``start``: a choice that is possible once ``bidder`` has left."""
        lower = list(start)
        lower[bidder] = self._empty[bidder]
        columns = np.arange(self._first[bidder], self._first[bidder + 1], dtype=np.int32)
        keep = self._first[bidder] + self._empty[bidder]
        upper = (columns == keep).astype(float)
        self._solver.changeColsBounds(len(columns), columns, np.zeros(len(columns)), upper)
        choice = self._solve(bidder, lower)
        self._solver.changeColsBounds(len(columns), columns, np.zeros(len(columns)), np.ones(len(columns)))
        # Its empty row is worth something to itself; the others' sum is asked for.
        own = self._tables[bidder][self._empty[bidder]].value
        return Choice(choice.rows, choice.value - own, choice.bound - own)

    def relaxed(self) -> float:
        """The best sum of values if rows could be chosen in parts."""
        self._solver.run()
        return float(-self._solver.getInfo().objective_function_value)

    def _solve(self, absent: int | None, start: Sequence[int]) -> Choice:
        solver = self._solver
        solver.run()
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            raise ThemisError(f"the relaxation of the auction ended with {solver.getModelStatus()}; this is a bug")
        solution = solver.getSolution()
        share = np.asarray(solution.col_value)
        reduced = np.asarray(solution.col_dual)
        bound = -solver.getInfo().objective_function_value
        rows = self._rounded(share, start, absent)
        value = self._value(rows)
        if value >= bound - EQUAL:
            return Choice(tuple(rows), value, value)
        # A row whose reduced cost is more than the gap is in no better choice.
        open_ = (reduced < bound - value + EQUAL) | (share > 1 - EQUAL)
        for b, i in enumerate(rows):
            open_[self._first[b] + i] = True
        if absent is not None:
            open_[self._first[absent] : self._first[absent + 1]] = False
            open_[self._first[absent] + self._empty[absent]] = True
        return self._branch(np.flatnonzero(open_), rows, value, bound)

    def _branch(self, open_: np.ndarray, rows: list[int], value: float, bound: float) -> Choice:
        columns = [self._columns[j] for j in open_]
        uses = [self._tables[b][i].uses for b, i in columns]
        lp = _relaxation(self._values[open_], [b for b, _ in columns], uses, len(self._tables), self._capacity)
        lp.integrality_ = [highspy.HighsVarType.kInteger] * len(columns)
        solver = _quiet(lp)
        solver.setOptionValue("mip_rel_gap", 0.0)
        solver.setOptionValue("mip_abs_gap", EQUAL / 2)
        solver.setOptionValue("mip_feasibility_tolerance", 1e-9)
        solver.setOptionValue("time_limit", self._seconds)
        known = highspy.HighsSolution()
        chosen = {(b, i) for b, i in enumerate(rows)}
        known.col_value = [1.0 if column in chosen else 0.0 for column in columns]
        solver.setSolution(known)
        solver.run()
        info = solver.getInfo()
        found = list(rows)
        share = np.asarray(solver.getSolution().col_value)
        for j in np.flatnonzero(share > 0.5):
            found[columns[j][0]] = columns[j][1]
        if not self._possible(found) or self._value(found) < value:
            found = rows
        best = self._value(found)
        if solver.getModelStatus() == highspy.HighsModelStatus.kOptimal:
            return Choice(tuple(found), best, best)
        return Choice(tuple(found), best, min(bound, max(best, -info.mip_dual_bound)))

    def _rounded(self, share: np.ndarray, start: Sequence[int], absent: int | None) -> list[int]:
        """A possible choice near the relaxation's, then improved greedily; never worse than ``start`` improved."""
        rows = list(self._empty)
        left = list(self._capacity)
        for j in np.argsort(-share, kind="stable"):
            if share[j] < 1e-6:
                break
            b, i = self._columns[j]
            if rows[b] == self._empty[b] and self._fits(self._tables[b][i], left):
                rows[b] = i
                for resource, amount in self._tables[b][i].uses.items():
                    left[resource] -= amount
        self._improve(rows, absent)
        other = list(start)
        self._improve(other, absent)
        return rows if self._value(rows) >= self._value(other) else other

    def _improve(self, rows: list[int], absent: int | None) -> None:
        """Swap single rows for better ones that fit, until none does."""
        left = list(self._capacity)
        for b, i in enumerate(rows):
            for resource, amount in self._tables[b][i].uses.items():
                left[resource] -= amount
        improved = True
        while improved:
            improved = False
            for b, table in enumerate(self._tables):
                if b == absent:
                    continue
                now = table[rows[b]]
                for resource, amount in now.uses.items():
                    left[resource] += amount
                best = rows[b]
                for i, row in enumerate(table):
                    if row.value <= now.value + EQUAL:
                        break
                    if self._fits(row, left):
                        best = i
                        break
                improved = improved or best != rows[b]
                rows[b] = best
                for resource, amount in table[best].uses.items():
                    left[resource] -= amount

    @staticmethod
    def _fits(row: Row, left: Sequence[int]) -> bool:
        return all(left[resource] >= amount for resource, amount in row.uses.items())

    def _possible(self, rows: Sequence[int]) -> bool:
        left = list(self._capacity)
        for b, i in enumerate(rows):
            for resource, amount in self._tables[b][i].uses.items():
                left[resource] -= amount
        return min(left, default=0) >= 0

    def _value(self, rows: Sequence[int]) -> float:
        return math.fsum(self._tables[b][i].value for b, i in enumerate(rows))


def _relaxation(
    values: np.ndarray,
    bidders: Sequence[int],
    uses: Sequence[Mapping[int, int]],
    count: int,
    capacity: Sequence[int],
) -> highspy.HighsLp:
    """Minimise -values; each bidder has exactly one row, each resource its capacity."""
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(values), count + len(capacity)
    lp.col_cost_ = -values
    lp.col_lower_, lp.col_upper_ = np.zeros(len(values)), np.ones(len(values))
    lp.row_lower_ = np.array([1.0] * count + [-highspy.kHighsInf] * len(capacity))
    lp.row_upper_ = np.array([1.0] * count + [float(amount) for amount in capacity])
    start, index, value = [0], [], []
    for bidder, row in zip(bidders, uses, strict=True):
        index.append(bidder)
        value.append(1.0)
        for resource, amount in row.items():
            index.append(count + resource)
            value.append(float(amount))
        start.append(len(index))
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.array(start, dtype=np.int32)
    lp.a_matrix_.index_ = np.array(index, dtype=np.int32)
    lp.a_matrix_.value_ = np.array(value)
    return lp


def _quiet(lp: highspy.HighsLp) -> highspy.Highs:
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.passModel(lp)
    return solver
