"""What happens at a boundary, in which order, and how a worker enters its trial's group.

At a boundary the leader takes the host's request and sends its order to the others (go on, re-form, stop or end). If
the order says so, all re-form, and every follower in the new group receives the leader's state. Then the leader
commits, if that is worth its price. Everything here runs in the loop's thread; the host's requests come through
`HostRequests`.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fluidtune.group_facts import Reform

from ..alike.common_batches import CommonBatches
from ..alike.growth import Growth
from ..alike.likeness import Likeness
from ..commits.commit_policy import CommitPolicy
from ..commits.committable import CommittableState, TrialPosition
from ..data.attribution import BatchesAtHand
from ..data.group_view import GroupView, refuse_left_out
from ..data.loop_draws import LeadersStreams, seed_of, seed_streams
from ..data.outputs import Outputs
from ..errors import CannotDivide, GroupLost, Left, Refused
from ..random_streams import Streams
from ..transport.base import CollectiveBackend
from ..transport.membership import Address
from .in_place_recovery import GENERATION_STEP, MOST_RECOVERIES, agree_on_survivors

#: What a boundary is called in an error.
_ORDER = "the boundary"
#: Seconds that a joiner waits for the leader's call before it looks whether the host has asked for something else. The
#: backend looks for the call far more often.
_CALL_WAIT_S = 0.2


@dataclass(frozen=True)
class BoundaryOrder:
    """What the leader tells the others at a boundary.

    ``kind``: "go" on; "reform" the group; "stop", because the host has asked the trial to; or "end", because the
    leader's function has returned. ``epoch``: the epoch that the leader stands before. ``weights``: all compare theirs
    now. ``again``: the next turn begins with a batch that all compute whole. ``reform``: with "reform", the group to
    form. ``note``: what a follower must know of the leader's last `save` to inherit the trial. ``streams``: the
    leader's random streams, if its followers have others.
    """

    kind: Literal["go", "reform", "stop", "end"]
    epoch: int
    weights: bool = False
    again: bool = False
    reform: Reform | None = None
    note: Any = None
    streams: Streams | None = None


@dataclass
class HostRequests:
    """What the host asks of the loop, and what it waits for; ``changed`` guards all of it.

    ``reform``: the leader's next group. ``entry``: the group that a follower is to enter. ``leaving``: the loop is to
    end. ``ready``: a follower stands at its first boundary. ``closed``: the loop has ended.
    """

    changed: threading.Condition = field(default_factory=threading.Condition)
    reform: Reform | None = None
    entry: Reform | None = None
    leaving: bool = False
    ready: bool = False
    closed: bool = False

    def keep(self, reform: Reform) -> None:
        """The leader could not tell the others of this group: ask for it again, unless a newer one is asked for."""
        with self.changed:
            self.reform = self.reform or reform

    def drop_for(self, gone: set[str]) -> None:
        """Drop a request that would wait for a worker that just died; the host will send another one."""
        with self.changed:
            if self.reform is not None and gone & set(self.reform.members):
                self.reform = None


class GroupMember(GroupView):
    """One worker's place in its trial's group. ``state`` must be set before the first boundary.

    ``trial``, ``worker``, ``leader``, ``backend``: see `ElasticSession`.
    """

    state: CommittableState

    def __init__(
        self,
        trial: str,
        worker: str,
        leader: bool,
        backend: CollectiveBackend,
        requests: HostRequests,
        commits: CommitPolicy,
    ) -> None:
        self.trial, self.worker, self.leader = trial, worker, leader
        self.commits = commits
        resume = commits.resume
        self.position = TrialPosition(loop=-1, epoch=0, iteration=0 if resume is None else resume.iteration)
        self.batches = BatchesAtHand()
        self.outputs = Outputs()
        self.common = CommonBatches()
        self.draws = LeadersStreams(str(backend.device) if backend.device.type == "cuda" else "cuda")
        #: The loop has called `prepare`, or has come to a boundary.
        self.elastic = False
        #: This worker is in the group. A follower is not before its first boundary.
        self.entered = leader
        #: Where the leader's store is.
        self.address: Address | None = None
        #: See `GroupFacts`.
        self.committing = False
        self.last_reform: tuple[float, float] | None = None
        self.growth = Growth()
        self.likeness = Likeness(self.common, self.growth, self._leave_leader_alone, self._begin_anew)
        #: `last_reform` as it was before the last one.
        self._reformed_before: tuple[float, float] | None = None
        self._group = backend
        self._requests = requests
        self._members: tuple[str, ...] = (worker,)
        #: In a joiner that has not received the trial's state yet: the trial's position, at which it is to join. Its
        #: function may still be at an earlier `epochs` call.
        self._joins_at: TrialPosition | None = None
        #: The exception that ended this loop.
        self._over: BaseException | None = None

    # -- the view of the loop's parts --

    @property
    def width(self) -> int:
        return 1 if self._joins_at is not None else self._group.world

    @property
    def turn_number(self) -> int:
        return self.position.iteration

    @property
    def generation(self) -> float:
        return self._group.generation

    @property
    def backend(self) -> CollectiveBackend:
        if self._over is not None:  # user code may have swallowed it
            raise self._over
        return self._group

    # -- boundaries --

    def become_elastic(self) -> None:
        """The trial can have several workers from now on; its leader can be found."""
        if not self.elastic and self.leader:
            self.address = self._group.serve()
        self.elastic = True

    def begin(self, start: int) -> int | None:
        """The boundary before a loop's first epoch. Returns the epoch to run; None if the trial is past this loop."""
        self.become_elastic()
        self.position.loop += 1
        self.state.loop_begins()
        if self.leader:
            first = self.commits.first_epoch(self.position, self.state, start)
            return None if first is None else self.come_to(first)
        if not self.entered:
            self._enter()
            self.entered = True
        elif self._joins_at is None:
            return self.come_to(start)
        assert self._joins_at is not None
        if self._joins_at.loop > self.position.loop:
            return None
        self._receive(self._joins_at, joiners=True)
        return self.position.epoch

    def turn(self, epoch: int, closing: bool = False) -> int:
        """The boundary after an iteration; ``epoch`` runs next. ``closing``: see `come_to`."""
        self.position.iteration += 1
        return self.come_to(epoch, closing)

    def come_to(self, epoch: int, closing: bool = False) -> int:
        """A boundary of a member: give the order as the leader, or obey it. ``epoch`` runs next.

        ``closing``: at most one iteration of this loop is left, so that all weights are compared.

        Raises:
            Left: the trial or this worker's part in it is over.
            GroupLost: another worker died.
            RuntimeError: the leader stands before another epoch.
        """
        if self._over is not None:
            raise self._over
        self.position.epoch = epoch
        if self.width > 1:
            refuse_left_out(self, "boundary")
            self.likeness.part_if_due()
        self.batches.next_turn()
        self.outputs.stop()
        order = self._agree(closing)
        if order.kind == "end":
            self._group.dissolve(orderly=True)
            self._end_loop(f"trial {self.trial} has ended: its leader left elastic.epochs() before epoch {epoch}")
        if order.epoch != epoch:
            raise RuntimeError(f"worker {self.worker} stands before epoch {epoch}, {_apart(order)}")
        if self.width > 1:
            self.likeness.compare_all(self._group, self.state, order.weights, order.again)
        if order.kind == "stop":
            self.committing = True
            self.commits.offer(self.position, self.state, force=True)
            self.commits.flush()
            self.committing = False
            self._group.dissolve(orderly=True)
            self._end_loop(f"trial {self.trial} was asked to stop after iteration {self.position.iteration}")
        if order.reform is not None and self._has_left(order.reform):
            self.growth.refuse(order.reform, self._group)
        elif order.reform is not None:
            self._reform(order.reform)
        self.commits.offer(self.position, self.state)
        return epoch

    def _leave_leader_alone(self) -> None:
        """All workers: the group ends, and the leader goes on from where it is."""
        generation = self._group.generation
        self._group.dissolve(orderly=True)
        if not self.leader:
            self._over = Refused(f"the leader goes on without {self.worker}: {self.growth.ungrowable}")
            raise self._over
        self.growth.refused = generation
        if self.last_reform is not None and self.last_reform[0] == generation:
            self.last_reform = self._reformed_before
        self._members = (self.worker,)
        self.common.formed(joiners=False)
        self.state.set_width(1)

    def _has_left(self, reform: Reform) -> bool:
        """Leader: whether the workers of its group, with which it was to re-form, went apart at this very boundary."""
        return self.width == 1 < len(reform.members) and self.growth.ungrowable is not None

    def _begin_anew(self, why: str) -> None:
        """All workers: the trial ends here, and its host runs it again with one worker, from the beginning.

        A commit has nothing of what the loop keeps for itself.
        """
        if self.leader:
            self.commits.discard()
        raise CannotDivide(why)

    def end(self) -> None:
        """The function has returned. The other workers' functions have returned, too, or end at a boundary now."""
        order = self._group.broadcast_object(BoundaryOrder("end", self.position.epoch) if self.leader else None, _ORDER)
        if order is not None and order.kind != "end":
            raise RuntimeError(f"worker {self.worker} has ended, {_apart(order)}")
        self._group.dissolve(orderly=True)

    def close(self) -> None:
        """Dissolve the group and let go of the leader's store."""
        self._group.close()
        self.state.set_width(1)

    def _agree(self, closing: bool) -> BoundaryOrder:
        """The leader's order for this boundary. Weights are compared when this group or its loop is about to end."""
        order = self._decide() if self.leader else None
        note = self.commits.note_of_save() if self.leader else None
        if order is not None:
            due = closing or order.kind != "go" or self.likeness.weights_due()
            order = replace(order, note=note, weights=due, again=self.common.due_again, streams=self._news())
        try:
            heard: BoundaryOrder = self._group.broadcast_object(order, _ORDER)
        except GroupLost:
            if order is not None and order.reform is not None:  # no follower has it: keep it for another boundary
                self._requests.keep(order.reform)
            raise
        if not self.leader:
            self.commits.inherit(heard.note)
            self.draws.take(heard.streams)
        return heard

    def _decide(self) -> BoundaryOrder:
        """Leader: what the host's request means now."""
        epoch = self.position.epoch
        with self._requests.changed:
            if self._requests.leaving:
                return BoundaryOrder("stop", epoch)
            reform = self._requests.reform
            if reform is None:
                return BoundaryOrder("go", epoch)
            answer = self.growth.answer(reform, self._members, self._obstacle, self._group)
            if answer == "not now":
                return BoundaryOrder("go", epoch)
            self._requests.reform = None
            return BoundaryOrder("go", epoch) if answer == "no" else BoundaryOrder("reform", epoch, reform=reform)

    def _obstacle(self, lasting: bool) -> str | None:
        """Leader, at a boundary: why the trial cannot get another worker; see `CommittableState.obstacle`."""
        return self.state.obstacle(lasting) or self.batches.kept.obstacle(lasting)

    def _end_loop(self, why: str) -> None:
        self._over = Left(why)
        raise self._over

    # -- forming a group --

    def _reform(self, reform: Reform) -> None:
        started = time.perf_counter()
        if self.leader:
            self._group.call_generation(reform.generation)
        self._group.dissolve(orderly=True)
        if self.worker not in reform.members:
            self._end_loop(f"worker {self.worker} is not in generation {reform.generation}")
        self.address = reform.address
        self._join(reform.members, reform.generation)
        self._reformed_before, self.last_reform = self.last_reform, (reform.generation, time.perf_counter() - started)

    def _join(self, members: tuple[str, ...], generation: float) -> None:
        """Form this generation and take the leader's state. A joiner calls `_enter` instead."""
        rank, world = members.index(self.worker), len(members)
        joiners = bool(set(members) - set(self._members))
        self.batches.clear()
        self._members = members  # set first: if one of them dies while the group forms, the others recover
        assert self.address is not None
        try:
            self._group.form(self.address, generation, rank, world)
        except GroupLost as error:  # this worker is alone now: its loop must not go on as if it were the trial
            self._over = error
            raise
        if world > 1:
            self._receive(self._group.broadcast_object(self.position), joiners)
        else:
            self.common.formed(joiners=False)
            self.state.set_width(1)

    def _enter(self) -> None:
        """A joiner's way in: wait for the host's request, then for the leader's call."""
        try:
            reform = called_in(self._requests, self._group, self.worker)
        except Left as error:
            self._over = error
            raise
        started = time.perf_counter()
        rank = reform.members.index(self.worker)
        self._group.form(reform.address, reform.generation, rank, len(reform.members))
        self._members, self.address = reform.members, reform.address
        self._joins_at = self._group.broadcast_object()
        self.last_reform = (reform.generation, time.perf_counter() - started)

    def _receive(self, position: TrialPosition, joiners: bool) -> None:
        """Called by every member of a new group: take the leader's state and go on from its random streams."""
        self._joins_at = None
        self.position.epoch, self.position.iteration = position.epoch, position.iteration
        self.state.broadcast(self._group)
        self.likeness.restart(joiners)
        self.state.set_width(self._group.world)
        self.draws.restart()
        leaders = self._group.broadcast_object((self._news(), self.common.has_divided), "the leader's random streams")
        self.draws.take(leaders[0])
        self.common.has_divided = leaders[1]
        if self.state.own_streams and not self.leader:
            seed_streams(seed_of(self.trial, position.iteration, self._group.generation, self._group.rank))

    def _news(self) -> Streams | None:
        """The leader's random streams, if its followers are to have them and have others."""
        return self.draws.news() if self.leader and self.width > 1 and not self.state.own_streams else None

    # -- when a worker died --

    def recover(self) -> None:
        """After a `GroupLost`: go on in a group of the workers that are left, under the leader.

        If another worker dies meanwhile, the rest form a smaller group. See also `ElasticSession.recover_in_place`.
        """
        started = time.perf_counter()
        for last in [False] * (MOST_RECOVERIES - 1) + [True]:
            self._group.dissolve()
            self._over = None
            generation = round(self._group.generation + GENERATION_STEP, 3)
            assert self.address is not None
            members = agree_on_survivors(self._group, self.address, self._members, self.worker, generation)
            if self.leader:
                self._requests.drop_for(set(self._members) - set(members))
            try:
                self._join(members, generation)
                break
            except GroupLost:
                if last:
                    raise
        if self.leader:
            self.commits.rewind()
        self.last_reform = (generation, time.perf_counter() - started)


def _apart(order: BoundaryOrder) -> str:
    return (
        f"its leader stands before epoch {order.epoch}: leave elastic.epochs() only on values that are the same on all "
        "workers, such as elastic.mean()'s"
    )


def called_in(requests: HostRequests, group: CollectiveBackend, worker: str) -> Reform:
    """A joiner waits until its host has asked for a group and the leader calls ``worker`` into it. Returns the group.

    Raises:
        Left: the host has asked the joiner to leave.
        Refused: the leader goes on without it.
        GroupLost: the leader is gone.
    """
    with requests.changed:
        requests.ready = True
        requests.changed.notify_all()
    announced: Reform | None = None
    while True:
        with requests.changed:
            requests.changed.wait_for(lambda: requests.leaving or requests.entry is not None)
            if requests.leaving:
                raise Left(f"worker {worker} was asked to leave before it had entered")
            reform = requests.entry
        assert reform is not None
        if reform is not announced:
            group.announce_joiner(reform.address, reform.generation, reform.members.index(worker))
            announced = reform
        called = group.wait_for_call(reform.address, reform.generation, patience=_CALL_WAIT_S)
        if called is not None:
            if called and worker not in called:
                raise Refused(f"the leader goes on without {worker}")
            return reform
