"""Which trials take too long: by how long their own iterations and those of others took before, or by a user's limit.

It decides which trials to name or to end. A silent trial keeps its devices, because a slow iteration is not a wrong
one. One that has passed a limit is ended. Pure: the time is handed in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: A silence shorter than this is never named, seconds.
LEAST_S = 60.0
#: A trial is silent when its iteration takes this many times as long as its longest one before.
TIMES = 10.0
#: A trial that a user stops ends at its next result, or when it has been silent for this long, seconds. Judgement: a
#: user waits for it.
STOPPED_S = 30.0
#: A silence shorter than this is not named while no trial of the job has reported anything, seconds.
FIRST_S = 600.0


@dataclass(frozen=True)
class SilentTrial:
    """``seconds``: since its iteration was asked for. ``usual``: seconds of its longest one before; None: none yet."""

    trial: str
    seconds: float
    usual: float | None


class StallDetector:
    """Keeps which trials were asked for an iteration and have not answered, and how long each has held devices.

    ``total``: seconds that a trial may hold devices; ``stall``: that one iteration may take; None: no limit.
    """

    def __init__(self, total: float | None = None, stall: float | None = None) -> None:
        self._total, self._stall = total, stall
        self.has_limits = total is not None or stall is not None
        #: Seconds that each trial has held devices, up to the last look at these.
        self._held: dict[str, float] = {}
        self._looked: float | None = None
        #: Trial -> when the iteration was asked for that it has not reported.
        self.asked: dict[str, float] = {}
        #: The longest iteration of each trial, and of any trial, seconds.
        self._longest: dict[str, float] = {}
        self._longest_of_any: float | None = None
        #: Trials that were named and are still silent, in the order named (values are unused).
        self.silent: dict[str, None] = {}

    def iteration_asked(self, trial: str, now: float) -> None:
        """The trial's next iteration begins."""
        self.asked[trial] = now

    def iteration_done(self, trial: str, seconds: float) -> None:
        """The trial reported an iteration that took ``seconds``."""
        self.stop_watching(trial)
        self._longest[trial] = max(seconds, self._longest.get(trial, 0.0))
        self._longest_of_any = max(seconds, self._longest_of_any or 0.0)

    def stop_watching(self, trial: str) -> None:
        """No report is expected any more: the trial has reported, was taken back by Tune or lost its worker."""
        self.asked.pop(trial, None)
        self.silent.pop(trial, None)

    def forget(self, trial: str) -> None:
        """The trial has ended for good, or begins another attempt."""
        self.stop_watching(trial)
        self._longest.pop(trial, None)
        self._held.pop(trial, None)

    def passed(self, now: float, placed: Iterable[str]) -> dict[str, str]:
        """The trials that have passed a limit, each with the reason, in words. ``placed``: those that hold devices."""
        since, self._looked = self._looked, now
        found = {}
        for trial in placed:
            self._held[trial] = self._held.get(trial, 0.0) + (0.0 if since is None else now - since)
            if self._total is not None and self._held[trial] > self._total:
                found[trial] = f"it has held devices for more than trial_timeout_s={self._total:g} seconds"
            elif self._stall is not None and now - self.asked.get(trial, now) > self._stall:
                found[trial] = f"it has reported nothing for more than stall_timeout_s={self._stall:g} seconds"
        return found

    def quiet(self, trials: Iterable[str], now: float) -> set[str]:
        """Those of the trials whose iteration has taken longer than `STOPPED_S` and than each one before."""
        limits = {trial: max(STOPPED_S, self._longest.get(trial, 0.0)) for trial in trials}
        return {trial for trial, limit in limits.items() if now - self.asked.get(trial, now) > limit}

    def newly_silent(self, now: float) -> list[SilentTrial]:
        """The trials to name now. Each silence is named once."""
        out = []
        for trial, since in self.asked.items():
            usual = self._longest.get(trial, self._longest_of_any)
            limit = FIRST_S if usual is None else max(LEAST_S, TIMES * usual)
            if trial not in self.silent and now - since > limit:
                out.append(SilentTrial(trial, now - since, usual))
        self.silent.update(dict.fromkeys(one.trial for one in out))
        return out
