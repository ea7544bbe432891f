"""A trial's followers, and which calls of modules they are asked to help with.

While a trial has followers, the leader looks which modules are called at the top of the stack, for some calls at a time
and by torch's hooks; each gets a `ModuleCalls`. A follower is taken in between two calls, and may be gone at any time.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .door import Address, Door

if TYPE_CHECKING:  # a trial without torch has no modules
    from torch import nn

    from .call import Call
    from .description import Classes, Description
    from .module_calls import ModuleCalls
    from .weights import PublishedWeights, SentWeights
    from .wire import Link

log = logging.getLogger(__name__)

#: Calls at the top of the stack for which one look lasts, and the least seconds between two looks. Judgement: a step of
#: a loop calls a few modules; while a look lasts, torch takes a slower way for all modules.
_LOOKED, _LOOK_S = 12, 1.0
#: Parts are cut anew when a device's pace has changed by this part. Judgement: above the noise of a busy machine.
_PACE_CHANGE = 0.15
#: Divided calls between two looks at paces.
_PACED = 16


@dataclass(frozen=True)
class DivisionFacts:
    """What a leader knows of its followers. ``checked``: (module, "divided" or "whole", why), since the last time."""

    calls_modules: bool = False
    width: int = 1
    checked: tuple[tuple[str, str, str], ...] = ()
    ungrowable: str | None = None
    first_divided: float | None = None


@dataclass(eq=False)
class Follower:
    """A follower, in the leader's process. A `call.Peer`."""

    name: str
    link: Link
    division: Division
    #: By key of a module, what it has: of its weights, and which replicas; and the classes of the script.
    weights: dict[int, SentWeights] = field(default_factory=dict)
    replicas: dict[int, list[bytes]] = field(default_factory=dict)
    classes: bytes = b""
    #: Replicas that it was sent and has not made so far.
    pending: int = 0
    pace: float | None = None
    since: float = 0.0

    def lost(self, why: str) -> None:
        self.division.lost(self, why)


