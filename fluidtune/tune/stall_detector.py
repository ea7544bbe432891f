"""Trials that stop reporting: which ones are overdue, by what they and the others took before.

Decides only whom to name; a silent trial keeps its devices, because a slow iteration is not a wrong one. Pure: the
time is handed in.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Seconds of silence that are never worth a word, and how often its longest iteration is.
LEAST_S = 60.0
TIMES = 10.0
#: The same while no trial of the job has reported anything: the first iteration may load and compile a lot.
FIRST_S = 600.0


@dataclass(frozen=True)
class Silent:
    """``seconds``: since its iteration was asked for. ``usual``: the longest that one took before, None: none yet."""

    trial: str
    seconds: float
    usual: float | None


class Silence:
    """Keeps who was asked for an iteration and has not answered."""

    def __init__(self) -> None:
        #: Since when each trial owes a result.
        self._asked: dict[str, float] = {}
        #: The longest iteration of each trial, and of any.
        self._longest: dict[str, float] = {}
        self._any: float | None = None
        #: Those that were named and are silent still.
        self.named: dict[str, None] = {}

    def asked(self, trial: str, now: float) -> None:
        """Its next iteration begins."""
        self._asked[trial] = now

    def heard(self, trial: str, seconds: float) -> None:
        """It took so long."""
        self.gone(trial)
        self._longest[trial] = max(seconds, self._longest.get(trial, 0.0))
        self._any = max(seconds, self._any or 0.0)

    def gone(self, trial: str) -> None:
        """It owes nothing any more: it has reported, was taken back or lost its worker."""
        self._asked.pop(trial, None)
        self.named.pop(trial, None)

    def overdue(self, now: float) -> list[Silent]:
        """Those to be named now; each once for every silence."""
        out = []
        for trial, since in self._asked.items():
            usual = self._longest.get(trial, self._any)
            limit = FIRST_S if usual is None else max(LEAST_S, TIMES * usual)
            if trial not in self.named and now - since > limit:
                out.append(Silent(trial, now - since, usual))
        self.named.update(dict.fromkeys(one.trial for one in out))
        return out
