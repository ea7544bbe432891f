"""HyperBand and HyperBandForBOHB. The latter, with `TuneBOHB` as its searcher, is synchronous BOHB."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from ray.tune.experiment import Trial

from fluidtune.ray_compat.schedulers import Bracket, brackets, make_missed_halvings, time_attribute
from fluidtune.tune.groups.adapter import Adapter, Membership
from fluidtune.tune.groups.budgets import iteration_at


class HyperBandAdapter(Adapter):
    """One batch for each rung of each bracket."""

    synchronous = True
    waits_for_checkpoints = False
    no_keep = "HyperBand decides by who is left in a bracket when the bracket is halved next, and it would change that"

    def mapped(self, trial: Trial) -> Membership:
        for bracket in brackets(self._base):
            if bracket.holds(trial):
                name = f"band{bracket.band}/bracket{bracket.index}/rung{bracket.halvings_left}"
                # The tail is in units of time_attr, which need not be iterations: all brackets are compared in them.
                tail = max(0.0, bracket.limit - bracket.rung_end)
                target = iteration_at(trial, time_attribute(self._base), bracket.rung_end)
                return Membership(name, True, target, tail, self._rungs(trial, bracket))
        return super().mapped(trial)

    def _rungs(self, trial: Trial, bracket: Bracket) -> tuple[tuple[int, float], ...]:
        """Return the rungs that Tune's `successive_halving` will yet fill; none if one of their ends cannot be told."""
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
        # HyperBand chooses one trial, and chooses the same one again until it runs. The engine plans the whole group
        # and must see the rest of the rung, too.
        return [trial for bracket in brackets(self._base) for trial in bracket.promoted()]

    def catch_up(self, controller: Any) -> None:
        make_missed_halvings(self._base, controller)

    def overlooked(self) -> list[Trial]:
        # The last result of a bracket stops those of its trials that are paused at that moment. A trial that is still
        # saving its checkpoint is paused a moment later, and without this the job would wait for it for ever.
        return [trial for bracket in brackets(self._base) for trial in bracket.left_over()]
