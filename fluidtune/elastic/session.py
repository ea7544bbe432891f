"""The session of one trial in its own process: what its host and its loop call.

The user's loop runs in one thread. The host calls from another thread and only leaves a request (`leave`), which the
loop takes up at its next boundary. At a boundary the trial stops if it was asked to, and commits if that is worth its
price. What is committed and when, and what the trial goes on from, is decided in `commit_policy`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType
from typing import Any

import torch

from fluidtune.group_facts import GroupFacts

from .commits.carried import Carried
from .commits.commit_policy import CommitPolicy, TrialPosition
from .commits.commit_store import Commit, CommitStore
from .data.trial_state import TrialState
from .errors import Left
from .leader_session import LeaderSession
from .random_streams import Streams, complete_streams


class ElasticSession(LeaderSession):
    """The session of a trial, and what a training loop calls of it.

    One thing: it has the methods of a protocol, and those of `elastic` for the loop, and each hands its call on.

    Args:
        trial: names the trial.
        device: where the trial's tensors are ("cpu", "cuda", "cuda:0").
        commits: where the trial commits.
        resume: the commit to go on from, as `CommitStore.load` returned it.
        fingerprint: names the trial's configuration.
        note: returns what the host wants kept with a commit (`Commit.note`), picklable; called for every commit.
        rewind: called in the loop's thread, with the note of the commit from which the trial goes on after a proof.
        reports: returns the metrics of each report since it was called last; called at every boundary.
        divided: returns whether a call of a module was divided since it was called last; called at every boundary.
        owner: returns the class trainable that calls `boundary`; None: there is none.
        streams: the random streams with which the trial's code began (`random_streams`), for commits.
        pickling: a module like `pickle`, for what is no tensor in the trial's state.

    Raises:
        ValueError: ``resume`` was made with another configuration than ``fingerprint`` names.
    """

    def __init__(
        self,
        *,
        trial: str,
        device: str = "cpu",
        commits: CommitStore | None = None,
        resume: Commit | None = None,
        fingerprint: str = "",
        note: Callable[[], Any] = lambda: None,
        rewind: Callable[[Any], None] = lambda note: None,
        reports: Callable[[], list[dict[str, Any]]] = list,
        divided: Callable[[], bool] = lambda: False,
        owner: Callable[[], Any] = lambda: None,
        streams: Streams | None = None,
        pickling: ModuleType = pickle,
    ) -> None:
        self.trial = trial
        self._owner = owner
        where = torch.device(device)
        self._objects = TrialState(where, pickling)
        self._commits = CommitPolicy(
            trial,
            commits,
            self._objects,
            where,
            resume=resume,
            fingerprint=fingerprint,
            note=note,
            rewind=rewind,
            reports=reports,
            divided=divided,
            streams=None if streams is None else complete_streams(streams),
        )
        self._position = TrialPosition(loop=-1, epoch=0, iteration=0 if resume is None else resume.starts.iteration)
        #: The loop has called `prepare`, or has come to a boundary.
        self._elastic = False
        self._leaving = self._committing = False
        #: The exception that ended this loop.
        self._over: Left | None = None
        #: A loop over `epochs` is running; one inside it has no boundaries.
        self._in_epochs = False
        #: For a class trainable, the epoch that its next boundary stands before; None before its first one.
        self._next_step: int | None = None

    # -- the host's side: any thread, never blocks for long --

    def facts(self) -> GroupFacts:
        return GroupFacts(
            is_elastic=self._elastic,
            committing=self._committing,
            cannot_commit=self._commits.cannot,
            streams=self._commits.streams,
        )

    @property
    def iteration(self) -> int:
        """Iterations done, those before a restart included."""
        return self._position.iteration

    def forget_resume(self) -> None:
        self._commits.forget_resume()
        self._position.iteration = 0

    def prefer_checkpoint(self) -> None:
        self._commits.resume_is_older = True

    def load_commit(self) -> None:
        self._commits.load_commit()

    def ended(self) -> None:
        self._commits.refuse_unreached()

    def unproved_by(self, error: BaseException | None) -> str | None:
        return self._commits.unproved_by(error)

    def leave(self) -> None:
        self._leaving = True

    def close(self) -> None:
        """As `LeaderSession`. It waits until the last commit is written."""
        self._commits.flush()
        self._objects.close()

    # -- the loop's side: one thread --

    def prepare(self, *objects: Any) -> tuple[Any, ...]:
        self._elastic = True
        self._objects.add(objects)
        return objects

    def epochs(self, start: int, stop: int, code: CodeType | None = None) -> Iterator[int]:
        """See `elastic.epochs`. ``code``: of the function whose loop it is."""
        if self._in_epochs:
            yield from range(start, stop)
            return
        self._in_epochs = True
        try:
            epoch = self._begin(start, None if code is None else Carried.by_loop(code))
            while epoch is not None and epoch < stop:
                yield epoch
                epoch = self._turn(epoch + 1)
        finally:
            self._in_epochs = False

    def boundary(self, done: int | None = None) -> int:
        """A class trainable's boundary, called before each ``step()``; returns the step's index, from 0.

        ``done``: the iterations that the host counts.

        Raises:
            Left: `leave` was called.
            BeginsAnew: see `LeaderSession.boundary`.
            ValueError: the trial's commit is that of another kind of trainable.
        """
        if self._next_step is None:
            if done is not None:
                self._position.iteration = done
            owner = self._owner()
            step = self._begin(0, None if owner is None else Carried.by_object(owner))
        elif done == self._position.iteration:
            step = self._come_to(self._next_step - 1)
        else:
            step = self._turn(self._next_step)
        if step is None:
            raise ValueError(f"the commit of trial {self.trial} is from another kind of trainable")
        self._next_step = step + 1
        return step

    def _begin(self, start: int, carried: Carried | None) -> int | None:
        """The boundary before a loop's first epoch. Returns the epoch to run; None if the trial is past this loop."""
        self._elastic = True
        self._position.loop += 1
        self._objects.loop_begins()
        first = self._commits.first_epoch(self._position, start, carried)
        return None if first is None else self._come_to(first)

    def _turn(self, epoch: int) -> int | None:
        """The boundary after an iteration; ``epoch`` runs next. Returns the epoch to run; None: one of a later loop."""
        self._position.iteration += 1
        self._position.epoch = epoch
        if self._commits.epoch_done(self._position):
            epoch = self._position.epoch
        reached = self._come_to(epoch)
        return reached if self._commits.resume is None else None

    def _come_to(self, epoch: int) -> int:
        """Raises `Left` if the trial is to stop."""
        if self._over is not None:  # user code may have swallowed it
            raise self._over
        self._position.epoch = epoch
        if self._leaving:
            self._committing = True
            self._commits.offer(self._position, force=True)
            self._commits.flush()
            self._committing = False
            self._over = Left(f"trial {self.trial} was asked to stop after iteration {self._position.iteration}")
            raise self._over
        self._commits.offer(self._position)
        return epoch