class Division:
    """A trial's followers. ``host``: this machine's address for others; None: no follower is on another machine.

    One thing: what it offers to a trial's host, and what `ModuleCalls` needs of the trial's followers.

    ``pickling``: a module like `pickle`, for modules. ``pays``: calls that are not faster divided are left whole.
    ``patient``: wait for a new follower to be ready, and do not compute whole meanwhile (for tests and measurements).
    """

    def __init__(
        self,
        trial: str,
        secret: bytes,
        host: str | None,
        device: str = "cpu",
        backend: str = "torch",
        pickling: ModuleType = pickle,
        pays: bool = True,
        patient: bool = False,
    ) -> None:
        self._pickling, self.pays = pickling, pays
        self._trial, self._device, self._patient, self._process = trial, device, patient, os.getpid()
        self._peers: list[Follower] = []
        self._arrived: list[Follower] = []
        self._lock, self._turn = threading.Lock(), threading.RLock()
        self._in_turn: int | None = None
        self._calls: weakref.WeakSet[ModuleCalls] = weakref.WeakSet()
        self._keys = 0
        self._dropped: list[int] = []
        self._forgotten: list[int] = []
        self._checked: list[tuple[str, str, str]] = []
        self._look: Callable[[], None] | None = None
        self._looked = 0.0
        self._first: Callable[[], None] | None = None
        self._shares: list[float] = []
        self._paced = 0
        #: Looks that are under way: hooks for all modules.
        self.looks = 0
        #: Calls of this iteration that were divided, and that were not.
        self.divided = self.whole = 0
        self._changed = False
        self._calls_modules = self._closed = False
        self._first_divided: float | None = None
        self._ungrowable: str | None = None
        self._door = Door(secret, host, self._greet)

    @cached_property
    def classes(self) -> Classes:
        """Classes of the trial's script."""
        from .description import Classes

        return Classes(self._pickling)

    # -- for the trial's host

    @property
    def address(self) -> Address:
        """Where followers find this leader."""
        return self._door.address

    def begin_iteration(self) -> None:
        """The trial's next iteration begins."""
        self.divided = self.whole = 0
        with self._lock:
            self._changed = bool(self._arrived)
        if not self._calls_modules and self._first is None and "torch" in sys.modules:
            self._see_first_call()
        if self._peers or self._arrived:
            self._begin_look()

    def facts(self) -> DivisionFacts:
        """What is known after an iteration."""
        checked, self._checked = tuple(self._checked), []
        steady = bool(self._peers) and not self._changed and not any(peer.pending for peer in self._peers)
        if steady and not self.divided and self._ungrowable is None:
            self._ungrowable = self._why_whole()
        width = 0 if self._changed else 1 + len(self._peers)
        return DivisionFacts(self._calls_modules, width, checked, self._ungrowable, self._first_divided)

    def _why_whole(self) -> str:
        reasons = [f"{calls.name}: {why}" for calls in self._calls for verdict, why in calls.said if verdict == "whole"]
        if reasons:
            return "; ".join(sorted(reasons)[:3])
        return "in a whole iteration it called no module with parameters that could be divided"

    def close(self) -> None:
        """Let all followers go; idempotent. Modules are as torch made them."""
        self._closed = True
        self._door.close()
        self._end_look()
        if self._first is not None:
            self._first()
        for peer in [*self._peers, *self._arrived]:
            peer.link.close()
        self._peers, self._arrived = [], []
        for calls in list(self._calls):
            calls.remove()

    # -- followers

    def _greet(self, connection: socket.socket, name: str, shared: bool) -> None:
        """A follower has come (in a thread of the door)."""
        import torch

        from .wire import Link

        link = Link(connection, shared, torch.device(self._device))
        if self._closed or self._ungrowable is not None:
            link.send("refused", self._ungrowable or "the trial has ended here")
            link.close()
            return
        if self._device.startswith("cuda"):
            self._pair(link, connection)
        link.send("welcome")
        follower = Follower(name, link, self, since=time.perf_counter())
        with self._lock:
            self._arrived.append(follower)
            self._changed = True
        self._begin_look()

    def _pair(self, link: Link, connection: socket.socket) -> None:
        """Both ends have a GPU: connect these."""
        from .pair import Pair

        host = "127.0.0.1" if link.shares else connection.getsockname()[0]
        pair = Pair(host, None)
        link.send("pair", (host, pair.port))
        pair.meet()
        link.pair = pair

    def lost(self, peer: Follower, why: str) -> None:
        """A follower is gone, or is given up."""
        if peer in self._peers:
            self._peers.remove(peer)
            self._changed = True
            if not self._closed:
                log.info("trial %s goes on without its follower %s: %s", self._trial, peer.name, why)
        peer.link.close()

    def can_divide(self) -> bool:
        """Whether this process has followers now, and is the leader (and not a fork of it)."""
        return bool(self._peers or self._arrived) and os.getpid() == self._process

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

    def ready(self, calls: ModuleCalls, described: Description, weights: PublishedWeights) -> list[Follower]:
        """The followers that have this module as it is; the others are sent it meanwhile."""
        from .weights import SentWeights
        from .wire import Lost

        with self._lock:
            if self._arrived:
                self._peers += self._arrived
                self._arrived = []
        dropped, self._dropped = self._dropped, []
        forgotten, self._forgotten = self._forgotten, []
        found = []
        for peer in list(self._peers):
            try:
                if dropped or forgotten:
                    peer.link.send("forget", {"calls": dropped, "modules": forgotten})
                for key in forgotten:
                    peer.weights.pop(key, None)
                    peer.replicas.pop(key, None)
                self._settle(peer, wait=self._patient)
                if peer.classes != described.classes:  # replicas that have the classes as they were are of no use
                    peer.classes = described.classes
                    peer.replicas.clear()
                    peer.link.send("classes", described.classes)
                has = peer.replicas.setdefault(calls.key, [])
                if described.digest not in has and not peer.pending:
                    trained = [tensor.requires_grad for tensor in described.tensors]
                    peer.link.send("module", (calls.key, described.digest, described.skeleton, trained))
                    peer.pending += 1
                    has.append(described.digest)
                    from .follower import REPLICAS

                    del has[:-REPLICAS]
                weights.send(peer.link, calls.key, peer.weights.setdefault(calls.key, SentWeights()))
                self._settle(peer, wait=self._patient)
                if not peer.pending and described.digest in has:
                    found.append(peer)
            except Lost as error:
                self.lost(peer, str(error))
        return found

    def _settle(self, peer: Follower, wait: bool) -> None:
        """Read which replicas a follower has made."""
        from .wire import Lost

        while peer.pending and (wait or peer.link.has_message()):
            message = peer.link.receive(60.0)
            if message.kind != "ready":
                raise Lost(f"it says {message.kind} where it was to make a replica")
            key, _, failed = message.value
            peer.pending -= 1
            if failed is not None:
                for calls in self._calls:
                    if calls.key == key:
                        calls.failed_to_send(failed)
                peer.replicas[key] = []

    def sizes(self, samples: int, peers: Sequence[Follower]) -> list[int]:
        """How many samples each part has: the leader's first. Parts are in proportion to the devices' speeds."""
        count = min(samples, 1 + len(peers))
        shares = self._shares[:count] if len(self._shares) >= count else [1.0] * count
        total = sum(shares)
        exact = [samples * share / total for share in shares]
        found = [max(1, int(each)) for each in exact]
        while sum(found) > samples:
            found[found.index(max(found))] -= 1
        by_rest = sorted(range(count), key=lambda i: (int(exact[i]) - exact[i], i))
        for i in range(samples - sum(found)):
            found[by_rest[i % count]] += 1
        return found

    def note_paces(self, call: Call, peers: Sequence[Follower]) -> None:
        """Learn how fast each device is."""
        if self._first_divided is None:
            self._first_divided = time.perf_counter() - peers[0].since
        self._paced += 1
        if self._paced % _PACED and self._paced not in (2, 4, 8):
            return
        own = call.own_s / call.own_samples
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

    def forget(self, calls: ModuleCalls) -> None:
        """A module is gone. Any thread."""
        self._forgotten.append(calls.key)
        calls.let_go()

    def forget_key(self, key: int) -> None:
        self._forgotten.append(key)

    def note(self, module: str, verdict: str, why: str) -> None:
        """A module's calls are divided, or stay whole, and why."""
        self._checked.append((module, verdict, why))

    # -- which modules are called at the top of the stack

    def keeps_whole(self, module: nn.Module) -> bool:
        """Whether the user said so (`keep_whole`)."""
        return module in _kept_whole

    def _see_first_call(self) -> None:
        """See by a hook, once, that the trial calls a module with parameters."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        def seen(module: nn.Module, args: Any) -> None:
            if next(module.parameters(), None) is not None and self._first is not None:
                self._calls_modules = True
                self._first()
                self._first = None

        handle = register_module_forward_pre_hook(seen)
        self.looks += 1

        def forget() -> None:
            handle.remove()
            self.looks -= 1

        self._first = forget

    def _begin_look(self) -> None:
        now = time.monotonic()
        with self._lock:
            if self._look is not None or self._closed or now - self._looked < _LOOK_S or "torch" not in sys.modules:
                return
            self._looked = now
            self._look = _Look(self).end

    def _end_look(self) -> None:
        with self._lock:
            look, self._look = self._look, None
        if look is not None:
            look()

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look which modules are called within a call that stays whole."""
        look = _Look(self)
        try:
            yield
        finally:
            look.end()

    def found(self, module: nn.Module) -> None:
        """A module with parameters is called at the top of the stack."""
        from .module_calls import ModuleCalls

        if module._compiled_call_impl is None and not self._closed:
            calls = ModuleCalls(module, self)
            self._calls.add(calls)
            module._compiled_call_impl = calls


