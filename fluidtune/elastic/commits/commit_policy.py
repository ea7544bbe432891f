"""What a trial commits and when, and what it goes on from.

A leader offers a commit at every boundary at which something was done since the last one; the store decides whether
that is worth its price. A trial that brings its own state (`fluidtune.elastic.hvd`) commits what that state has saved.
A follower knows what its leader has saved, so that it can commit this in place of a leader that died.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..errors import GroupLost
from ..random_streams import Streams
from .commit_store import Commit, CommitStore
from .committable import CommittableState, TrialPosition


class CommitPolicy:
    """Belongs to one `ElasticSession`, whose parameters of the same names are explained there.

    One thing: what a trial goes on from says what it has to commit next.
    """

    def __init__(
        self,
        trial: str,
        leader: bool,
        store: CommitStore | None,
        *,
        resume: Commit | None,
        fingerprint: str,
        note: Callable[[], Any] | None,
        brief: Callable[[Any], Any] | None,
        rewind: Callable[[Any], None] | None,
        streams: Streams | None,
    ) -> None:
        if resume is not None and resume.fingerprint != fingerprint:
            raise ValueError(
                f"the commit of trial {trial} was made with configuration {resume.fingerprint!r}, not "
                f"{fingerprint!r}: start the trial without it"
            )
        #: The random streams with which the trial's code began.
        self.streams = streams
        #: The commit to go on from, until the loop has done so.
        self.resume = resume
        #: The loop was given a newer state than ``resume``.
        self.resume_is_older = False
        #: A loop was passed over, as ``resume`` is of a later one.
        self._passed_over = False
        #: The trial's state says itself what is to be committed (`save`).
        self.saves_itself = False
        #: Why no other process could go on from the newest boundary, nor from one that follows.
        self._obstacle: str | None = None
        self._trial, self._leader, self._store = trial, leader, store
        self._fingerprint, self._note, self._brief, self._rewind = fingerprint, note, brief, rewind
        #: What a state that saves itself has saved last, and the last such save that is in the store.
        self._saved: Commit | None = None
        self._stored: Commit | None = None
        #: Follower: the last save of which it knows what the leader had reported.
        self._inherited: Commit | None = None
        self._last_iteration = 0 if resume is None else resume.iteration  # of the last commit

    # -- what to go on from --

    def forget_resume(self) -> None:
        self.resume, self._last_iteration = None, 0

    def load_commit(self, state: CommittableState) -> None:
        """Put ``resume`` into the live objects before the loop has begun, unless these are newer."""
        if self.resume is not None and not self.resume_is_older:
            state.load(self.resume.state, with_streams=True)

    def refuse_unreached(self) -> None:
        """The trial's code has ended: loops are told apart by their order, and it may have run another one first.

        Raises:
            GroupLost: it has run no epoch of a loop, for a commit of a later one to which it has not come. It begins
                anew, without this commit.
        """
        if self.resume is not None and self._passed_over:
            self.discard()
            raise GroupLost(
                f"the commit is of the loop of number {self.resume.loop + 1}, which this run has not come to: the "
                "trial begins without it (call elastic.epochs() also for a loop that is done: start == stop)"
            )

    # -- what to commit --

    def first_epoch(self, position: TrialPosition, state: CommittableState, start: int) -> int | None:
        """The epoch at which the leader's loop begins, with the commit's state if that is the newer one.

        None: the trial is past this loop. ``start``: the epoch that the loop's own state has reached, if it counts.
        """
        if self.resume_is_older:
            self.resume = None
        commit = self.resume
        if commit is None:
            return start
        if commit.loop > position.loop:
            self._passed_over = True
            return None
        self.resume = None
        if start > commit.epoch:
            position.iteration = commit.iteration + start - commit.epoch
            return start
        state.load(commit.state, with_streams=True)
        return commit.epoch

    def offer(self, position: TrialPosition, state: CommittableState, *, force: bool = False) -> None:
        """Leader: a boundary, at which the store may take a commit. ``force``: it must."""
        if not self._leader or self._store is None:
            return
        if self.saves_itself:
            saved = self._saved
            if saved is not None and saved is not self._stored and self._store.offer(lambda: saved, force=force):
                self._stored = saved
            return
        if position.iteration == self._last_iteration and not force:  # nothing was done since
            return
        if state.obstacle() is not None:  # an older commit is better than one that no process can go on from
            self._obstacle = state.obstacle(lasting=True)
            return
        self._obstacle = None
        if self._store.offer(lambda: self._snapshot(position, state), force=force):
            self._last_iteration = position.iteration

    @property
    def cannot(self) -> str | None:
        """Why there is no commit of what was done last, and will be none, in a line; None: nothing is known of that."""
        return self._obstacle or (None if self._store is None else self._store.trouble)

    def discard(self) -> None:
        """No commit is to be gone on from."""
        if self._store is not None:
            self._store.discard()

    def flush(self) -> None:
        if self._store is not None:
            self._store.flush()

    def save(self, position: TrialPosition, state: CommittableState) -> None:
        """What ``state`` has saved now is what later boundaries commit, and what `note_of_save` is about."""
        self._saved = self._snapshot(position, state)

    def _snapshot(self, position: TrialPosition, state: CommittableState) -> Commit:
        return Commit(
            trial=self._trial,
            fingerprint=self._fingerprint,
            loop=position.loop,
            epoch=position.epoch,
            iteration=position.iteration,
            state=state.capture(),
            note=self._note() if self._note is not None else None,
            streams=self.streams,
        )

    # -- when a worker dies --

    def note_of_save(self) -> Any:
        """Leader: what followers must know of the last `save` to commit it in the leader's place; None: nothing."""
        return self._brief(self._saved.note) if self._saved is not None and self._brief is not None else None

    def inherit(self, note: Any) -> None:
        """Follower: its last `save` is that of the leader, who sent this note with its order."""
        if self._saved is not None:
            self._inherited = replace(self._saved, note=note)

    def commit_inherited(self) -> None:
        """Follower: commit in place of the leader, which is gone, what was saved before its last order."""
        inherited = self._inherited
        if self._store is not None and inherited is not None:
            self._store.offer(lambda: inherited, force=True)
            self._store.flush()

    def rewind(self) -> None:
        """Leader: tell the host that the trial goes on from the last `save`."""
        if self._rewind is not None and self._saved is not None:
            self._rewind(self._saved.note)
