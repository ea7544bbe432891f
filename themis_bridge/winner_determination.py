"""Winner determination: one row of each bidder, all rows together within what is on offer, best sum of values.

An integer program, solved exactly. HiGHS solves the relaxation, warm from one bidder's absence to the next's;
reduced costs rule out most rows for good; HiGHS's branch and bound settles the few that remain. What a value
or a capacity means is the auction's affair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from themis_bridge.errors import ThemisError

#: How far two sums of logarithms may be apart and count as equal.
EQUAL = 1e-9


@dataclass(frozen=True, eq=False)
class Table:
    """One bidder's rows, the best one first. ``values``: of each row. ``uses``: rows x resources, how much of each."""

    values: np.ndarray
    uses: np.ndarray


@dataclass(frozen=True)
class Choice:
    """``rows``: the index of each bidder's row. ``value``: their sum. ``bound``: no choice is worth more."""

    rows: tuple[int, ...]
    value: float
    bound: float


class Market:
    """Bidders' tables over common resources. Every table has a row that uses nothing.

    ``capacity``: of each resource. ``seconds``: after so long one solution is given up as it stands; its `bound` then
    says how good it is.
    """

    def __init__(self, tables: Sequence[Table], capacity: Sequence[int], seconds: float = 10.0):
        self._seconds = seconds
        self._capacity = np.array(capacity, dtype=np.int64)
        sizes = [len(table.values) for table in tables]
        #: Columns of the program: all rows of the first bidder, then those of the second, ...
        self._first = np.cumsum([0, *sizes])
        self._bidder = np.repeat(np.arange(len(tables)), sizes)
        self._values = np.concatenate([table.values for table in tables])
        self._uses = np.concatenate([table.uses for table in tables])
        #: Of each bidder the column of the row that uses nothing.
        self._empty = self._first[:-1] + [int(np.argmin(table.uses.any(axis=1))) for table in tables]
        self._solver = _quiet(self._program(np.arange(len(self._values))))

    def best(self) -> Choice:
        """The best choice of all bidders."""
        return self._solve(None, self._empty)

    def without(self, bidder: int, start: Choice) -> Choice:
        """The best choice of the others. ``start``: a choice that is possible once ``bidder`` has left."""
        columns = self._first[:-1] + start.rows
        empty = columns[bidder] = self._empty[bidder]
        own = np.arange(self._first[bidder], self._first[bidder + 1], dtype=np.int32)
        none, all_ = np.zeros(len(own)), np.ones(len(own))
        self._solver.changeColsBounds(len(own), own, none, (own == empty).astype(float))
        choice = self._solve(bidder, columns)
        self._solver.changeColsBounds(len(own), own, none, all_)
        # Its empty row is worth something to itself; the others' sum is asked for.
        value = float(self._values[empty])
        return Choice(choice.rows, choice.value - value, choice.bound - value)

    def relaxed(self) -> float:
        """The best sum of values if rows could be chosen in parts."""
        self._solver.run()
        return float(-self._solver.getInfo().objective_function_value)

    def _solve(self, absent: int | None, start: np.ndarray) -> Choice:
        solver = self._solver
        solver.run()
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            raise ThemisError(f"the relaxation of the auction ended with {solver.getModelStatus()}; this is a bug")
        solution = solver.getSolution()
        share = np.asarray(solution.col_value)
        reduced = np.asarray(solution.col_dual)
        bound = -solver.getInfo().objective_function_value
        there = np.ones(len(share), dtype=bool)
        if absent is not None:
            there[self._first[absent] : self._first[absent + 1]] = False
            there[self._empty[absent]] = True
        near = [self._improved(columns, there) for columns in (self._rounded(share), start)]
        columns = max(near, key=self._value)
        value = self._value(columns)
        if value >= bound - EQUAL:
            return self._choice(columns, value)
        # A row whose reduced cost is more than the gap is in no better choice.
        open_ = there & ((reduced < bound - value + EQUAL) | (share > 1 - EQUAL))
        open_[columns] = True
        return self._branch(np.flatnonzero(open_), columns, value, bound)

    def _branch(self, open_: np.ndarray, columns: np.ndarray, value: float, bound: float) -> Choice:
        """The best choice among the open columns. ``columns``: a choice among them, worth ``value``."""
        lp = self._program(open_)
        lp.integrality_ = [highspy.HighsVarType.kInteger] * len(open_)
        solver = _quiet(lp)
        solver.setOptionValue("mip_rel_gap", 0.0)
        solver.setOptionValue("mip_abs_gap", EQUAL / 2)
        solver.setOptionValue("mip_feasibility_tolerance", 1e-9)
        solver.setOptionValue("time_limit", self._seconds)
        known = highspy.HighsSolution()
        known.col_value = np.isin(open_, columns).astype(float)
        solver.setSolution(known)
        solver.run()
        info = solver.getInfo()
        share = np.asarray(solver.getSolution().col_value)
        found = columns.copy()
        for column in open_[share > 0.5]:
            found[self._bidder[column]] = column
        if (self._left(found) < 0).any() or self._value(found) < value:
            found = columns
        best = self._value(found)
        if solver.getModelStatus() == highspy.HighsModelStatus.kOptimal:
            return self._choice(found, best)
        return self._choice(found, min(bound, max(best, -info.mip_dual_bound)))

    def _rounded(self, share: np.ndarray) -> np.ndarray:
        """A possible choice near the relaxation's."""
        columns = self._empty.copy()
        left = self._capacity.copy()
        for column in np.argsort(-share, kind="stable"):
            if share[column] < 1e-6:
                break
            bidder = self._bidder[column]
            if columns[bidder] == self._empty[bidder] and (self._uses[column] <= left).all():
                columns[bidder] = column
                left -= self._uses[column]
        return columns

    def _improved(self, columns: np.ndarray, there: np.ndarray) -> np.ndarray:
        """Swap single rows for others that are ``there`` and fit, the greatest gain first, until none gains."""
        columns = columns.copy()
        left = self._left(columns)
        while True:
            gain = np.where(there, self._values - self._values[columns][self._bidder], 0.0)
            better = np.flatnonzero(gain > EQUAL)
            fits = (self._uses[better] - self._uses[columns][self._bidder[better]] <= left).all(axis=1)
            if not fits.any():
                return columns
            better = better[fits]
            best = better[np.argmax(gain[better])]
            bidder = self._bidder[best]
            left += self._uses[columns[bidder]] - self._uses[best]
            columns[bidder] = best

    def _left(self, columns: np.ndarray) -> np.ndarray:
        left: np.ndarray = self._capacity - self._uses[columns].sum(axis=0)
        return left

    def _value(self, columns: np.ndarray) -> float:
        return math.fsum(self._values[columns])

    def _choice(self, columns: np.ndarray, bound: float) -> Choice:
        rows = tuple((columns - self._first[:-1]).tolist())
        return Choice(rows, self._value(columns), bound)

    def _program(self, columns: np.ndarray) -> highspy.HighsLp:
        """Minimise -values over some columns; each bidder has exactly one row, each resource its capacity."""
        count, width = len(self._empty), len(columns)
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = width, count + len(self._capacity)
        lp.col_cost_ = -self._values[columns]
        lp.col_lower_, lp.col_upper_ = np.zeros(width), np.ones(width)
        lp.row_lower_ = np.concatenate([np.ones(count), np.full(len(self._capacity), -highspy.kHighsInf)])
        lp.row_upper_ = np.concatenate([np.ones(count), self._capacity])
        uses = self._uses[columns]
        column, resource = np.nonzero(uses)
        order = np.argsort(np.concatenate([np.arange(width), column]), kind="stable")
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.concatenate([[0], np.cumsum(1 + np.count_nonzero(uses, axis=1))]).astype(np.int32)
        lp.a_matrix_.index_ = np.concatenate([self._bidder[columns], count + resource])[order].astype(np.int32)
        lp.a_matrix_.value_ = np.concatenate([np.ones(width), uses[column, resource]])[order]
        return lp


def _quiet(lp: highspy.HighsLp) -> highspy.Highs:
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.passModel(lp)
    return solver
