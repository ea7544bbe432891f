"""How long an iteration of a trial that has not run will take, predicted from trials with like hyperparameters.

Two networks of the same width with the same batch size take equally long; their learning rates do not matter. Which
hyperparameters matter is fitted to the measured times: log(seconds) = mean + one effect for each value of each
hyperparameter. An effect is shrunk towards 0 where few trials stand behind it. A hyperparameter of which most trials
have a value of their own is left out.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict

from fluidtune.engine.messages import Traits
from fluidtune.engine.speed import TRIALS_REMEMBERED

#: Each effect is fitted as if this many more trials of the value were measured and showed no effect (ridge regression).
SHRINK = 0.5
#: The effects are fitted again when this many times as many trials were measured.
GROWTH = 1.5
#: Rounds in which the effects of one hyperparameter after the other are fitted.
_SWEEPS = 4


class RuntimePredictor:
    """Seconds per iteration on one worker by hyperparameters, over one tuning job."""

    def __init__(self) -> None:
        #: By hyperparameter: the number of trials that have each value.
        self._values: defaultdict[str, Counter[str]] = defaultdict(Counter)
        #: Traits and log(seconds) of the trials measured last, by trial; at most TRIALS_REMEMBERED.
        self._measured: dict[str, tuple[Traits, float]] = {}
        #: Trials measured in all, and the number of them at which the effects are fitted next.
        self._heard = 0
        self._next_fit = 2.0
        self._mean = 0.0
        #: How often the effects were fitted. As long as it is the same, so are all predictions.
        self.fits = 0
        #: By hyperparameter and value, what is added to the mean.
        self._effects: dict[str, dict[str, float]] = {}

    def add_trial(self, traits: Traits) -> None:
        """A trial of the job has these hyperparameters."""
        for name, value in traits:
            values = self._values[name]
            # One that is drawn from a range has a new value in each trial. Those of ten thousand are of no use.
            if value in values or len(values) <= TRIALS_REMEMBERED:
                values[value] += 1

    def record_seconds(self, trial: str, traits: Traits, seconds: float) -> bool:
        """An iteration of ``trial`` takes ``seconds`` on one worker. Returns whether predictions changed."""
        if not traits or seconds <= 0:
            return False
        self._heard += trial not in self._measured
        self._measured.pop(trial, None)
        self._measured[trial] = (traits, math.log(seconds))
        if len(self._measured) > TRIALS_REMEMBERED:
            del self._measured[next(iter(self._measured))]
        if self._heard < self._next_fit:
            return False
        self._next_fit = math.ceil(self._heard * GROWTH)
        self._fit()
        return True

    def predict(self, traits: Traits) -> float | None:
        """Seconds per iteration on one worker; None while nothing is known about any of these values."""
        known = False
        sum_of_effects = 0.0
        for name, value in traits:
            effects = self._effects.get(name)
            effect = None if effects is None else effects.get(value)
            if effect is not None:
                known = True
                sum_of_effects += effect
        return math.exp(self._mean + sum_of_effects) if known else None

    def _fit(self) -> None:
        self.fits += 1
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
