"""One worker's part in one elastic trial: what its host and its loop call.

The user's loop runs in one thread. The host calls from another thread and only leaves requests (`direct`, `enter`,
`leave`), which the loop takes up at its next boundary: see `boundary`. Whether and when to resize is the host's
business. What is committed and when is decided in `commit_policy`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader

from fluidtune.group_facts import GroupFacts, Reform

from ..commits.commit_policy import CommitPolicy
from ..commits.commit_store import Commit, CommitStore
from ..commits.committable import CommittableState
from ..data.batches import BatchPart
from ..data.group_view import total_of_all
from ..data.loader import iterates_itself
from ..data.trial_state import TrialState
from ..errors import CannotDivide, GroupLost, explain
from ..random_streams import Streams, complete_streams
from ..transport.base import CollectiveBackend
from .boundary import GroupMember, HostRequests
from .worker_session import FollowerSession, LeaderSession


class ElasticSession(LeaderSession, FollowerSession):
    """The session of a leader or a follower, and what a training loop calls of its trial.

    One thing: it has the methods of two protocols, and those of `elastic` for the loop, and each hands its call on.

    Args:
        trial: names the trial; with the generation and rank it seeds a follower's random streams.
        worker: this worker's id, as it stands in `Reform.members`.
        leader: the trial's first worker: it runs the trial, commits, and takes followers in.
        backend: not shared with another session; its ``host`` and ``device`` are the worker's.
        device: where the trial's tensors are ("cpu", "cuda", "cuda:0").
        commits: where the leader commits, or a follower in place of a leader that died.
        resume: the commit to go on from.
        fingerprint: names the trial's configuration.
        note: returns what the host wants kept with a commit (`Commit.note`), picklable; called for every commit.
        brief: returns the part of such a note that a follower needs to commit in place of a leader that died.
        rewind: called in the leader's loop, with the note of the last save, when `recover_in_place` goes back to it.
        streams: the random streams with which the trial's code began (`random_streams`), for commits and joiners.
        pickling: a module like `pickle`, for what is no tensor in the trial's state.

    Raises:
        ValueError: ``resume`` was made with another configuration than ``fingerprint`` names.
    """

    def __init__(
        self,
        *,
        trial: str,
        worker: str,
        leader: bool,
        backend: CollectiveBackend,
        device: str = "cpu",
        commits: CommitStore | None = None,
        resume: Commit | None = None,
        fingerprint: str = "",
        note: Callable[[], Any] | None = None,
        brief: Callable[[Any], Any] | None = None,
        rewind: Callable[[Any], None] | None = None,
        streams: Streams | None = None,
        pickling: ModuleType = pickle,
    ) -> None:
        self.trial, self.worker, self.leader = trial, worker, leader
        self._commits = CommitPolicy(
            trial,
            leader,
            commits,
            resume=resume,
            fingerprint=fingerprint,
            note=note,
            brief=brief,
            rewind=rewind,
            streams=None if streams is None else complete_streams(streams),
        )
        self._requests = HostRequests()
        self._group = backend
        self._member = GroupMember(trial, worker, leader, backend, self._requests, self._commits)
        self._objects = TrialState(self._member, torch.device(device), pickling)
        self._member.state = self._objects
        #: A loop over `epochs` is running; one inside it has no boundaries.
        self._in_epochs = False
        #: A framework's loop has come to a boundary, and not to its last one.
        self._in_framework = False
        #: For a class trainable, the epoch that its next boundary stands before; None before its first one.
        self._next_step: int | None = None

    # -- the host's side: any thread, never blocks for long --

    def facts(self) -> GroupFacts:
        member, growth = self._member, self._member.growth
        return GroupFacts(
            is_elastic=member.elastic,
            address=member.address if self.leader else None,
            width=member.width,
            last_reform=member.last_reform,
            refused=growth.refused,
            ungrowable=growth.ungrowable,
            differences=growth.differences,
            difference=growth.difference,
            mends=self._commits.saves_itself,
            lost=self._group.lost,
            committing=member.committing,
            cannot_commit=self._commits.cannot,
            streams=self._commits.streams,
        )

    @property
    def iteration(self) -> int:
        """Iterations done, those before a restart included."""
        return self._member.position.iteration

    def fails_divided(self, error: BaseException) -> str | None:
        return self._member.common.fails_divided(error, self.width) if self.leader else None

    @property
    def generation(self) -> float:
        """Of the group that the loop runs in; -1 before the first reform."""
        return self._member.generation

    @property
    def width(self) -> int:
        """The number of workers in the group that the loop runs in."""
        return self._member.width

    def forget_resume(self) -> None:
        self._commits.forget_resume()
        self._member.position.iteration = 0

    def prefer_checkpoint(self) -> None:
        self._commits.resume_is_older = True

    def load_commit(self) -> None:
        self._commits.load_commit(self._member.state)

    def ended(self) -> None:
        self._commits.refuse_unreached()

    def direct(self, reform: Reform | None) -> None:
        """As `LeaderSession`; None takes the last directive back.

        Raises:
            ValueError: the leader is not members[0], or the generation is not a new one.
        """
        if reform is not None:
            if not self.leader or reform.members[0] != self.worker:
                raise ValueError(f"only the leader, members[0], can re-form: {self.worker} got {reform}")
            if reform.generation <= self.generation:
                raise ValueError(f"generation {reform.generation} must be above {self.generation}")
        with self._requests.changed:
            self._requests.reform = reform

    def wait_ready(self, timeout: float | None) -> bool:
        requests = self._requests
        with requests.changed:
            requests.changed.wait_for(lambda: requests.ready or requests.closed, timeout)
            return requests.ready and not requests.closed

    def enter(self, reform: Reform) -> None:
        if self.leader or self.worker not in reform.members:
            raise ValueError(f"{self.worker} cannot enter {reform}: only a follower that is a member can")
        with self._requests.changed:
            self._requests.entry = reform
            self._requests.changed.notify_all()

    def leave(self) -> None:
        with self._requests.changed:
            self._requests.leaving = True
            self._requests.changed.notify_all()

    # -- the loop's side: one thread --

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        try:
            value = fn(*args)
            self.ended()
            self._member.end()
            return value
        except (GroupLost, Exception) as error:
            dismissed = self._requests.leaving and not self.leader
            explain(error, self._group.lost, dismissed=dismissed, divided=self.fails_divided(error))
            raise
        finally:
            self.close()

    def close(self) -> None:
        """As `WorkerSession`. It waits until the last commit is written. Called in the loop's thread."""
        self._member.close()
        self._commits.flush()
        with self._requests.changed:
            self._requests.closed = True
            self._requests.changed.notify_all()

    def prepare(self, *objects: Any) -> tuple[Any, ...]:
        self._member.become_elastic()
        for part in objects:
            if isinstance(part, DataLoader) and (why := iterates_itself(part)) is not None:
                self.keep_one_worker(why)
        return self._objects.add(objects)

    def epochs(self, start: int, stop: int) -> Iterator[int]:
        if self._in_epochs:
            self._member.growth.end(
                "elastic.epochs() is called inside elastic.epochs() (let the inner one be range()), or after one whose "
                "loop was left by `break` and that a variable keeps, as that of a tqdm (iterate over it in the `for`)"
            )
            yield from range(start, stop)
            return
        self._in_epochs = True
        try:
            epoch = self._member.begin(start)
            while epoch is not None and epoch < stop:
                yield epoch
                epoch = self._member.turn(epoch + 1, closing=epoch + 2 >= stop)
        finally:
            self._in_epochs = False

    def before_epoch(self, epoch: int, stop: int | None) -> int | None:
        """The boundary of a framework. An ``epoch`` that does not come after the last one begins another loop."""
        if self._in_epochs:
            self._member.growth.end("a framework's loop runs inside elastic.epochs(): let the outer one be range()")
            return epoch
        if self._in_framework and epoch > self._member.position.epoch:
            reached: int | None = self._member.turn(epoch, closing=stop is not None and epoch + 1 >= stop)
        else:
            reached = self._member.begin(epoch)
        self._in_framework = reached is not None and (stop is None or reached < stop)
        return reached

    def work_on(self, part: BatchPart | None) -> None:
        """See `elastic.work_on`."""
        self._member.batches.work_on(part)

    def keep_one_worker(self, why: str) -> None:
        if self.width > 1:
            self.backend.exchange(torch.zeros(1, dtype=torch.float64), "elastic.one_worker()")
            raise CannotDivide(why)
        self._member.growth.end(why)

    def boundary(self, done: int | None = None) -> int:
        """A class trainable's boundary, called before each ``step()``; returns the step's index, from 0.

        ``done``: leader: the iterations that its host counts, which `iteration` is then in followers, too. In a
        follower the first call waits until it has entered. To end: `leave`, a last call of this, and `close`.

        Raises:
            Left: `leave` was called, or the leader has ended.
            GroupLost: another worker died.
            ValueError: the trial's commit is that of another kind of trainable.
        """
        if self._next_step is None:
            if done is not None:
                self._member.position.iteration = done
            step = self._member.begin(0)
        else:
            step = self._member.turn(self._next_step)
        if step is None:
            raise ValueError(f"the commit of trial {self.trial} is from another kind of trainable")
        self._next_step = step + 1
        return step

    def mean(self, total: float, count: float) -> float:
        pair = torch.tensor([total, count], dtype=torch.float64)
        if self.width > 1:
            pair = total_of_all(self._member, pair)
        return float(pair[0]) / float(pair[1])

    def samples(self, n: int) -> int:
        batches = self._member.batches
        n = batches.count(n, self.width == 1 or self.backend.rank == 0)
        batches.counted.returned += n
        return n

    @property
    def rank(self) -> int:
        """This worker's number in its trial. A loop that knows it may divide data itself."""
        self._member.batches.knows_rank = True
        return self.backend.rank if self.width > 1 else 0

    # -- for a trial that brings its own state, in the loop's thread (see `elastic.hvd`) --

    def use_own_state(self, state: CommittableState) -> None:
        """The trial is ``state``, and its boundaries are where it calls `boundary`."""
        self._member.become_elastic()
        self._member.state, self._next_step = state, None
        self._commits.saves_itself = True

    def first_boundary(self) -> bool:
        """The boundary before the first iteration, where a follower enters. False if the trial's commit is later."""
        step = self._member.begin(0)
        self._next_step = None if step is None else step + 1
        return step is not None

    @property
    def entered(self) -> bool:
        """Whether this worker is in the trial's group. A follower is not before its first boundary."""
        return self._member.entered

    @property
    def backend(self) -> CollectiveBackend:
        """The group's collectives. Raises again what has ended this loop."""
        return self._member.backend

    def save(self) -> None:
        """Later boundaries commit what the own state has saved now, and `recover_in_place` goes back to it."""
        self._commits.save(self._member.position, self._member.state)

    def commit_as_heir(self) -> None:
        """Follower: commit in place of the leader, which is gone, what was saved before its last order."""
        self._commits.commit_inherited()

    def recover_in_place(self) -> None:
        """After a `GroupLost`: go on without those that died, in a group of those that are left, under its leader.

        The caller puts the last save back.

        Raises:
            GroupLost: in a follower whose leader is gone or went on without it, and when the host must help.
        """
        self._member.recover()
        self._next_step = self._member.position.epoch + 1
