"""HyperBand, and HyperBandForBOHB, which is synchronous BOHB with `TuneBOHB` as its searcher."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from ray.tune.experiment import Trial

from fluidtune.tune.groups.adapter import Adapter, Membership
from fluidtune.tune.groups.budgets import iteration_at


class HyperBandAdapter(Adapter):
    """A batch for every rung of every bracket."""

    synchronous = True

    def mapped(self, trial: Trial) -> Membership:
        base = self._base
        for band, brackets in enumerate(base._hyperbands):
            for index, bracket in enumerate(brackets):
                if bracket is not None and trial in bracket._live_trials:
                    name = f"band{band}/bracket{index}/rung{bracket._halves}"
                    # Whatever time_attr counts, brackets are compared in it.
                    tail = max(0.0, base._max_t_attr - bracket._cumul_r)
                    target = iteration_at(trial, base._time_attr, bracket._cumul_r)
                    return Membership(name, True, target, tail, self._rungs(trial, bracket))
        return super().mapped(trial)

    def _rungs(self, trial: Trial, bracket: Any) -> tuple[tuple[int, float], ...]:
        """The rungs that the bracket has yet to fill, as `successive_halving` will; none while nobody can tell."""
        attribute, until = self._base._time_attr, bracket._cumul_r
        trials, ends = min(bracket._n, len(bracket._live_trials)), [iteration_at(trial, attribute, until)]
        counts = []
        for _ in range(bracket._halves):
            trials, until = math.ceil(trials / bracket._eta), int(min(until * bracket._eta, bracket._max_t_attr))
            counts.append(trials)
            ends.append(iteration_at(trial, attribute, until))
        known = [end for end in ends if end is not None]
        steps = [after - before for before, after in pairwise(known)]
        return tuple(zip(counts, steps, strict=True)) if len(known) == len(ends) else ()

    def promoted(self) -> list[Trial]:
        # HyperBand chooses one trial at a time and keeps choosing it until it runs; the rest of the rung
        # would stay hidden from a planner that wants to see the whole group.
        return [
            trial
            for bracket in self._brackets()
            for trial in bracket.current_trials()
            if trial.status == Trial.PAUSED and trial in bracket.trials_to_unpause
        ]

    def overlooked(self) -> list[Trial]:
        # A bracket's last result stops those of its trials that are paused by then. One that is still saving for
        # its pause is paused a moment later, and the job would wait for it for ever.
        return [
            trial
            for bracket in self._brackets()
            if bracket.finished()
            for trial in bracket.current_trials()
            if trial.status == Trial.PAUSED
        ]

    def _brackets(self) -> Iterator[Any]:
        return (bracket for brackets in self._base._hyperbands for bracket in brackets if bracket is not None)
