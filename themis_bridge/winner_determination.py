"""Winner determination: one row of each bidder, so that all fit the capacity and the sum of values is largest.

This is an integer program, which HiGHS solves exactly: first its linear relaxation, by which rows are ruled out whose
reduced cost exceeds the gap to a known solution, then the rest by branch and bound. When one bidder is left out (for
its payment), the relaxation starts from the last one's basis. What a value or a resource means is decided in `auction`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

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
    seconds: limit of a single solution; at the limit the relaxation's, rounded, is returned, and its ``bound`` says how
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
        self._solver = SilentHighs()
        self._solver.passModel(self.program(np.arange(len(self._values))))

    def solve(self, absent: int | None = None, start: Selection | None = None) -> Selection:
        """The best selection of all bidders, or of all but one.

        ``start``: a selection of all bidders; without the absent one it is feasible, and the search begins there.
        """
        columns = self._empty.copy() if start is None else self._first[:-1] + start.rows
        there = np.ones(len(self._values), dtype=bool)
        if absent is not None:
            there[self._first[absent] : self._first[absent + 1]] = False
            columns[absent] = self._empty[absent]
        there[columns] = True
        every = np.arange(len(there), dtype=np.int32)
        self._solver.changeColsBounds(len(every), every, np.zeros(len(every)), there.astype(float))
        self._solver.run()
        solution = self._solver.getSolution()
        reduced, share = np.asarray(solution.col_dual), np.asarray(solution.col_value)
        bound = -self._solver.getInfo().objective_function_value
        columns = max(self._rounded(share), columns, key=lambda each: math.fsum(self._values[each]))
        value = math.fsum(self._values[columns])
        if value < bound - EQUAL:
            # A row whose reduced cost exceeds the gap is in no better selection.
            open_ = there & (reduced < bound - value + EQUAL)
            open_[columns] = True
            columns, bound = self._branch(np.flatnonzero(open_), columns)
            value = math.fsum(self._values[columns])
        else:
            bound = value
        # Both sums include what the empty row is worth to the absent bidder.
        lost = 0.0 if absent is None else float(self._values[self._empty[absent]])
        rows = tuple((columns - self._first[:-1]).tolist())
        return Selection(rows, value - lost, max(value, bound) - lost)

    def _branch(self, open_: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, float]:
        """The best selection among the open columns, and a bound of its value. ``columns``: a selection among them."""
        lp = self.program(open_)
        lp.integrality_ = [highspy.HighsVarType.kInteger] * len(open_)
        solver = SilentHighs()
        solver.passModel(lp)
        for option, value in (("mip_rel_gap", 0.0), ("mip_abs_gap", EQUAL / 2), ("mip_feasibility_tolerance", EQUAL)):
            solver.setOptionValue(option, value)
        solver.setOptionValue("time_limit", self._seconds)
        # It is not told the known selection: HiGHS 1.16 may return that as optimal although it is not.
        solver.run()
        if solver.getModelStatus() == highspy.HighsModelStatus.kOptimal:
            return open_[np.asarray(solver.getSolution().col_value) > 0.5], -math.inf
        return columns, -solver.getInfo().mip_dual_bound

    def _rounded(self, share: np.ndarray) -> np.ndarray:
        """A feasible selection: the rows of which the relaxation takes most, as long as they fit."""
        columns, left = self._empty.copy(), self._capacity.copy()
        for column in np.argsort(-share, kind="stable")[: np.count_nonzero(share > LEAST_SHARE)]:
            bidder = self._bidder[column]
            if columns[bidder] == self._empty[bidder] and (self._uses[column] <= left).all():
                columns[bidder] = column
                left -= self._uses[column]
        return columns

    def program(self, columns: np.ndarray) -> highspy.HighsLp:
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
