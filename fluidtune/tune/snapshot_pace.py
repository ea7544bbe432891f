"""When Tune is to save its state besides its own times: before commits drop results that the last state has not.

A commit has the latest results of its trial, `RESULTS_KEPT` of at most `RESULTS_KEPT_S`. A driver that dies has told
nobody of those since Tune's last state; without one of them the commit cannot be used, and the trial begins anew. Tune
saves once in 10 s, or as seldom as the user says, as a large run or a slow storage has it. A trial may report hundreds
of results meanwhile.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from fluidtune.cluster.hosting.result_replay import RESULTS_KEPT, RESULTS_KEPT_S

#: Half of what commits keep: the other half is for the time that the storage takes.
MOST_RESULTS, MOST_S = RESULTS_KEPT // 2, RESULTS_KEPT_S / 2


class SnapshotPace:
    """How old Tune's last state is, by the results of trials that have commits. ``clock``: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._saved_at = clock()
        #: A state is on its way into the storage. Tune would wait for it before it saves another one.
        self._on_its_way = False
        #: By trial, its results since then.
        self._since: Counter[str] = Counter()

    def result_reported(self, trial: str) -> None:
        """A trial that has commits has reported a result."""
        self._since[trial] += 1

    def state_written(self) -> None:
        """Tune has written its state, and begins to bring it into the run's storage."""
        self._saved_at, self._on_its_way = self._clock(), True
        self._since.clear()

    def state_stored(self) -> None:
        """The storage has the state, or cannot take it. Called in another thread."""
        self._on_its_way = False

    def is_due(self) -> bool:
        """Whether Tune is to save its state now."""
        waited = self._clock() - self._saved_at
        overdue = self._since and (waited >= MOST_S or max(self._since.values()) >= MOST_RESULTS)
        return bool(overdue) and not self._on_its_way
