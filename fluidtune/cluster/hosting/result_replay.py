"""Which results a trial's commits keep, and how no result is reported twice or lost when a trial moves.

A commit contains the number of iterations reported so far, and the latest results. The worker that hosts the trial next
goes on from the newest commit from which nothing is lost. First it gives Tune the results that Tune has missed (because
its driver died before it had saved them). Then it runs the iterations that Tune has seen since the commit or the
checkpoint again, without reporting them again: either says how many iterations it has. A trial that has neither begins
anew, and each of its reports is one: it may go on from a file of its own. An iteration that proves the commit is run
again, too (`fluidtune.elastic.commits.proof`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fluidtune.ray_compat.trainable import (
    FILLED_IN,
    RESULT_DUPLICATE,
    SHOULD_CHECKPOINT,
    own_totals,
    set_progress,
    time_total,
)

if TYPE_CHECKING:
    from ray.tune import Trainable

    from fluidtune.elastic import Commit

#: A commit keeps the results that Tune's state in the run's storage has not, for a driver that dies; at most this many,
#: for a storage that takes no state. Else there are some hundred (`fluidtune.tune.snapshot_pace`). Judgement: some MB.
RESULTS_KEPT = 8192
#: What Tune puts into each result: the trial's parameters, which its next worker has as well.
CONFIG = "config"
#: What a commit leaves out of a result.
_NOT_KEPT = {SHOULD_CHECKPOINT, CONFIG}


@dataclass(frozen=True)
class CommitNote:
    """What a commit keeps for the next worker.

    ``iteration``: iterations reported. ``time_total``: seconds trained. ``results``: the latest (iteration, result).
    ``timesteps_total``, ``episodes_total``: Tune's sums of what the trial says of each iteration; None: it says
    nothing.
    """

    iteration: int
    time_total: float
    results: list[tuple[int, dict[str, Any]]]
    timesteps_total: Any = None
    episodes_total: Any = None


class ReportedResults:
    """The reported results of one trial, in the worker that hosts it.

    One thing: which iteration comes next decides what Tune hears of it, and what a commit keeps.

    ``delivered``: the number of iterations that Tune has seen. ``mark``: the fingerprint of the trial's configuration.
    ``repeats``: Tune retries the trial after a failure, and hears of iterations that run again, as under stock Tune.
    ``own_numbers``: the user reports numbers of his own as ``training_iteration``. A checkpoint then does not say how
    many iterations it has, and those after it are reported again.
    """

    def __init__(self, delivered: int, mark: str, repeats: bool = False, own_numbers: bool = False):
        #: The number of iterations that count as reported.
        self.reported = delivered
        #: The latest result in this worker.
        self.last: dict[str, Any] = {}
        #: The trial's trainable, set as soon as it is constructed, and read after that only.
        self.trainable: Trainable
        #: The commit that the trial goes on from.
        self.resume: Commit | None = None
        self._delivered, self._mark = delivered, mark
        self._repeats, self._own_numbers = repeats, own_numbers
        #: The latest (iteration, result), each iteration once.
        self._recent: deque[tuple[int, dict[str, Any]]] = deque(maxlen=RESULTS_KEPT)
        #: Results that the commit has and Tune has missed, to be given to Tune first.
        self._missed: list[tuple[int, dict[str, Any]]] = []
        #: The iteration up to which Tune's state in the run's storage has the results.
        self._stored = 0
        #: What was reported since the last boundary, without what Tune fills in.
        self._since: deque[dict[str, Any]] = deque(maxlen=RESULTS_KEPT)

    # --- while the trial runs

    def keep_result(self, result: dict[str, Any]) -> None:
        """Record the result of the current iteration for later commits; drop recorded results of this or later ones."""
        self._keep(self.trainable.iteration, result)
        self._since.append({k: v for k, v in result.items() if k not in _NOT_KEPT and k not in FILLED_IN})

    def since(self) -> list[dict[str, Any]]:
        """The metrics of each result since this was called last: since the last boundary."""
        found = list(self._since)
        self._since.clear()
        return found

    def _keep(self, iteration: int, result: dict[str, Any]) -> None:
        while self._recent and self._recent[-1][0] >= iteration:
            self._recent.pop()
        self._recent.append((iteration, {k: v for k, v in result.items() if k not in _NOT_KEPT}))

    def drop_stored(self, stored: int) -> None:
        """Tune's state in the run's storage has the results up to iteration ``stored``: no commit needs them."""
        self._stored = stored
        while self._recent and self._recent[0][0] <= stored:
            self._recent.popleft()

    def was_seen(self, result: dict[str, Any]) -> bool:
        """Whether Tune has seen this iteration before. If not, it counts as reported from now on."""
        if RESULT_DUPLICATE in result:
            return False
        if self.trainable.iteration <= self.reported:
            return True
        self.reported, self.last = self.trainable.iteration, result
        return False

    @property
    def proves(self) -> bool:
        """Whether the current iteration only proves the commit: the trial goes on elsewhere."""
        pair = None if self.resume is None else self.resume.pair
        return pair is not None and bool(self.trainable.iteration <= pair[1].note.iteration)

    @property
    def within_reach(self) -> int:
        """The iteration to which a function comes without a report: its own, or that of the commit that it proves."""
        return self.resume.note.iteration if self.proves and self.resume is not None else self.trainable.iteration

    def note(self) -> CommitNote:
        """What every commit contains of the results."""
        seconds, recent = time_total(self.trainable), list(self._recent)
        return CommitNote(self.trainable.iteration, seconds, recent, *own_totals(self.trainable))

    def go_on(self, note: CommitNote) -> None:
        """An iteration that ran again has proved the commits: the loop goes on from the one with this note."""
        self._set_progress(note)
        self._recent.clear()
        self._recent.extend(kept for kept in note.results if kept[0] > self._stored)

    def _set_progress(self, note: CommitNote) -> None:
        set_progress(self.trainable, note.iteration, note.time_total, note.timesteps_total, note.episodes_total)

    # --- after a loss

    def go_on_from(self, kept: Commit | None) -> Commit | None:
        """Go on from this commit, the trial's newest, if it is usable. Returns it; None: it goes on from none."""
        self.resume = kept if kept is not None and self._usable(kept) else None
        return self.resume

    def _usable(self, commit: Commit) -> bool:
        """Whether the commit is of this configuration, and has every result that Tune has missed."""
        if commit.fingerprint != self._mark:
            return False
        kept = [iteration for iteration, _ in commit.note.results if iteration > self._delivered]
        return kept == list(range(self._delivered + 1, commit.note.iteration + 1))

    def begin(self) -> None:
        """Called when the trainable is constructed: go on with the results of the commit, if there is one."""
        if self.resume is not None:
            self._number_on()
            self._recent.extend(kept for kept in self.resume.note.results if kept[0] <= self._delivered)
        if self._repeats or self.resume is None:  # without a checkpoint it begins anew, and reports as under stock Tune
            self._report_from_here()

    def _report_from_here(self) -> None:
        """All iterations that come count as not seen, but for one that proves the commit."""
        self.reported = self.trainable.iteration
        if self.resume is not None and self.resume.pair is not None:
            self.reported = max(self.reported, self.resume.note.iteration)

    def _number_on(self) -> None:
        """Continue the numbering of iterations from the commit. Results that Tune has missed come first."""
        assert self.resume is not None
        self._set_progress(self.resume.starts.note)
        self._missed = [kept for kept in self.resume.note.results if kept[0] > self._delivered]

    def next_missed(self) -> dict[str, Any] | None:
        """The next result that Tune has missed, which counts as reported from now on. None: Tune has them all."""
        if not self._missed:
            return None
        self.reported, result = self._missed.pop(0)
        self._keep(self.reported, result)
        return {**result, CONFIG: self.trainable.config}

    def checkpoint_restored(self) -> bool:
        """Tune has restored a checkpoint of this very trial. Returns whether it is newer than the commit.

        One as old as a commit that must be proved first is as good, and needs no proof.
        """
        newer = False
        if self.resume is not None:
            ahead = self.resume.note.iteration - self.trainable.iteration
            if ahead > 0:
                self._number_on()
            else:
                self._missed = []
                newer = bool(ahead < 0 or self.resume.pair is not None)
        if self._repeats or self._own_numbers:
            self._report_from_here()
        else:  # Tune has seen those up to here, which the checkpoint counts
            self.reported = max(self._delivered, self.trainable.iteration)
        return newer

    def state_replaced(self) -> bool:
        """Tune has given the trial another trial's state (PBT): the results of its old state no longer count.

        Returns whether there was a commit, which is useless now.
        """
        had, self.resume = self.resume is not None, None
        self.reported, self._missed = self.trainable.iteration, []
        return had
