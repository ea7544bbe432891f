"""Which models share a sub-cluster (section 4.4 and appendix A).

All GPUs of a sub-cluster hold all of its models. So each part must fit one GPU's memory, and all parts should have
about the same rate and the same memory. This is an integer program that HiGHS solves. It begins with the parts that the
rule "the largest first, each to the part that has least" gives, after exchanges of single models. Rates are requests
per second, memory is in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from benchmarks.placement.integer_program import Rows, solver_of
from symphony_serve.errors import ServeError

#: Seconds after which the best parts so far are taken. Source: appendix A gives its solver 10 s.
SOLVE_S = 10.0
#: What a difference in memory counts beside one in the rate, each divided by its average. The paper adds
#: both in their own units with a factor that it does not name.
MEMORY_WEIGHT = 1.0
#: Exchanges that are made before the solver begins, and how many of the best ones are tried for one that the limits
#: allow. 800 models in 20 parts then need a second.
STEPS, TRIED = 500, 20
#: Two sums that differ by this part of them are equal; above HiGHS's feasibility tolerance (1e-7).
EQUAL = 1e-6


@dataclass(frozen=True)
class ModelLoad:
    """One model: its rate, its memory at rest, and what a batch of it takes besides (of one batch at a time).

    move: what it costs to load the model into a part, or to unload it from one, in any unit.
    """

    name: str
    rate: float
    static: float
    dynamic: float = 0.0
    move: float = 1.0

    def __post_init__(self) -> None:
        for field in ("rate", "static", "dynamic", "move"):
            value = getattr(self, field)
            if not 0 <= value < math.inf:
                raise ServeError(f"model {self.name} has {field} {value}, expected a finite number of 0 or more")


@dataclass(frozen=True)
class Limits:
    """What each part may have at most: memory, rate; and what all moves together may cost."""

    memory: float
    rate: float = math.inf
    moves: float = math.inf


def partition(
    models: Sequence[ModelLoad],
    parts: int,
    limits: Limits,
    current: Mapping[str, int] | None = None,
    seconds: float = SOLVE_S,
) -> dict[str, int]:
    """The part of each model, from 0.

    current: where models are now; one that is not in it is nowhere. Raises ServeError if a name occurs twice, or if no
    parts within the limits are found.
    """
    if parts < 1 or not models or len({model.name for model in models}) < len(models):
        raise ServeError(f"{len(models)} models in {parts} parts: give one part or more, and models of different names")
    now = np.array([(current or {}).get(model.name, -1) for model in models])
    if (now >= parts).any():
        raise ServeError(f"a model is in part {now.max()} now, expected one of 0 to {parts - 1}, or none")
    problem = _Problem(models, parts, limits, now)
    found = problem.solve(problem.start(), seconds)
    if found is None:
        raise ServeError(
            f"the {len(models)} models were not brought into {parts} parts of {limits.memory:g} bytes and "
            f"{limits.rate:g} requests/s with moves of {limits.moves:g}; allow more of these"
        )
    return {model.name: int(place) for model, place in zip(models, found, strict=True)}


class _Problem:
    """The program. Columns: x of each model and part (model by model), D of each part, dR, dS."""

    def __init__(self, models: Sequence[ModelLoad], parts: int, limits: Limits, now: np.ndarray):
        self._parts, self._limits, self._now = parts, limits, now
        self._rate, self._static, self._dynamic, self._move = (
            np.array([getattr(model, field) for model in models], dtype=float)
            for field in ("rate", "static", "dynamic", "move")
        )
        # Divided by the averages, so that no unit matters to the solver.
        self._rate_unit = self._rate.sum() / parts or 1.0
        self._memory_unit = self._static.sum() / parts or 1.0

    def start(self) -> np.ndarray | None:
        """The largest first, each to the part that has least; else the present parts. None: neither is allowed."""
        weight = np.maximum(self._rate / self._rate_unit, self._static / self._memory_unit)
        places = np.full(len(weight), -1)
        rates, memory, largest = (np.zeros(self._parts) for _ in range(3))
        for model in np.argsort(-weight, kind="stable"):
            after = memory + self._static[model] + np.maximum(largest, self._dynamic[model])
            fits = (after <= self._limits.memory) & (rates + self._rate[model] <= self._limits.rate)
            if not fits.any():
                break
            has = np.maximum(rates / self._rate_unit, memory / self._memory_unit)
            place = int(np.argmin(np.where(fits, has, math.inf)))
            places[model] = place
            rates[place] += self._rate[model]
            memory[place] += self._static[model]
            largest[place] = max(largest[place], self._dynamic[model])
        allowed = [self._improved(one) for one in (places, self._now) if self._allows(one)]
        return min(allowed, key=self._value) if allowed else None

    def _improved(self, places: np.ndarray) -> np.ndarray:
        """Exchange and move single models of the part that is farthest from even, the best first, until none helps.

        The sum of the squares of all parts' rates and memory becomes smaller with each step.
        """
        weight = np.stack([self._rate / self._rate_unit, self._static / self._memory_unit], axis=1)
        places = places.copy()
        for _ in range(STEPS):
            sums = np.stack([self._sums(weight[:, 0], places), self._sums(weight[:, 1], places)], axis=1)
            for part in np.argsort(-np.abs(sums - 1).max(axis=1)):
                changed = self._step(places, int(part), weight, sums)
                if changed is not None:
                    places = changed
                    break
            else:
                break
        return places

    def _step(self, places: np.ndarray, part: int, weight: np.ndarray, sums: np.ndarray) -> np.ndarray | None:
        inside, outside = np.flatnonzero(places == part), np.flatnonzero(places != part)
        # What leaves the part for that of another model; the last row and the last column are no model: a move.
        leaves = np.concatenate([weight[inside], np.zeros((1, 2))])
        comes = np.concatenate([weight[outside], np.zeros((self._parts, 2))])
        goes_to = np.concatenate([places[outside], np.arange(self._parts)])
        less = leaves[:, None, :] - comes[None, :, :]
        change = 2 * (less * (sums[goes_to] - sums[part])[None, :, :] + less * less).sum(axis=2)
        change[:, goes_to == part] = 0.0
        for place in np.argsort(change, axis=None)[:TRIED]:
            row, column = np.unravel_index(place, change.shape)
            if change[row, column] > -EQUAL:
                break
            changed = places.copy()
            if row < len(inside):
                changed[inside[row]] = goes_to[column]
            if column < len(outside):
                changed[outside[column]] = part
            if self._allows(changed):
                return changed
        return None

    def _allows(self, places: np.ndarray) -> bool:
        if (places < 0).any():
            return False
        rates, memory = self._sums(self._rate, places), self._sums(self._static, places)
        for part in range(self._parts):
            memory[part] += self._dynamic[places == part].max(initial=0.0)
        moved = places != self._now
        moves = self._move[moved].sum() + self._move[moved & (self._now >= 0)].sum()
        limits, over = self._limits, 1 + EQUAL
        return bool(
            (rates <= limits.rate * over).all() and (memory <= limits.memory * over).all() and moves <= limits.moves
        )

    def _sums(self, values: np.ndarray, places: np.ndarray) -> np.ndarray:
        return np.bincount(places, weights=values, minlength=self._parts)

    def _value(self, places: np.ndarray) -> float:
        rates = np.abs(self._sums(self._rate, places) / self._rate_unit - 1).max()
        memory = np.abs(self._sums(self._static, places) / self._memory_unit - 1).max()
        return float(rates + MEMORY_WEIGHT * memory)

    def solve(self, start: np.ndarray | None, seconds: float) -> np.ndarray | None:
        """The best places found; never worse than ``start``."""
        solver = solver_of(self._program(), seconds)
        if start is not None:
            known = highspy.HighsSolution()
            known.col_value = self._columns(start)
            solver.setSolution(known)
        solver.run()
        share = np.asarray(solver.getSolution().col_value)
        found = [] if start is None else [start]
        count = len(self._rate) * self._parts
        if len(share) > count:
            places = share[:count].reshape(-1, self._parts).argmax(axis=1)
            found += [places] if self._allows(places) else []
        return min(found, key=self._value) if found else None

    def _columns(self, places: np.ndarray) -> np.ndarray:
        chosen = np.zeros((len(places), self._parts))
        chosen[np.arange(len(places)), places] = 1.0
        largest = (chosen * self._dynamic[:, None]).max(axis=0) / self._memory_unit
        rates = np.abs(self._sums(self._rate, places) / self._rate_unit - 1).max()
        memory = np.abs(self._sums(self._static, places) / self._memory_unit - 1).max()
        return np.concatenate([chosen.ravel(), largest, [rates, memory]])

    def _program(self) -> highspy.HighsLp:
        models, parts = len(self._rate), self._parts
        rows = Rows()
        x = np.arange(models * parts).reshape(models, parts)
        largest, rate_gap, memory_gap = x.size + np.arange(parts), x.size + parts, x.size + parts + 1
        rate, static, dynamic = self._rate / self._rate_unit, self._static / self._memory_unit, self._dynamic
        dynamic = dynamic / self._memory_unit
        for model in range(models):
            rows.add(x[model], np.ones(parts), 1.0, 1.0)
        for part in range(parts):
            for values, gap in ((rate, rate_gap), (static, memory_gap)):
                rows.add([*x[:, part], gap], [*values, -1.0], -math.inf, 1.0)
                rows.add([*x[:, part], gap], [*values, 1.0], 1.0, math.inf)
            rows.add(x[:, part], rate, -math.inf, self._limits.rate / self._rate_unit)
            most = self._limits.memory / self._memory_unit
            rows.add([*x[:, part], largest[part]], [*static, 1.0], -math.inf, most)
            for some in np.flatnonzero(dynamic):
                rows.add([x[some, part], largest[part]], [-dynamic[some], 1.0], 0.0, math.inf)
        if self._limits.moves < math.inf:
            stays = np.zeros((models, parts))
            placed = np.flatnonzero(self._now >= 0)
            stays[placed, self._now[placed]] = 1.0
            costs = ((1 - 2 * stays) * self._move[:, None]).ravel()
            rows.add(x.ravel(), costs, -math.inf, self._limits.moves - self._move[placed].sum())
        lp = rows.program(x.size + parts + 2)
        cost = np.zeros(lp.num_col_)
        cost[rate_gap], cost[memory_gap] = 1.0, MEMORY_WEIGHT
        lp.col_cost_ = cost
        upper = np.full(lp.num_col_, highspy.kHighsInf)
        upper[: x.size] = 1.0
        lp.col_lower_, lp.col_upper_ = np.zeros(lp.num_col_), upper
        kinds = [highspy.HighsVarType.kInteger] * x.size
        lp.integrality_ = kinds + [highspy.HighsVarType.kContinuous] * (parts + 2)
        return lp
