"""HyperBand, and HyperBandForBOHB, which is synchronous BOHB with `TuneBOHB` as its searcher."""

from __future__ import annotations

import math
from itertools import pairwise

from ray.tune.experiment import Trial

from fluidtune.ray_compat.schedulers import Bracket, brackets, hyperband_limit, time_attribute
from fluidtune.tune.groups.adapter import Adapter, Membership
from fluidtune.tune.groups.budgets import iteration_at


class HyperBandAdapter(Adapter):
    """A batch for every rung of every bracket."""

    synchronous = True

    def mapped(self, trial: Trial) -> Membership:
        for bracket in brackets(self._base):
            if bracket.holds(trial):
                name = f"band{bracket.band}/bracket{bracket.index}/rung{bracket.halvings_left}"
                # Whatever time_attr counts, brackets are compared in it.
                tail = max(0.0, hyperband_limit(self._base) - bracket.rung_end)
                target = iteration_at(trial, time_attribute(self._base), bracket.rung_end)
                return Membership(name, True, target, tail, self._rungs(trial, bracket))
        return super().mapped(trial)

    def _rungs(self, trial: Trial, bracket: Bracket) -> tuple[tuple[int, float], ...]:
        """The rungs that the bracket has yet to fill, as `successive_halving` will; none while nobody can tell."""
        attribute, until, factor = time_attribute(self._base), bracket.rung_end, bracket.reduction_factor
        trials, ends = bracket.competing, [iteration_at(trial, attribute, until)]
        counts = []
        for _ in range(bracket.halvings_left):
            trials, until = math.ceil(trials / factor), int(min(until * factor, bracket.limit))
            counts.append(trials)
            ends.append(iteration_at(trial, attribute, until))
        known = [end for end in ends if end is not None]
        steps = [after - before for before, after in pairwise(known)]
        return tuple(zip(counts, steps, strict=True)) if len(known) == len(ends) else ()

    def promoted(self) -> list[Trial]:
        # HyperBand chooses one trial at a time and keeps choosing it until it runs; the rest of the rung
        # would stay hidden from a planner that wants to see the whole group.
        return [trial for bracket in brackets(self._base) for trial in bracket.promoted()]

    def overlooked(self) -> list[Trial]:
        # A bracket's last result stops those of its trials that are paused by then. One that is still saving for
        # its pause is paused a moment later, and the job would wait for it for ever.
        return [trial for bracket in brackets(self._base) for trial in bracket.left_over()]
