"""Which trials have passed a limit of time that the user has set for each. Pure: the time is handed in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class TrialLimits:
    """``total``: seconds that a trial may hold devices; ``stall``: that one iteration may take; None: no limit."""

    def __init__(self, total: float | None, stall: float | None) -> None:
        self._total, self._stall = total, stall
        self.set = total is not None or stall is not None
        #: Seconds that each trial has held devices, up to the last look.
        self._held: dict[str, float] = {}
        self._looked: float | None = None

    def passed(self, now: float, placed: Iterable[str], asked: Mapping[str, float]) -> dict[str, str]:
        """The trials that have passed a limit, each with the reason, in words.

        ``placed``: trials that hold devices now. ``asked``: since when (``now``'s clock) each computes its iteration.
        """
        since, self._looked = self._looked, now
        found = {}
        for trial in placed:
            self._held[trial] = self._held.get(trial, 0.0) + (0.0 if since is None else now - since)
            if self._total is not None and self._held[trial] > self._total:
                found[trial] = f"it has held devices for more than trial_timeout_s={self._total:g} seconds"
            elif self._stall is not None and now - asked.get(trial, now) > self._stall:
                found[trial] = f"it has reported nothing for more than stall_timeout_s={self._stall:g} seconds"
        return found

    def forget(self, trial: str) -> None:
        """The trial has ended, or begins another attempt."""
        self._held.pop(trial, None)