class _Look:
    """Looks by hooks which modules are called at the top of the stack; it ends itself after `_LOOKED` calls."""

    def __init__(self, division: Division) -> None:
        from torch.nn.modules import module as hooks

        self._division, self._left = division, _LOOKED
        division.looks += 1
        self._stacks = threading.local()
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, module: nn.Module, args: Any) -> None:
        from .module_calls import ModuleCalls

        if self._division.in_turn():  # a part is computed
            return
        stack = self._stacks.__dict__.setdefault("stack", [])
        calls = module._compiled_call_impl
        if not stack or not stack[-1]:
            through = isinstance(calls, ModuleCalls) and calls.descends
            if not through and next(module.parameters(), None) is not None:
                self._division.found(module)
                stack.append(True)
                return
            stack.append(False)
            return
        stack.append(True)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._division.in_turn():
            return
        stack = self._stacks.__dict__.setdefault("stack", [])
        if stack:
            stack.pop()
        if not stack:
            self._left -= 1
            if self._left <= 0:
                self._division._end_look()

    def end(self) -> None:
        self._division.looks -= 1
        for handle in self._handles:
            handle.remove()


#: Modules that the user keeps whole.
_kept_whole: weakref.WeakSet[Any] = weakref.WeakSet()


def keep_whole(module: Any) -> Any:
    """Have the module's calls never divided; returns the module. (``FluidExecutor(max_workers=1)`` grows no trial.)

    Use it where a call depends on something that is no part of it, as a clock, a file or a server.
    """
    _kept_whole.add(module)
    return module
