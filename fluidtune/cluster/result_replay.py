"""What a trial has reported: what its commits keep of it, and what Tune has missed of it.

A commit notes where the reports stood, and the latest of them. Whoever hosts the trial next goes on from the newest
commit from which nothing is lost that Tune has not seen: Tune is given first what it missed, because its driver died
before it had saved it, and what it has seen since the commit is run again without being reported again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fluidtune.ray_compat.trainable import RESULT_DUPLICATE, set_progress, time_total

if TYPE_CHECKING:
    from ray.tune import Trainable

    from fluidtune.elastic import Commit, CommitStore

#: How much of what was reported a commit keeps, for a driver that dies before Tune has saved it: Tune saves the
#: experiment's state every ten seconds or so.
RESULTS_KEPT = 512
RESULTS_KEPT_S = 90.0


#: (module, name) of `CommitNote` in commits that older versions have written, to its (module, name) now.
MOVED_NAMES = {
    ("fluidtune.cluster.reports", "Note"): ("fluidtune.cluster.result_replay", "CommitNote"),  # before 2026-11-23
}


@dataclass(frozen=True)
class CommitNote:
    """What a commit keeps for the worker: iterations reported, seconds trained, the latest (iteration, result)."""

    iteration: int
    time_total: float
    results: list[tuple[int, dict[str, Any]]]


def without_results(note: CommitNote) -> CommitNote:
    """Without the results, which only a driver that died has missed."""
    return replace(note, results=[])


class ReportedResults:
    """Of one trial, in the worker that hosts it.

    ``delivered``: iterations that Tune has seen. ``mark``: the fingerprint of its configuration.
    """

    def __init__(self, delivered: int, mark: str):
        #: Iterations that count as reported.
        self.reported = delivered
        #: The latest result in this worker.
        self.last: dict[str, Any] = {}
        #: Set as soon as it is constructed.
        self.trainable: Trainable | None = None
        #: The commit that the trial goes on from.
        self.resume: Commit | None = None
        self._delivered, self._mark = delivered, mark
        #: The latest (iteration, result), each once.
        self._recent: deque[tuple[int, dict[str, Any]]] = deque(maxlen=RESULTS_KEPT)
        #: What a commit has and Tune missed, to be given first.
        self._missed: list[dict[str, Any]] = []

    # --- as it goes

    def keep_result(self, result: dict[str, Any]) -> None:
        """Commits have the result of this iteration from now on, after those of earlier ones."""
        assert self.trainable is not None
        self._keep(self.trainable.iteration, result)

    def _keep(self, iteration: int, result: dict[str, Any]) -> None:
        while self._recent and self._recent[-1][0] >= iteration:
            self._recent.pop()
        self._recent.append((iteration, {k: v for k, v in result.items() if k != "should_checkpoint"}))

    def was_seen(self, result: dict[str, Any]) -> bool:
        """Whether Tune has had this iteration before; if not, it is reported now."""
        assert self.trainable is not None
        if RESULT_DUPLICATE in result:
            return False
        if self.trainable.iteration <= self.reported:
            return True
        self.reported, self.last = self.trainable.iteration, result
        return False

    def note(self) -> CommitNote:
        """What goes into every commit: where the reports stand, and the latest of them."""
        assert self.trainable is not None
        since = time.time() - RESULTS_KEPT_S
        while self._recent and self._recent[0][1].get("timestamp", 0) < since:
            self._recent.popleft()
        return CommitNote(self.trainable.iteration, time_total(self.trainable), list(self._recent))

    def rewind(self, note: CommitNote) -> None:
        """The loop has gone back to where this was noted; what it reports again is not reported to Tune again."""
        assert self.trainable is not None
        set_progress(self.trainable, note.iteration, note.time_total)

    # --- after a loss

    def choose_commit(self, stores: Iterable[CommitStore]) -> Commit | None:
        """The commit to go on from: the leader's own, or that of a follower that outlived it."""
        found = [commit for store in stores if (commit := store.load()) is not None and self._usable(commit)]
        self.resume = max(found, key=lambda commit: commit.iteration, default=None)
        return self.resume

    def _usable(self, commit: Commit) -> bool:
        """The commit is of this configuration, and of an iteration from which nothing that Tune missed is lost."""
        if commit.fingerprint != self._mark:
            return False
        kept = [iteration for iteration, _ in commit.note.results if iteration > self._delivered]
        return kept == list(range(self._delivered + 1, commit.note.iteration + 1))

    def begin(self) -> None:
        """The trainable is there: the commit's reports, if it has any, are its own."""
        if self.resume is not None:
            self._number_on()
            self._recent.extend(kept for kept in self.resume.note.results if kept[0] <= self._delivered)

    def _number_on(self) -> None:
        """Number iterations on from the commit; results that Tune missed are due first."""
        assert self.resume is not None
        self.rewind(self.resume.note)
        self._missed = [result for iteration, result in self.resume.note.results if iteration > self._delivered]

    def next_missed(self) -> dict[str, Any] | None:
        """The next result that Tune missed; None: it has them all. It counts as reported now."""
        if not self._missed:
            return None
        result = self._missed.pop(0)
        self.reported = result["training_iteration"]
        self._keep(self.reported, result)
        return result

    def checkpoint_restored(self) -> bool:
        """Tune has restored a checkpoint of this very trial. Returns whether that is newer than the commit."""
        assert self.trainable is not None
        if self.resume is None:
            return False
        if self.resume.note.iteration > self.trainable.iteration:
            self._number_on()
            return False
        self._missed = []
        return bool(self.resume.note.iteration < self.trainable.iteration)

    def state_replaced(self) -> bool:
        """Tune has given the trial another one's state (PBT): what it saw of the old one does not count.

        Returns whether there was a commit, which is of no use any more.
        """
        assert self.trainable is not None
        had, self.resume = self.resume is not None, None
        self.reported, self._missed = self.trainable.iteration, []
        return had
