"""How long an iteration of a trial that has not run will take, from trials that share hyperparameters with it.

A network of the same width with the same batch size takes as long; the learning rate says nothing. Which is which
is read off what was measured: log seconds = mean + one effect for each value of each hyperparameter, shrunk towards
none where few trials stand behind it. A hyperparameter that most trials have a value of their own for is left out.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict

from fluidtune.engine.messages import Traits

#: An effect is taken to stand behind so many more trials that show none.
SHRINK = 0.5
#: Fitted anew when so many times as many trials were measured.
GROWTH = 1.5
#: Trials remembered; the one heard of longest ago goes first.
REMEMBERED = 101
_SWEEPS = 4


class Likeness:
    """Seconds per iteration on one worker by hyperparameters, over one tuning job."""

    def __init__(self) -> None:
        #: By hyperparameter: how many trials have each value.
        self._values: defaultdict[str, Counter[str]] = defaultdict(Counter)
        #: Log seconds of the trials measured last.
        self._measured: dict[str, tuple[Traits, float]] = {}
        self._heard = 0
        self._next_fit = 2.0
        self._mean = 0.0
        self._effects: dict[str, dict[str, float]] = {}

    def add(self, traits: Traits) -> None:
        """A trial of the job has these."""
        for name, value in traits:
            self._values[name][value] += 1

    def record(self, trial: str, traits: Traits, seconds: float) -> bool:
        """``trial`` takes so long. True if estimates changed."""
        if not traits or seconds <= 0:
            return False
        self._heard += trial not in self._measured
        self._measured.pop(trial, None)
        self._measured[trial] = (traits, math.log(seconds))
        if len(self._measured) > REMEMBERED:
            del self._measured[next(iter(self._measured))]
        if self._heard < self._next_fit:
            return False
        self._next_fit = math.ceil(self._heard * GROWTH)
        self._fit()
        return True

    def estimate(self, traits: Traits) -> float | None:
        """Seconds per iteration; None while nothing is known about any of these values."""
        known = [effects[value] for name, value in traits if value in (effects := self._effects.get(name, {}))]
        return math.exp(self._mean + sum(known)) if known else None

    def _fit(self) -> None:
        rows = [(dict(traits), y) for traits, y in self._measured.values()]
        self._mean = sum(y for _, y in rows) / len(rows)
        names = [name for name, values in self._values.items() if 1 < len(values) <= values.total() / 2]
        self._effects = {name: {} for name in names}
        for _ in range(_SWEEPS):
            for name in names:
                sums: defaultdict[str, float] = defaultdict(float)
                counts: Counter[str] = Counter()
                for traits, y in rows:
                    if name in traits:
                        others = sum(self._effects[o].get(traits[o], 0.0) for o in names if o != name and o in traits)
                        sums[traits[name]] += y - self._mean - others
                        counts[traits[name]] += 1
                self._effects[name] = {value: sums[value] / (n + SHRINK) for value, n in counts.items()}
