"""What a trial commits and when, and what it goes on from.

A trial offers a commit at every boundary at which something was done since the last one; the store decides whether that
is worth its price. Until the trial's commits are proved (`proof`), the boundary after one that was taken is taken as
well, at any price, so that the two are a pair. A restarted trial takes the first state of the pair, runs one epoch, of
which nobody hears, and compares what it has made. Then it goes on from the newest commit, or begins anew.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fluidtune.error_lines import failure

from ..data.trial_state import TrialState
from ..errors import BeginsAnew
from ..random_streams import Streams
from .carried import Carried
from .commit_store import Commit, CommitStore, Marks, is_trusted
from .proof import Epoch, differences, machine

#: Errors that say nothing of what a commit holds.
_LACK = (MemoryError, torch.OutOfMemoryError)
#: How many variables of the loop a message names.
_NAMED = 6


@dataclass
class TrialPosition:
    """How far the trial is; ``loop``, ``epoch`` and ``iteration`` as in a `Commit`, -1: no loop has begun."""

    loop: int
    epoch: int
    iteration: int


@dataclass
class CommitPolicy:
    """Belongs to one `ElasticSession`, whose parameters of the same names are explained there.

    One thing: what a trial goes on from says what it has to commit next.
    """

    trial: str
    store: CommitStore | None
    state: TrialState
    device: torch.device
    #: The commit to go on from, until the loop has done so.
    resume: Commit | None
    fingerprint: str
    note: Callable[[], Any]
    rewind: Callable[[Any], None]
    reports: Callable[[], list[dict[str, Any]]]
    divided: Callable[[], bool]
    #: The random streams with which the trial's code began.
    streams: Streams | None
    #: The loop was given a newer state than ``resume``.
    resume_is_older: bool = False
    #: The newest commit, while the epoch between its pair runs again.
    _tried: Commit | None = None
    _carried: Carried | None = None
    #: A loop was passed over, as ``resume`` is of a later one.
    _passed_over: bool = False
    #: Why no other process could go on from the newest boundary, nor from one that follows.
    _obstacle: str | None = None
    #: What was reported since the last boundary, and what has computed it.
    _reported: list[dict[str, Any]] = field(default_factory=list)
    _machine: str = ""
    _life: str = field(default_factory=lambda: uuid.uuid4().hex)
    #: The loop and the iteration of the last commit that was made here; those whose commit completes its pair.
    _made: tuple[int, int] | None = None
    _second: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        resume = self.resume
        if resume is not None and resume.fingerprint != self.fingerprint:
            raise ValueError(
                f"the commit of trial {self.trial} was made with configuration {resume.fingerprint!r}, not "
                f"{self.fingerprint!r}: start the trial without it"
            )
        self._last_iteration = 0 if resume is None else resume.iteration  # of the last commit
        self._proved = 0 if resume is None else resume.proved

    # -- what to go on from --

    def forget_resume(self) -> None:
        self.resume, self._last_iteration, self._proved = None, 0, 0
        if self.store is not None:
            self.store.forget()

    def load_commit(self) -> None:
        """Put the commit's state into the live objects before the loop has begun, unless these are newer."""
        if self.resume is not None and not self.resume_is_older:
            self._load(self.resume.starts)

    def refuse_unreached(self) -> None:
        """The trial's code has ended.

        Raises:
            BeginsAnew: it has run no epoch of a loop, for a commit of a later one to which it has not come (loops are
                told apart by their order, and it may have run another one first); or it has ended in an epoch that was
                run again, and went on before.
        """
        if self._tried is not None:
            raise self._anew("ends the loop, which went on before")
        if self.resume is not None and self._passed_over:
            if self.store is not None:
                self.store.discard()
            raise BeginsAnew(
                f"the commit is of the loop of number {self.resume.starts.loop + 1}, which this run has not come to: "
                "the trial begins without it (call elastic.epochs() also for a loop that is done: start == stop)"
            )

    def first_epoch(self, position: TrialPosition, start: int, carried: Carried | None) -> int | None:
        """The epoch at which the loop begins, with the commit's state if that is the newer one.

        None: the trial is past this loop. ``start``: the epoch that the loop's own state has reached, if it counts.
        """
        if self._tried is not None:
            raise self._anew("leaves the loop, which went on before")
        self._look_back()  # what was before the loop is no epoch's
        self._carried = None if self.store is None else carried
        if self._carried is not None:
            self._carried.begin(self.state.objects)
        if self.resume_is_older:
            self.resume = None
        commit = self.resume
        if commit is None:
            return start
        first = commit.starts
        if first.loop > position.loop:
            self._passed_over = True
            return None
        self.resume = None
        if commit.loop == position.loop and start > commit.epoch:
            position.iteration = commit.iteration + start - commit.epoch
            if first is not commit:
                self.rewind(commit.note)
            return start
        position.iteration = first.iteration
        if first is not commit:
            self._tried = commit
        self._load(first)
        return first.epoch

    def _load(self, commit: Commit) -> None:
        """Raises `BeginsAnew` where the state does not fit the live objects."""
        try:
            self.state.load(commit.state)
        except _LACK:
            raise
        except Exception as error:
            what = f"the commit before epoch {commit.epoch} does not fit what the loop has prepared"
            raise self._refused(what, failure(error)) from error

    # -- the proof --

    def epoch_done(self, position: TrialPosition) -> bool:
        """A boundary after an epoch. Returns whether the loop goes on elsewhere: ``position`` says where then.

        Raises:
            BeginsAnew: the epoch was run again, and has made something else.
        """
        self._look_back()
        if self._tried is None:
            return False
        newest = self._tried
        assert newest.pair is not None
        first, second = newest.pair
        read = self.state.readable
        then = Epoch(read(first.state), read(second.state), second.reports)
        exact = bool(self._machine) and self._machine == second.machine
        found = differences(self.state.now(), self._reported, then, self.state.names, exact)
        apart = [] if self._carried is None else self._marks().apart(second.marks, exact)
        if found is not None or apart:
            raise self._anew(found or "ends with other values of the loop's own", apart)
        self._tried, self._proved = None, second.iteration
        if self.store is not None:
            self.store.note_proved(self.fingerprint, second.iteration)
        if newest is second:
            return False
        self.rewind(newest.note)
        position.epoch, position.iteration = newest.epoch, newest.iteration
        if newest.loop > position.loop:
            self.resume = replace(newest, pair=None)
        else:
            self._load(newest)
        return True

    def _look_back(self) -> None:
        self._reported, self._machine = self.reports(), machine(self.device, self.divided())

    def unproved_by(self, error: BaseException | None) -> str | None:
        """The loop has raised ``error``, or has reported more than the trial did: why it begins anew, if it was the
        epoch that was run again. None: the trial was itself.
        """
        if self._tried is None or isinstance(error, _LACK):
            return None
        return str(self._anew("reports more than it did before" if error is None else f"raises {failure(error)}"))

    def _marks(self) -> Marks:
        return Marks() if self._carried is None else self._carried.marks(self.state.objects)

    def _anew(self, what: str, names: Sequence[str] = ()) -> BeginsAnew:
        assert self._tried is not None and self._tried.pair is not None
        seen = f" ({', '.join(names[:_NAMED])})" if names else ""
        return self._refused(
            f"epoch {self._tried.pair[0].epoch} run again from its commit {what}",
            f"keep what the loop carries from epoch to epoch{seen} in elastic.state() or elastic.prepare()",
        )

    def _refused(self, what: str, remedy: str) -> BeginsAnew:
        self._tried = None
        why = f"{what}: {remedy}"
        if self.store is not None:
            self.store.refuse(self.fingerprint, why)
        return BeginsAnew(f"{why}. The trial begins anew, and has no commits")

    # -- what to commit --

    def offer(self, position: TrialPosition, *, force: bool = False) -> None:
        """A boundary, at which the store may take a commit. ``force``: it must."""
        store = self.store
        # At a boundary where nothing was done since, another process gets by itself, or from the commit before.
        if store is None or self._tried is not None or position.iteration == self._last_iteration:
            return
        if store.refused is not None:
            return
        self._obstacle = self.state.obstacle()
        if self._obstacle is not None:  # an older commit is better than one that no process can go on from
            return
        here = (position.loop, position.iteration)
        paired = not is_trusted(position.iteration, self._proved)
        second = self._made == (position.loop, position.iteration - 1)
        wanted = paired and here == self._second
        if store.offer(lambda: self._snapshot(position, paired), force=force or wanted, times=2 if paired else 1):
            self._last_iteration, self._made = position.iteration, here
            self._second = None if second else (position.loop, position.iteration + 1)

    @property
    def cannot(self) -> str | None:
        """Why there is no commit of what was done last, and will be none, in a line; None: nothing is known of that."""
        return self._obstacle or (None if self.store is None else self.store.refused or self.store.trouble)

    def flush(self) -> None:
        if self.store is not None:
            self.store.flush()

    def _snapshot(self, position: TrialPosition, paired: bool) -> Commit:
        return Commit(
            trial=self.trial,
            fingerprint=self.fingerprint,
            loop=position.loop,
            epoch=position.epoch,
            iteration=position.iteration,
            state=self.state.capture(),
            note=self.note(),
            streams=self.streams,
            life=self._life,
            reports=self._reported,
            machine=self._machine,
            marks=self._marks() if paired else Marks(),
        )
