"""A leader's followers: which there are, what each has of the leader's modules, and how much of a batch each gets.

A follower is taken in between two calls, and may be gone at any time. Only one call at a time asks them. While one
checks a call, none is asked for anything else.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING

from .meeting import Lost

if TYPE_CHECKING:  # a trial without torch has no modules
    from .description import Description
    from .tensor_link import Link, Message
    from .trees import Classes
    from .weights import PublishedWeights, SentWeights

log = logging.getLogger(__name__)

#: Replicas that a follower keeps of one module: they differ in its attributes, as those for training and evaluation.
REPLICAS = 4
#: Seconds in which a follower makes a replica, if its leader waits for that. Judgement: it may import a framework.
_REPLICA_S = 60.0
#: Parts are cut anew when a device's pace has changed by this part. Judgement: above the noise of a busy machine.
_PACE_CHANGE = 0.15
#: Divided calls between two looks at paces.
_PACED = 16


@dataclass(eq=False)
class Peer:
    """A follower as its leader has it. The process itself is a `follower.Follower`."""

    name: str
    link: Link
    followers: Followers
    #: By key of a module, what it has: of its weights, and which replicas; and the classes of the script.
    weights: dict[int, SentWeights] = field(default_factory=dict)
    replicas: dict[int, list[bytes]] = field(default_factory=dict)
    #: None: it is sent them anew, and no replica counts.
    classes: bytes | None = b""
    #: Modules of which it was sent a replica that it has not made so far.
    pending: set[int] = field(default_factory=set)
    #: Seconds a sample of its latest part, by what it says; None: not known.
    pace: float | None = None
    #: What is called with its answer to a check; None: it makes none.
    answered: Callable[[Message], None] | None = None
    #: Until when that must come, by `time.monotonic`; None: the leader computes the call itself just now.
    deadline: float | None = None

    def lost(self, why: str) -> None:
        """It is gone, or is given up."""
        self.followers.lost(self, why)


class Followers:
    """Those of one trial. For the parameters see `DataParallelLeader`.

    One thing: what calls of modules need of the trial's followers.
    """

    def __init__(self, trial: str, pickling: ModuleType = pickle, pays: bool = True, patient: bool = False) -> None:
        self._trial, self._pickling, self.pays, self.patient = trial, pickling, pays, patient
        self._process = os.getpid()
        #: Those that take part, and those that have come since the latest call.
        self.present: list[Peer] = []
        self.arrived: list[Peer] = []
        self._lock, self._turn = threading.Lock(), threading.RLock()
        self._in_turn: int | None = None
        self._keys = 0
        self._dropped: list[int] = []
        self._forgotten: list[int] = []
        self._shares: list[float] = []
        self._paced = 0
        #: By key of a module, why a follower cannot make a replica of it.
        self.failed: dict[int, str] = {}
        #: Calls of this iteration that were divided; calls of which that is not decided; followers have come or gone.
        self.divided = self.undecided = 0
        self.changed = False
        #: (module, "divided" or "whole", why), since they were last asked for.
        self.checked: list[tuple[str, str, str]] = []
        #: Since when the latest follower waits for its first part, and the seconds that calls took longer meanwhile.
        self._waits_since: float | None = None
        self.stall = 0.0
        #: (how many workers, seconds until the first divided call began, stall), since it was last asked for.
        self.grown: tuple[int, float, float] | None = None
        #: Looks that are under way: hooks of FluidTune's own for all modules.
        self.looks = 0
        self.closed = False

    @cached_property
    def classes(self) -> Classes:
        """Classes of the trial's script."""
        from .trees import Classes

        return Classes(self._pickling)

    def begin_iteration(self) -> None:
        """Count anew."""
        self.divided = self.undecided = 0
        with self._lock:
            self.changed = bool(self.arrived)

    def arrive(self, peer: Peer) -> None:
        """Another one has come. Any thread."""
        with self._lock:
            self.arrived.append(peer)
            self.changed = True
            self._waits_since, self.stall = time.perf_counter(), 0.0

    @property
    def steady(self) -> bool:
        """Whether the same followers were there in the whole iteration, and it is decided of each call."""
        return bool(self.present) and not self.changed and not self.undecided

    def lost(self, peer: Peer, why: str) -> None:
        """A follower is gone, or is given up."""
        if peer in self.present:
            self.present.remove(peer)
            self.changed = True
            if not self.closed:
                log.info("trial %s goes on without its follower %s: %s", self._trial, peer.name, why)
        peer.link.close()

    def can_divide(self) -> bool:
        """Whether this process has followers now, and is the leader (and not a fork of it)."""
        return bool(self.present or self.arrived) and os.getpid() == self._process

    def in_turn(self) -> bool:
        """Whether this thread asks the followers just now."""
        return self._in_turn == threading.get_ident()

    @contextmanager
    def free_turn(self) -> Iterator[bool]:
        """Whether the caller may ask the followers: no other call of this or of another thread does."""
        mine = self._in_turn is None and self._turn.acquire(blocking=False)
        if not mine:
            yield False
            return
        self._in_turn = threading.get_ident()
        try:
            yield True
        finally:
            self._in_turn = None
            self._turn.release()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until the followers are free (a backward)."""
        with self._turn:
            before, self._in_turn = self._in_turn, threading.get_ident()
            try:
                yield
            finally:
                self._in_turn = before

    def settle(self) -> bool:
        """Take in who has come, and what followers have said. Whether none makes a check, so that all can be asked."""
        with self._lock:
            self.present += self.arrived
            self.arrived = []
        for peer in list(self.present):
            try:
                self._read(peer)
            except Lost as error:
                self.lost(peer, str(error))
        return all(peer.answered is None for peer in self.present)

    def ready(self, key: int, described: Description, weights: PublishedWeights) -> list[Peer]:
        """The followers that have this module as it is; the others are sent it meanwhile. `settle` comes first."""
        dropped, self._dropped = self._dropped, []
        forgotten, self._forgotten = self._forgotten, []
        found = []
        for peer in list(self.present):
            try:
                if dropped or forgotten:
                    peer.link.send("forget", {"calls": dropped, "modules": forgotten})
                for gone in forgotten:
                    peer.weights.pop(gone, None)
                    peer.replicas.pop(gone, None)
                self._provide(peer, key, described, weights)
                self._read(peer)
                if key not in peer.pending and described.digest in peer.replicas[key]:
                    found.append(peer)
            except Lost as error:
                self.lost(peer, str(error))
        return found

    def introduce(self, peer: Peer, key: int, described: Description, weights: PublishedWeights) -> None:
        """Send a new follower a module that was divided before, so that it has a replica at the next call. Any thread
        that has the `turn`; the weights are those of the latest call."""
        try:
            self._provide(peer, key, described, weights)
        except Lost as error:
            self.lost(peer, str(error))

    def _provide(self, peer: Peer, key: int, described: Description, weights: PublishedWeights) -> None:
        if peer.classes != described.classes:  # replicas that have the classes as they were are of no use
            peer.classes = described.classes
            peer.replicas.clear()
            peer.link.send("classes", described.classes)
        has = peer.replicas.setdefault(key, [])
        if described.digest not in has:
            if key in peer.pending:  # one at a time
                return
            trained = [tensor.requires_grad for tensor in described.tensors]
            peer.link.send("module", (key, described.digest, described.tree.skeleton, trained))
            peer.pending.add(key)
            has.append(described.digest)
            del has[:-REPLICAS]
        weights.send(peer.link, key, peer.weights)

    def _read(self, peer: Peer) -> None:
        """Read which replicas a follower has made, and its answer to a check if the leader has computed the call."""
        while peer.pending or peer.answered is not None:
            if peer.answered is not None and peer.deadline is None:
                return
            left = _REPLICA_S if peer.deadline is None else peer.deadline - time.monotonic()
            if not (self.patient or left < 0 or peer.link.has_message()):
                return
            message = self._hear(peer, max(left, 1.0))
            if message is not None:
                raise Lost(f"it has said {message.kind} where nothing was asked")

    def _hear(self, peer: Peer, timeout: float) -> Message | None:
        """Receive one message. What is not an answer to a part of a call is taken in here; then None."""
        message = peer.link.receive(timeout)
        if message.kind == "ready":
            key, _, why = message.value
            peer.pending.discard(key)
            if why is not None:
                self.failed[key] = why
                peer.replicas[key] = []
            return None
        if peer.answered is None:
            return message
        answered, peer.answered, peer.deadline = peer.answered, None, None
        answered(message)
        return None

    def answer(self, peer: Peer, timeout: float) -> Message:
        """The answer to a part of a call; what the follower owed before comes first. Raises Lost."""
        while True:
            message = self._hear(peer, timeout)
            if message is not None:
                return message

    def wait_for_check(self, peer: Peer, timeout: float) -> None:
        """Wait until a follower that makes a check has answered: before, it must be sent no tensors. Raises Lost."""
        while peer.answered is not None:
            left = timeout if peer.deadline is None else max(1.0, peer.deadline - time.monotonic())
            self._hear(peer, left)

    def shares(self, count: int) -> list[float]:
        """By part, the device's speed in relation to others; the leader's first."""
        return self._shares[:count] if len(self._shares) >= count else [1.0] * count

    def note_paces(self, own: float, forward_s: float, peers: Sequence[Peer]) -> None:
        """A forward of ``forward_s`` s was divided: learn how fast each device is. ``own``: the leader's `pace`."""
        if self._waits_since is not None and not self.arrived:
            self.grown = 1 + len(peers), time.perf_counter() - forward_s - self._waits_since, self.stall
            self._waits_since = None
        self._paced += 1
        if self._paced % _PACED and self._paced not in (2, 4, 8):
            return
        paces = [own, *(peer.pace or own for peer in peers)]
        shares = [min(paces) / max(pace, 1e-9) for pace in paces]
        before = self._shares if len(self._shares) == len(shares) else [1.0] * len(shares)
        if any(abs(new - old) > _PACE_CHANGE * max(new, old) for new, old in zip(shares, before, strict=True)):
            self._shares = [(new + old) / 2 for new, old in zip(shares, before, strict=True)]

    def new_key(self) -> int:
        self._keys += 1
        return self._keys

    def drop(self, key: int) -> None:
        """A call has no backward any more. Any thread."""
        self._dropped.append(key)

    def forget(self, key: int) -> None:
        """A module is gone. Any thread."""
        self._forgotten.append(key)

    def close(self) -> None:
        """Let all of them go; idempotent."""
        self.closed = True
        for peer in [*self.present, *self.arrived]:
            peer.link.close()
        self.present, self.arrived = [], []
