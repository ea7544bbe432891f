"""Which growths of a job are rehearsed before they happen (`fluidtune.elastic.checks.rehearsal`)."""

from __future__ import annotations

import os

from fluidtune.elastic.checks.verdict import Verdict

#: Set to 1 in the driver's environment, it has every growth rehearsed.
VARIABLE = "FLUIDTUNE_CHECK"


class GrowthChecks:
    """The first growth of the job is; all are with `VARIABLE`, and after one was found to give other gradients."""

    def __init__(self) -> None:
        self._always = os.environ.get(VARIABLE) == "1"
        self._done = False

    def due(self) -> bool:
        """Whether a growth that begins now is to be rehearsed."""
        return self._always or not self._done

    def heard(self, verdict: Verdict) -> None:
        """A rehearsal has ended."""
        self._done = True
        self._always = self._always or verdict.kind == "differs"
