"""Winner determination: one row of each bidder, so that all fit the capacity and the sum of values is largest.

This is an integer program, solved exactly. HiGHS first solves its linear relaxation. Rows whose reduced cost exceeds
the gap to a known solution are ruled out; HiGHS's branch and bound decides among the few that remain. When one bidder
is left out (for its payment), the relaxation starts from the last one's basis. What a value or a resource means is
decided in `auction`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from themis_bridge.errors import ThemisError

#: Two sums of logarithms (and so, relatively, two products) that differ by less count as equal. It is far above the
#: rounding error of a sum of some hundred logarithms.
EQUAL = 1e-9
#: A row of which the relaxation takes less than this part is not used for rounding. It is ten times HiGHS's own
#: feasibility tolerance (option primal_feasibility_tolerance, 1e-7).
LEAST_SHARE = 1e-6
#: Seconds after which a single solution is given up as it stands. `benchmarks.auction` needs about 2 s for all
#: solutions of its largest auction.
SOLVE_S = 10.0


@dataclass(frozen=True, eq=False)
class BidderRows:
    """One bidder's rows, the best one first.

    values: the value of each row, shape (rows,).
    uses: how much of each resource each row uses, shape (rows, resources), whole numbers.
    """

    values: np.ndarray
    uses: np.ndarray


@dataclass(frozen=True)
class Selection:
    """One row of each bidder.

    rows: by bidder, the index of its row.
    value: the sum of the rows' values.
    bound: no selection has a larger sum; the selection is proved optimal if ``bound`` does not exceed ``value``.
    """

    rows: tuple[int, ...]
    value: float
    bound: float


class SilentHighs(highspy.Highs):
    """HiGHS with one thread, which prints nothing. (The constructor of 1.16 prints in this call who it is.)"""

    def enableCallbacks(self) -> None:
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()
        self.setOptionValue("threads", 1)


class WinnerDetermination:
    """The problem for a set of bidders and resources. Every bidder must have a row that uses nothing.

    capacity: by resource, how much there is.
    seconds: limit of a single solution; at the limit the best selection so far is returned, and its ``bound`` says how
        good it is.
    """

    def __init__(self, bidders: Sequence[BidderRows], capacity: Sequence[int], seconds: float = SOLVE_S):
        self._seconds = seconds
        self._capacity = np.array(capacity, dtype=np.int64)
        sizes = [len(bidder.values) for bidder in bidders]
        #: A row is a column of the program: first the first bidder's rows, then the second's, and so on. Here: the
        #: column of each bidder's first row, and the number of all columns.
        self._first = np.cumsum([0, *sizes])
        self._bidder = np.repeat(np.arange(len(bidders)), sizes)
        self._values = np.concatenate([bidder.values for bidder in bidders])
        self._uses = np.concatenate([bidder.uses for bidder in bidders])
        #: By bidder, the column of its row that uses nothing.
        self._empty = self._first[:-1] + [int(np.argmin(bidder.uses.any(axis=1))) for bidder in bidders]
        self._solver = _solver(self._program(np.arange(len(self._values))))

    def solve(self) -> Selection:
        """The best selection of all bidders."""
        return self._solve(None, self._empty)

    def solve_without(self, bidder: int, start: Selection) -> Selection:
        """The best selection of the other bidders.

        ``start``: a selection of all bidders; without ``bidder`` it is feasible, and the search begins there.
        """
        columns = self._first[:-1] + start.rows
        empty = columns[bidder] = self._empty[bidder]
        own = np.arange(self._first[bidder], self._first[bidder + 1], dtype=np.int32)
        none, all_ = np.zeros(len(own)), np.ones(len(own))
        self._solver.changeColsBounds(len(own), own, none, (own == empty).astype(float))
        selection = self._solve(bidder, columns)
        self._solver.changeColsBounds(len(own), own, none, all_)
        # The sum so far includes what the empty row is worth to the absent bidder.
        value = float(self._values[empty])
        return Selection(selection.rows, selection.value - value, selection.bound - value)

    def relaxed_value(self) -> float:
        """The largest sum of values if a row could be chosen in part: the optimum of the linear relaxation."""
        self._solver.run()
        return float(-self._solver.getInfo().objective_function_value)

    def _solve(self, absent: int | None, start: np.ndarray) -> Selection:
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
            return self._selection(columns, value)
        # A row whose reduced cost exceeds the gap is in no better selection.
        open_ = there & ((reduced < bound - value + EQUAL) | (share > 1 - EQUAL))
        open_[columns] = True
        return self._branch(np.flatnonzero(open_), columns, value, bound)

    def _branch(self, open_: np.ndarray, columns: np.ndarray, value: float, bound: float) -> Selection:
        """The best selection among the open columns. ``columns``: a selection among them, worth ``value``."""
        lp = self._program(open_)
        lp.integrality_ = [highspy.HighsVarType.kInteger] * len(open_)
        solver = _solver(lp)
        solver.setOptionValue("mip_rel_gap", 0.0)
        solver.setOptionValue("mip_abs_gap", EQUAL / 2)
        solver.setOptionValue("mip_feasibility_tolerance", EQUAL)
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
            return self._selection(found, best)
        return self._selection(found, min(bound, max(best, -info.mip_dual_bound)))

    def _rounded(self, share: np.ndarray) -> np.ndarray:
        """A feasible selection: the rows of which the relaxation takes most, as long as they fit."""
        columns = self._empty.copy()
        left = self._capacity.copy()
        for column in np.argsort(-share, kind="stable"):
            if share[column] < LEAST_SHARE:
                break
            bidder = self._bidder[column]
            if columns[bidder] == self._empty[bidder] and (self._uses[column] <= left).all():
                columns[bidder] = column
                left -= self._uses[column]
        return columns

    def _improved(self, columns: np.ndarray, there: np.ndarray) -> np.ndarray:
        """Exchange single rows for others that are ``there`` and fit, the largest gain first, until none gains."""
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

    def _selection(self, columns: np.ndarray, bound: float) -> Selection:
        rows = tuple((columns - self._first[:-1]).tolist())
        return Selection(rows, self._value(columns), bound)

    def _program(self, columns: np.ndarray) -> highspy.HighsLp:
        """Minimise -values over some columns: exactly one row of each bidder, no resource beyond its capacity."""
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


def _solver(lp: highspy.HighsLp) -> highspy.Highs:
    solver = SilentHighs()
    solver.passModel(lp)
    return solver
