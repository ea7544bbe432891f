"""An integer program for HiGHS, row by row, and its silent solution on one thread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np


class SilentHighs(highspy.Highs):
    """Prints nothing. (The constructor of 1.16 says who it is when it does this, before anybody can forbid it.)"""

    def enableCallbacks(self) -> None:
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()


@dataclass(frozen=True)
class Solution:
    """values: of the columns; None: none was found in time. bound: no solution costs less. optimal: it was proved."""

    values: np.ndarray | None
    bound: float
    optimal: bool


class Rows:
    """Rows of a program, one after the other."""

    def __init__(self) -> None:
        self._starts, self._columns, self._values = [0], [], []  # type: ignore[var-annotated]
        self._lower: list[float] = []
        self._upper: list[float] = []

    def add(
        self, columns: Sequence[int] | np.ndarray, values: Sequence[float] | np.ndarray, lower: float, upper: float
    ) -> None:
        """``lower <= sum(values * columns) <= upper``."""
        self._columns.append(np.asarray(columns))
        self._values.append(np.asarray(values, dtype=float))
        self._starts.append(self._starts[-1] + len(columns))
        self._lower.append(lower)
        self._upper.append(upper)

    def program(self, columns: int) -> highspy.HighsLp:
        """The program of these rows."""
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = columns, len(self._lower)
        lp.row_lower_, lp.row_upper_ = np.array(self._lower), np.array(self._upper)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.array(self._starts, dtype=np.int32)
        lp.a_matrix_.index_ = np.concatenate(self._columns).astype(np.int32)
        lp.a_matrix_.value_ = np.concatenate(self._values)
        return lp

    def least(
        self, cost: np.ndarray, lower: np.ndarray, upper: np.ndarray, integers: np.ndarray, seconds: float
    ) -> Solution:
        """The columns of least cost. integers: whether each column is whole. seconds: after which the best counts."""
        lp = self.program(len(cost))
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, lower, upper
        kinds = highspy.HighsVarType
        lp.integrality_ = [kinds.kInteger if one else kinds.kContinuous for one in integers]
        solver = solver_of(lp, seconds)
        solver.run()
        info, status = solver.getInfo(), solver.getModelStatus()
        found = int(info.primal_solution_status) == int(highspy.SolutionStatus.kSolutionStatusFeasible)
        values = np.asarray(solver.getSolution().col_value) if found else None
        optimal = status == highspy.HighsModelStatus.kOptimal
        bound = math.inf if status == highspy.HighsModelStatus.kInfeasible else float(info.mip_dual_bound)
        return Solution(values, bound, optimal)


def solver_of(lp: highspy.HighsLp, seconds: float) -> SilentHighs:
    """A solver of this program that ends after ``seconds``."""
    solver = SilentHighs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("time_limit", seconds)
    solver.passModel(lp)
    return solver
