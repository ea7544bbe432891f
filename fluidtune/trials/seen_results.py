"""What Tune has seen of a trial's results, by FluidTune's own count.

The count is what a new leader goes by: iterations that Tune has seen run again without being reported, unless Tune
retries the trial after a failure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class SeenResults:
    """See the module."""

    #: The trainable's own count of iterations at the newest result that Tune has seen.
    delivered: int = 0
    #: How many results Tune has seen. More than ``delivered`` where iterations were reported again after a failure.
    results: int = 0
    #: ``training_iteration`` of the newest result, as the trial reports it: not a count where the user sets it.
    number: Any = 0
    #: The user reports numbers of his own as ``training_iteration``.
    own_numbers: bool = False
    #: Tune retries the trial after a failure: iterations that run again are reported again, as under stock Tune.
    retried: bool = False

    def note_result(self, iteration: int, number: Any) -> dict[str, Any]:
        """The leader has a result. ``iteration``: the trainable's own count; ``number``: its ``training_iteration``.

        Returns what is to be kept with the trial when Tune gets the result.
        """
        self.delivered, self.number = iteration, number
        self.results += 1
        self.own_numbers = self.own_numbers or number != iteration
        self.retried = False
        return {"delivered": iteration, "results": self.results, "own_numbers": self.own_numbers}

    def iterations_to(self, target: float | None, checkpoint: Any) -> float | None:
        """How many iterations the trial has left until its ``training_iteration`` is ``target``; None: not known.

        ``checkpoint``: ``training_iteration`` of the newest checkpoint that Tune has, from which a retry goes on; 0 if
        Tune has none.
        """
        if target is None:
            return None
        number = checkpoint if self.retried else self.number
        number = number if isinstance(number, (int, float)) else 0
        step = number / self.delivered if self.own_numbers and self.delivered and number > 0 else 1.0
        return max(0.0, float(target - number) / step)
