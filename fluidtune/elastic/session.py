"""One worker's part in one elastic trial: what happens at a boundary, and in which order.

The user's loop runs in one thread and comes here at every boundary; the host calls from another thread and
only leaves wishes (`direct`, `enter`, `leave`) that the loop takes up at its next boundary. Whether and
when to resize is the host's business. At a boundary the leader takes its wish, tells the others (go on,
re-form or stop), all re-form if so told, everyone gets the leader's state, and the leader commits.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy
import torch

from .backends.base import CollectiveBackend
from .commits import Commit, CommitStore
from .control_messages import Order, Position, State, Wishes
from .errors import GroupLost, Left
from .in_place_recovery import MENDED, MOST_MENDS, muster
from .lazy_session import pending_session, wake_on_first_use
from .loader import Share
from .membership import Address, Reform
from .trial_state import TrialState


class ElasticSession:
    """One worker's part in one elastic trial.

    ``trial``: names the trial; with the generation and rank it seeds a follower's random streams.
    ``worker``: this worker's id, as it stands in `Reform.members`.
    ``leader``: the trial's first worker: it runs the trial, commits, and takes followers in.
    ``backend``: not shared with another session; its ``host`` and ``device`` are the worker's.
    ``device``: where the trial's tensors are ("cpu", "cuda", "cuda:0").
    ``commits``: where the leader commits; None: nowhere.
    ``resume``: the commit to go on from. ValueError if its fingerprint is not ``fingerprint``.
    ``fingerprint``: names the trial's configuration; a commit of another one is not taken.
    ``note``: asked at every commit for what the host wants kept with it (`Commit.note`); picklable.
    ``brief``: what of such a note a follower must have that commits in place of a leader that died.
    ``rewind``: told in the leader's loop, with its note, that the trial goes on from what was saved last (`mend`).
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
    ) -> None:
        if resume is not None and resume.fingerprint != fingerprint:
            raise ValueError(
                f"the commit of trial {trial} was made with configuration {resume.fingerprint!r}, not "
                f"{fingerprint!r}: start the trial without it"
            )
        self.trial = trial
        self.worker = worker
        self.leader = leader
        self.share: Share | None = None
        #: Its loop goes on by itself, in a smaller group, when another worker dies.
        self.mends = False
        #: It stops and writes its last commit, which must not be cut off.
        self.committing = False
        self.last_reform: tuple[float, float] | None = None
        self._backend = backend
        self._commits = commits
        self._resume = resume
        self._fingerprint = fingerprint
        self._note = note
        self._brief = brief
        self._rewind = rewind
        self._saved: Commit | None = None  # of an adopted state, which says itself what is to be committed
        self._written: Commit | None = None  # the last such one that is in the store
        self._bequest: Commit | None = None  # a follower's last one of which it knows what its leader had reported
        self._objects = TrialState(self, torch.device(device))
        self._state: State = self._objects
        self._wishes = Wishes()
        self._members: tuple[str, ...] = (worker,)
        self._address: Address | None = None  # the leader's
        self._loop = -1  # index of the `epochs` call that runs
        self._entered = leader
        self._ahead: Position | None = None  # a joiner's, while its function is at an earlier `epochs` call
        self._next_step: int | None = None  # for a class trainable: see `boundary`
        self._epoch = 0
        self._iteration = resume.iteration if resume is not None else 0
        self._kept = self._iteration  # iteration of the last commit
        self._elastic = False
        self._over: BaseException | None = None
        self._outrun = False  # the loop was given a newer state than ``resume``

    # -- the host's side: any thread, never blocks for long --

    @property
    def is_elastic(self) -> bool:
        """Has the loop called `prepare` or come to a boundary?"""
        return self._elastic

    @property
    def iteration(self) -> int:
        """Turns done, those before a restart included."""
        return self._iteration

    @property
    def address(self) -> Address | None:
        """Leader: (host, port), where followers find it. None before the loop's first call; in a follower."""
        return self._address if self.leader else None

    @property
    def generation(self) -> float:
        """Of the group that the loop runs in; -1 before the first reform."""
        return self._backend.generation

    def forget_resume(self) -> None:
        """Before the loop runs: do not go on from ``resume``, the trial was given another state."""
        self._resume, self._iteration, self._kept = None, 0, 0

    def outrun_resume(self) -> None:
        """Before the loop runs: it was given a newer state than ``resume``.

        `epochs` finds out by its ``start`` whether the loop took that up; other loops begin with what they have.
        """
        self._outrun = True

    def recall(self) -> None:
        """Before a class trainable's first step: its objects are as in ``resume`` already, to be saved."""
        if self._resume is not None and not self._outrun:
            self._state.load(self._resume.state, with_streams=True)

    def direct(self, reform: Reform | None) -> None:
        """Leader: re-form at the next boundary at which all joiners stand ready (`enter`); None: as you are.

        Replaces an earlier directive that was not yet taken up. `last_reform` says when it was. ValueError
        if the leader is not members[0], or the generation not a new one.
        """
        if reform is not None:
            if not self.leader or reform.members[0] != self.worker:
                raise ValueError(f"only the leader, members[0], can re-form: {self.worker} got {reform}")
            if reform.generation <= self.generation:
                raise ValueError(f"generation {reform.generation} must be above {self.generation}")
        with self._wishes.changed:
            self._wishes.reform = reform

    def wait_ready(self, timeout: float | None) -> bool:
        """Follower: wait until the loop stands at its first boundary, ready to enter.

        False after ``timeout`` seconds, or when the loop has ended without coming to one.
        """
        wishes = self._wishes
        with wishes.changed:
            wishes.changed.wait_for(lambda: wishes.ready or wishes.closed, timeout)
            return wishes.ready and not wishes.closed

    def enter(self, reform: Reform) -> None:
        """Follower: join this generation when the leader comes to it; replaces one that did not form yet."""
        if self.leader or self.worker not in reform.members:
            raise ValueError(f"{self.worker} cannot enter {reform}: only a follower that is a member can")
        with self._wishes.changed:
            self._wishes.entry = reform
            self._wishes.changed.notify_all()

    def leave(self) -> None:
        """End the loop: it unwinds with `Left`. At once if it waits to enter, else at its next boundary.

        A leader commits there (whatever that costs), writes it, and stops its followers too. A follower
        unwinds when its leader does, re-forms without it, or dies. Idempotent.
        """
        with self._wishes.changed:
            self._wishes.leaving = True
            self._wishes.changed.notify_all()

    # -- the loop's side: one thread --

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """``fn(*args)``: the user's function, in the calling thread. Afterwards there is no group.

        Raises what the function raises: `Left` when it was asked to end, `GroupLost` when a peer is gone.
        """
        try:
            value = fn(*args)
            self._end()
            return value
        except GroupLost as error:
            if self._wishes.leaving and not self.leader:  # its leader was quicker: no news
                raise Left(f"worker {self.worker} was asked to leave") from error
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Dissolve the group and finish writing: for a host that does not use `run`, in the loop's thread."""
        self._backend.close()
        self._state.set_width(1)
        if self._commits is not None:
            self._commits.flush()
        with self._wishes.changed:
            self._wishes.closed = True
            self._wishes.changed.notify_all()

    def prepare(self, *objects: Any) -> tuple[Any, ...]:
        """See `elastic.prepare`. May be called several times."""
        self._begin_elastic()
        return self._objects.add(objects)

    def epochs(self, start: int, stop: int) -> Iterator[int]:
        """See `elastic.epochs`."""
        self._loop += 1
        epoch = self._begin(start)
        while epoch is not None and epoch < stop:
            yield epoch
            epoch = self._turn(epoch + 1)

    def boundary(self, done: int | None = None) -> int:
        """For a class trainable, whose host drives the loop: to be called before each ``step()``.

        ``done``: leader: the iterations that its host counts, which `iteration` is then in followers, too.
        Returns the step's index, from 0. In a follower the first call waits until it has entered. To end:
        `leave` and a last call of it, which raises `Left`; then `close`.
        """
        if self._next_step is None:
            self._loop += 1
            if done is not None:
                self._iteration = done
            step = self._begin(0, counted=False)
        else:
            step = self._turn(self._next_step)
        if step is None:
            raise ValueError(f"the commit of trial {self.trial} is from another kind of trainable")
        self._next_step = step + 1
        return step

    def adopt(self, state: State) -> None:
        """The trial is ``state``, and its boundaries are where it calls `boundary` (see `elastic.hvd`)."""
        self._begin_elastic()
        self._state, self._next_step, self.mends = state, None, True

    def first_boundary(self) -> bool:
        """The boundary before an adopted state's first turn; a follower enters there.

        False if this loop was done before the commit that the trial goes on from.
        """
        self._loop += 1
        step = self._begin(0, counted=False)
        self._next_step = None if step is None else step + 1
        return step is not None

    @property
    def entered(self) -> bool:
        """Is this worker in the trial's group? A follower is not before its first boundary."""
        return self._entered

    def save(self) -> None:
        """What the adopted state has saved now is what later boundaries commit, and `mend` goes back to."""
        self._saved = self._snapshot()

    def bequeath(self) -> None:
        """Follower: commit in place of the leader, which is gone, what was saved before its last order."""
        bequest = self._bequest
        if self._commits is not None and bequest is not None:
            self._commits.offer(lambda: bequest, force=True)
            self._commits.flush()

    def mend(self) -> None:
        """After a `GroupLost`: go on without those that died, in a group of those that are left, under its leader.

        Again with fewer, if one dies meanwhile. The caller puts the last commit back. Raises GroupLost in a follower
        whose leader is gone or went on without it, and when the host must help.
        """
        started = time.perf_counter()
        for last in [False] * (MOST_MENDS - 1) + [True]:
            self._backend.dissolve()
            self._over = self.share = None
            generation = round(self._backend.generation + MENDED, 3)
            assert self._address is not None
            members = muster(self._backend, self._address, self._members, self.worker, generation)
            if self.leader:
                self._drop_wish_for(set(self._members) - set(members))
            try:
                self._join(members, generation)
                break
            except GroupLost:
                if last:
                    raise
        self._next_step = self._epoch + 1
        if self.leader and self._rewind is not None and self._saved is not None:
            self._rewind(self._saved.note)
        self.last_reform = (generation, time.perf_counter() - started)

    def _drop_wish_for(self, gone: set[str]) -> None:
        """A directive that is to bring in one that just died would wait for it; the host will give another."""
        with self._wishes.changed:
            if self._wishes.reform is not None and gone & set(self._wishes.reform.members):
                self._wishes.reform = None

    def mean(self, total: float, count: float) -> float:
        """See `elastic.mean`."""
        pair = torch.tensor([total, count], dtype=torch.float64)
        if self.width > 1:
            self.backend.allreduce_(pair)
        return float(pair[0]) / float(pair[1])

    def samples(self, n: int) -> int:
        """See `elastic.samples`."""
        return 0 if self.share is not None and self.share.stand_in else n

    # -- what loader, gradients and batch statistics ask --

    @property
    def width(self) -> int:
        """Workers that this loop shares its batches with, itself included; 1 until a joiner has the state."""
        return 1 if self._ahead is not None else self._backend.world

    @property
    def backend(self) -> CollectiveBackend:
        """The group; raises again what ended this loop, if user code swallowed it."""
        if self._over is not None:
            raise self._over
        return self._backend

    @property
    def weight(self) -> float:
        """What this worker's gradient counts; over the workers these sum to 1."""
        return 1.0 / self.width if self.share is None else self.share.weight

    # -- boundaries --

    def _begin_elastic(self) -> None:
        if not self._elastic and self.leader:
            self._address = self._backend.serve()
        self._elastic = True

    def _begin(self, start: int, counted: bool = True) -> int | None:
        """The boundary before a loop's first turn. The epoch to run, or None if this loop was done before.

        ``counted``: ``start`` says how far the state is that the loop has.
        """
        self._begin_elastic()
        if self.leader:
            commit = self._resume
            if self._outrun and not counted:
                commit = self._resume = None
            if commit is not None:
                if commit.loop > self._loop:
                    return None
                self._resume = None
                if start > commit.epoch:
                    self._iteration = commit.iteration + start - commit.epoch
                else:
                    start = commit.epoch
                    self._state.load(commit.state, with_streams=True)
            return self._boundary(start)
        if not self._entered:
            self._enter()
            self._entered = True
        elif self._ahead is None:
            return self._boundary(start)
        assert self._ahead is not None
        if self._ahead.loop > self._loop:
            return None
        self._receive(self._ahead)
        return self._epoch

    def _turn(self, epoch: int) -> int:
        self._iteration += 1
        return self._boundary(epoch)

    def _boundary(self, epoch: int) -> int:
        """A boundary of a member: obey the leader, or be it. ``epoch`` runs next."""
        if self._over is not None:
            raise self._over
        self._epoch = epoch
        self.share = None
        order = self._agree()
        if order.kind == "end":
            self._backend.dissolve(orderly=True)
            self._leave(f"trial {self.trial} has ended: its leader left elastic.epochs() before epoch {epoch}")
        if order.epoch != epoch:
            raise RuntimeError(
                f"worker {self.worker} stands before epoch {epoch}, its leader before {order.epoch}: leave "
                "elastic.epochs() only on values that are the same on all workers, such as elastic.mean()'s"
            )
        if order.kind == "stop":
            self.committing = True
            self._commit(force=True)
            if self._commits is not None:
                self._commits.flush()
            self.committing = False
            self._backend.dissolve(orderly=True)
            self._leave(f"trial {self.trial} was asked to stop after iteration {self._iteration}")
        if order.reform is not None:
            self._reform(order.reform)
        self._commit()
        return epoch

    def _end(self) -> None:
        """The function has returned: in all workers, or the others are at a boundary, and end there."""
        order = self._backend.broadcast_object(Order("end", self._epoch) if self.leader else None)
        if order is not None and order.kind != "end":
            raise RuntimeError(
                f"worker {self.worker} has ended and its leader stands before epoch {order.epoch}: leave "
                "elastic.epochs() only on values that are the same on all workers, such as elastic.mean()'s"
            )
        self._backend.dissolve(orderly=True)

    def _agree(self) -> Order:
        """The leader's order for this boundary."""
        order = self._decide() if self.leader else None
        if order is not None and self._saved is not None and self._brief is not None:
            order = replace(order, note=self._brief(self._saved.note))
        try:
            heard: Order = self._backend.broadcast_object(order)
            if not self.leader and self._saved is not None:
                self._bequest = replace(self._saved, note=heard.note)
            return heard
        except GroupLost:
            if order is not None and order.reform is not None:  # nobody heard it: there may be another boundary
                with self._wishes.changed:
                    self._wishes.reform = self._wishes.reform or order.reform
            raise

    def _decide(self) -> Order:
        with self._wishes.changed:
            if self._wishes.leaving:
                return Order("stop", self._epoch)
            reform = self._wishes.reform
            if reform is None:
                return Order("go", self._epoch)
            joiners = [rank for rank, w in enumerate(reform.members) if w not in self._members]
            if not self._backend.announced(reform.generation, joiners):
                return Order("go", self._epoch)  # not all there yet: perhaps at the next boundary
            self._wishes.reform = None
            return Order("reform", self._epoch, reform)

    def _reform(self, reform: Reform) -> None:
        started = time.perf_counter()
        if self.leader:
            self._backend.call(reform.generation)
        self._backend.dissolve(orderly=True)
        if self.worker not in reform.members:
            self._leave(f"worker {self.worker} is not in generation {reform.generation}")
        self._address = reform.address
        self._join(reform.members, reform.generation)
        self.last_reform = (reform.generation, time.perf_counter() - started)

    def _join(self, members: tuple[str, ...], generation: float) -> None:
        """Form this generation and take the leader's state; ``members`` have all been in the trial before."""
        rank, world = members.index(self.worker), len(members)
        self._members = members  # also if one dies now: the others go on among these
        assert self._address is not None
        try:
            self._backend.form(self._address, generation, rank, world)
        except GroupLost as error:  # alone now, but no trial: nothing may go on
            self._over = error
            raise
        here = Position(self._loop, self._epoch, self._iteration)
        if world > 1:
            self._receive(self._backend.broadcast_object(here))
        else:
            self._state.set_width(1)

    def _enter(self) -> None:
        """A joiner's way in: wait for the host's word, then for the leader's."""
        wishes = self._wishes
        with wishes.changed:
            wishes.ready = True
            wishes.changed.notify_all()
        announced: Reform | None = None
        while True:
            with wishes.changed:
                wishes.changed.wait_for(lambda: wishes.leaving or wishes.entry is not None)
                if wishes.leaving:
                    self._leave(f"worker {self.worker} was asked to leave before it had entered")
                reform = wishes.entry
            assert reform is not None
            rank = reform.members.index(self.worker)
            if reform is not announced:
                self._backend.announce(reform.address, reform.generation, rank)
                announced = reform
            if self._backend.called(reform.address, reform.generation, patience=0.2):
                break
        started = time.perf_counter()
        self._backend.form(reform.address, reform.generation, rank, len(reform.members))
        self._members, self._address = reform.members, reform.address
        self._ahead = self._backend.broadcast_object()
        self.last_reform = (reform.generation, time.perf_counter() - started)

    def _receive(self, position: Position) -> None:
        """Everyone in a new group: the leader's state, and random streams of their own for the followers."""
        self._ahead = None
        self._epoch, self._iteration = position.epoch, position.iteration
        self._state.broadcast(self._backend)
        self._state.set_width(self._backend.world)
        if not self.leader:
            name = f"{self.trial}/{self._iteration}/{self._backend.generation}/{self._backend.rank}"
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
            random.seed(seed)
            numpy.random.seed(seed)
            torch.manual_seed(seed)

    def _leave(self, why: str) -> None:
        self._over = Left(why)
        raise self._over

    def _commit(self, force: bool = False) -> None:
        if not self.leader or self._commits is None:
            return
        saved = self._saved
        if self.mends:
            if saved is not None and saved is not self._written and self._commits.offer(lambda: saved, force=force):
                self._written = saved
            return
        if self._iteration == self._kept and not force:  # nothing was done since
            return
        if self._commits.offer(self._snapshot, force=force):
            self._kept = self._iteration

    def _snapshot(self) -> Commit:
        return Commit(
            trial=self.trial,
            fingerprint=self._fingerprint,
            loop=self._loop,
            epoch=self._epoch,
            iteration=self._iteration,
            state=self._state.capture(),
            note=self._note() if self._note is not None else None,
        )


_session: ElasticSession | None = None


def use(session: ElasticSession | None) -> None:
    """Make this the process' session, the one that `elastic.prepare` and the others find; None: none.

    RuntimeError if another one is in use.
    """
    global _session
    if session is not None and _session is not None and _session is not session:
        raise RuntimeError(f"this process already runs trial {_session.trial}: use(None) first")
    _session = session


def current() -> ElasticSession | None:
    """The session in use in this process, or None. A session that waited for this call (`LazySession`) wakes."""
    lazy = pending_session()
    if lazy is not None:
        wake_on_first_use(None)
        use(lazy.wake())
    return _session
