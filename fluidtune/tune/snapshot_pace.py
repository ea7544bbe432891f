"""Which results Tune's state in the run's storage has, and when Tune is to save it besides its own times.

A driver that dies has told nobody of a trial's results since that state. A commit without one of them cannot be used,
and the trial begins anew. So commits keep all of them, and each call for an iteration tells the worker which ones it
may drop. Tune saves once in 10 s, or as seldom as the user says, as a large run or a slow storage has it. A trial may
report hundreds of results meanwhile, so Tune is asked to save before these make its commits large. It is also asked to
when something happens that only a snapshot keeps, such as a new trial (`search_memory`) or the end of one that has
commits, which stay until then (`snapshots`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

#: Results of one trial, and seconds, after which Tune is asked to save. Judgement: a commit of some hundred KB; and a
#: save costs nothing that shows once in so many seconds.
MOST_RESULTS, MOST_S = 512, 45.0
#: Saves that are asked for because of news take at most one part in so many of the time, as Tune's own do.
ONE_PART_IN = 20


class SnapshotPace:
    """Up to where Tune's state goes, by the results of trials.

    ``known``: up to which iteration the state that Tune has just written has the results of each trial. ``clock``:
    seconds.
    """

    def __init__(self, known: Callable[[], Mapping[str, int]], clock: Callable[[], float] = time.monotonic):
        self._known, self._clock = known, clock
        self._saved_at = clock()
        #: There is news, and how many seconds the driver was busy with the save before.
        self._news, self._took = False, 0.0
        #: A state is on its way into the storage. Tune would wait for it before it saves another one.
        self._on_its_way = False
        #: By trial, its results since then.
        self._since: Counter[str] = Counter()
        #: What was known in the state that the storage has, and in the one that Tune has written last.
        self._stored: Mapping[str, int] = {}
        self._written: Mapping[str, int] = {}

    def result_reported(self, trial: str) -> None:
        """A trial that has commits has reported a result."""
        self._since[trial] += 1

    def news_came(self) -> None:
        """Something has happened that only a snapshot keeps."""
        self._news = True

    def saved(self, seconds: float) -> None:
        """A save that was due has taken the driver so long."""
        self._took = seconds

    def state_written(self) -> Callable[[bool], None]:
        """Tune has written its state, and begins to bring it into the run's storage.

        Call the result when it is there, or with False when the storage cannot take it. Another thread may do so.
        """
        self._saved_at, self._on_its_way = self._clock(), True
        self._since.clear()
        self._news = False
        written = self._written = self._known()

        def stored(done: bool) -> None:
            if done:
                self._stored = written
            self._on_its_way = False

        return stored

    def results_stored(self, trial: str) -> int:
        """Up to which iteration neither the state in the storage nor the one on its way misses the trial's results.

        The one on its way has fewer of them where the trial got another one's state meanwhile (PBT), or began again
        after a failure. One that is written later has all that the trial's worker has reported by now.
        """
        return min(self._stored.get(trial, 0), self._written.get(trial, 0))

    def is_due(self, pausing: bool = False) -> bool:
        """Whether Tune is to save its state now. ``pausing``: a trial is about to be paused; news waits for that."""
        if self._on_its_way:
            return False
        passed = self._clock() - self._saved_at
        if self._news and not pausing and passed >= (ONE_PART_IN - 1) * self._took:
            return True
        return bool(self._since) and (passed >= MOST_S or max(self._since.values()) >= MOST_RESULTS)
