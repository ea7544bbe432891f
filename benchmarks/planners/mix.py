"""Changing widths over time: schedules as mixtures of configurations.

A *configuration* is a mode for every trial that runs, such that all of them fit on the n devices at once. In this model
a resize is free. So it matters only how long each configuration runs, and not in which order. The best mixture solves a
linear programme with one variable per configuration. `hedge` approximates it: it runs the group in short steps, each
with the configuration that best serves the trials furthest behind (multiplicative weights). `simplex` solves it by
column generation and is meant for up to a few dozen trials. Both ask `Pricer` for the configuration that is worth most
under given weights. Widths over time are decided here; `realise` finds the devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.planners.modes import Floats, Modes

#: The mode (see `Modes`) of each trial, -1 where it does not run.
Configuration = np.ndarray[Any, np.dtype[np.int64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Step:
    """One configuration, and the seconds for which it runs."""

    seconds: float
    configuration: Configuration


#: `Pricer` compares configurations with 0 and with up to this many other numbers of trials that get whole devices.
#: With more numbers the result is hardly better and takes longer.
_TRIED = 8


class Pricer:
    """Finds the configuration with the largest sum of weight * gain.

    Some trials, those of largest weight, get whole devices. Each whole device goes where it adds most (gains are
    concave in whole devices for as long as another one pays). The other trials share the remaining devices as evenly as
    a packing limit of 2, 3, ... c allows. A few limits on the number of trials with whole devices are tried. For each
    of them, all numbers of whole devices are valued at once.

    The result is not always the best. On more than `_TRIED` devices not every limit is tried. Which trials share is
    decided last, although it matters where alphas differ. No device mixes shares of different sizes, such as 1/2, 1/4
    and 1/4, which can pay only where alphas differ.
    """

    def __init__(self, modes: Modes) -> None:
        self.modes = modes
        trials = len(modes.ids)
        #: By trial: the gain that each further whole device adds.
        self.added_gains: Floats = np.diff(modes.gains[:, modes.c - 1 :], axis=1, prepend=0.0)
        #: Row p - 1 holds every trial's gain on a share 1/p.
        self.share_gains: Floats = np.ascontiguousarray(modes.gains[:, modes.c - 1 :: -1][:, : modes.c].T)
        #: The limits that are tried on the number of trials with whole devices.
        self.tried = np.unique(np.linspace(0, min(modes.n, trials), _TRIED + 1).astype(int))
        self._sums: Floats = np.zeros((modes.c, trials + 1))

    def best(self, weights: Floats) -> tuple[float, Configuration, Floats]:
        """(value, configuration, gain of every trial in it), where the value is the sum of weight * gain.

        ``weights``: by trial, >= 0.
        """
        n, c, widest = self.modes.n, self.modes.c, self.added_gains.shape[1]
        trials = len(weights)
        order = np.argsort(-weights, kind="stable")
        first = order[:n]
        steps = (self.added_gains[first] * weights[first][:, None]).ravel()
        ranked = np.argsort(-steps, kind="stable")
        ranked = ranked[steps[ranked] > 0]
        # By limit and number of whole devices given out: what these devices are worth, and how many trials have them.
        worth = np.full((len(self.tried), n + 1), -np.inf)
        served = np.zeros((len(self.tried), n + 1), dtype=int)
        worth[:, 0] = 0.0
        given = []
        for row, limit in enumerate(self.tried):
            to = ranked[ranked < limit * widest][:n]
            worth[row, 1 : len(to) + 1] = np.cumsum(steps[to])
            served[row, 1 : len(to) + 1] = np.cumsum(to % widest == 0)
            given.append(to)
        rest = n - np.arange(n + 1)
        np.cumsum(self.share_gains[:, order] * weights[order], axis=1, out=self._sums[:, 1:])
        value = -1.0
        configuration: Configuration = np.full(trials, -1)
        for most in range(1, c + 1):
            sharing = np.minimum(trials - served, most * rest) if most > 1 else 0 * served
            fewer = sharing // np.maximum(rest, 1)
            # Devices with `fewer` trials each come first and hold those of larger weight; the others hold one more.
            roomy = np.minimum((rest * (fewer + 1) - sharing) * fewer, sharing)
            middle = served + roomy
            total = worth + self._sum(fewer, served, middle) + self._sum(fewer + 1, middle, served + sharing)
            at = np.unravel_index(int(total.argmax()), total.shape)
            found = self._configure(
                weights, order, given[at[0]][: at[1]], int(fewer[at]), int(roomy[at]), int(sharing[at])
            )
            used = np.flatnonzero(found >= 0)
            worth_found = float(weights[used] @ self.modes.gains[used, found[used]])
            if worth_found > value * (1 + 1e-13):
                value, configuration = worth_found, found
        gains = np.where(configuration >= 0, self.modes.gains[np.arange(trials), configuration], 0.0)
        return value, configuration, gains

    def _sum(self, packed: Integers, begin: Integers, end: Integers) -> Floats:
        """The value of the trials from rank ``begin`` to ``end`` (by weight) when each has a share 1/packed."""
        row = np.clip(packed - 1, 0, self.modes.c - 1)
        summed: Floats = self._sums[row, end] - self._sums[row, begin]
        return summed

    def _configure(
        self, weights: Floats, order: Integers, whole: Integers, fewer: int, roomy: int, sharing: int
    ) -> Configuration:
        """The configuration that a division of the devices gives.

        ``whole``: the whole devices given out, each as its index in the flattened ``steps`` of `best`. ``sharing``
        trials share devices: ``roomy`` of them with ``fewer`` trials per device, the others with one more.
        """
        c, widest = self.modes.c, self.added_gains.shape[1]
        configuration: Configuration = np.full(len(weights), -1)
        widths = np.bincount(whole // widest, minlength=0)
        configuration[order[: len(widths)]] = np.where(widths > 0, widths + c - 2, -1)
        if sharing:
            # Only now is it known how many trials share a device, and so which trials lose least by sharing.
            gains = self.share_gains[fewer - 1 if roomy == sharing else fewer] * weights
            rest = order[len(widths) :]
            rest = rest[np.argsort(-gains[rest], kind="stable")]
            configuration[rest[:roomy]] = c - fewer
            configuration[rest[roomy:sharing]] = c - fewer - 1
        return configuration


def hedge(modes: Modes, pricer: Pricer, step: float, eagerness: float, prior: Floats) -> tuple[list[Step], Floats]:
    """Runs the group in steps of at most ``step`` seconds. Returns the steps, and weights to use as a prior.

    A trial's weight is ``prior * exp(eagerness * part of its work left) / height``. A large eagerness keeps the parts
    of work left equal; with a small one the prior matters more. The weights are dual to the makespan: each step's
    weights give a lower bound on it. Those that gave the largest bound are returned, without the division by the
    height.
    """
    left = np.ones(len(modes.ids))
    steps: list[Step] = []
    bound, telling = 0.0, prior
    while True:
        open_ = left > 0
        if not open_.any():
            return steps, telling
        push = np.exp(eagerness * (left - left.max())) * prior * open_
        value, configuration, gains = pricer.best(push / modes.heights)
        if push.sum() / value > bound:
            bound, telling = float(push.sum() / value), push
        runs = np.flatnonzero((configuration >= 0) & open_ & (gains > 0))
        rates = gains[runs] / modes.heights[runs]
        until_done = left[runs] / rates
        seconds = float(min(step, until_done.max()))
        left[runs] = np.where(until_done <= seconds * (1 + 1e-12), 0.0, left[runs] - seconds * rates)
        configuration[~open_] = -1
        steps.append(Step(seconds, configuration))


def simplex(modes: Modes, pricer: Pricer, *, pivots: int, close: float) -> list[Step]:
    """The mixture of configurations that takes the least time: column generation on a dense revised simplex.

    It ends when the mixture is within ``close`` (relative) of its dual bound, or after ``pivots``. Returns at most one
    step per trial; together they do all work but for rounding.
    """
    trials = len(modes.ids)
    scale = float(modes.heights.max())
    fastest = modes.gains.argmax(axis=1)
    # The first mixture runs one trial at a time, each at its fastest.
    peak = modes.gains[np.arange(trials), fastest]
    inverse = np.diag(1.0 / peak)
    amounts = modes.heights / scale / peak
    costs = np.ones(trials)
    basis: list[Configuration | None] = []
    for i in range(trials):
        alone: Configuration = np.full(trials, -1)
        alone[i] = fastest[i]
        basis.append(alone)
    bound = 0.0
    for _ in range(pivots):
        duals = costs @ inverse
        lowest = int(duals.argmin())
        entering: Configuration | None = None
        if duals[lowest] < -1e-9 * np.abs(duals).max():
            # Doing more than all of this trial's work would be cheaper: its surplus variable enters, at no cost.
            direction, cost = -inverse[:, lowest], 0.0
        else:
            duals = np.maximum(duals, 0.0)
            value, entering, gains = pricer.best(duals)
            bound = max(bound, float(duals @ modes.heights) / scale / value)
            if costs @ amounts <= bound * (1 + close):
                break
            direction, cost = inverse @ gains, 1.0
        rising = direction > 1e-11 * np.abs(direction).max()
        if not rising.any():
            break
        ratios = np.where(rising, amounts / np.where(rising, direction, 1.0), np.inf)
        row = int(ratios.argmin())
        amount = float(ratios[row])
        amounts = np.maximum(amounts - amount * direction, 0.0)
        amounts[row] = amount
        pivot = inverse[row] / direction[row]
        inverse = inverse - np.outer(direction, pivot)
        inverse[row] = pivot
        costs[row] = cost
        basis[row] = entering
    return [
        Step(float(amount) * scale, configuration)
        for amount, configuration in zip(amounts, basis, strict=True)
        if configuration is not None and amount > 0
    ]
