"""A trial's leader: it takes followers in, looks which modules are called, and says what came of it.

While a trial has followers, it is looked which modules are called at the top of the stack, for some calls at a time and
by torch's hooks; each gets a `ModuleCalls`. Before, it is looked until one with parameters is called.
"""

from __future__ import annotations

import pickle
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fluidtune.device_kinds import of_torch
from fluidtune.group_facts import GroupFacts

from .followers import Followers, Peer
from .meeting import Door

if TYPE_CHECKING:  # a trial without torch has no modules
    from torch import nn

    from .module_calls import ModuleCalls
    from .tensor_link import Link

#: Where processes of one machine meet.
LOOPBACK = "127.0.0.1"
#: Calls at the top of the stack for which one look lasts, and the least seconds between two looks. Judgement: a step of
#: a loop calls a few modules; while a look lasts, torch takes a slower way for all modules.
_LOOKED, _LOOK_S = 12, 1.0
#: Seconds for which a follower may take in nothing of what it is sent. Judgement: it reads at once, unless it hangs. A
#: follower waits for its leader, which reads when the loop calls a module.
_STALL_S = 60.0


class DataParallelLeader:
    """A trial's divided calls. ``host``: this machine's address for others; None: no follower is on another machine.

    ``pickling``: a module like `pickle`, for modules.
    ``pays``: calls that are not faster divided are left whole.
    ``patient``: wait for a new follower to be ready, and do not compute whole meanwhile (for tests and measurements).
    """

    def __init__(
        self,
        trial: str,
        secret: bytes,
        host: str | None,
        device: str = "cpu",
        pickling: ModuleType = pickle,
        pays: bool = True,
        patient: bool = False,
    ) -> None:
        self.followers = Followers(trial, pickling, pays, patient)
        self._device = device
        self._lock = threading.Lock()
        self._calls: weakref.WeakSet[ModuleCalls] = weakref.WeakSet()
        self._look: Callable[[], None] | None = None
        self._looked = 0.0
        #: A look began with this iteration.
        self._looks_on = False
        #: The trial has called a module with parameters.
        self._calls_modules = False
        self._ungrowable: str | None = None
        self._door = Door(secret, host, self._greet)
        #: Where followers find this leader.
        self.address = self._door.address

    # -- for the trial's host

    def begin_iteration(self) -> None:
        """The trial's next iteration begins."""
        self.followers.begin_iteration()
        followed = bool(self.followers.present or self.followers.arrived)
        self._looks_on = (followed or not self._calls_modules) and self._begin_look()

    def facts(self, known: GroupFacts) -> GroupFacts:
        """``known``, with what is known of the followers after an iteration."""
        followers = self.followers
        checked, followers.checked = tuple(followers.checked), []
        grown, followers.grown = followers.grown, None
        if self._looks_on and followers.steady and not followers.divided and self._ungrowable is None:
            self._ungrowable = self._why_whole()
        return replace(
            known,
            address=self.address,
            one_node=self.address.port is None,
            calls_modules=self._calls_modules,
            width=0 if followers.changed else 1 + len(followers.present),
            checked=checked,
            ungrowable=self._ungrowable,
            grown=grown,
        )

    def _why_whole(self) -> str:
        reasons = [f"{calls.name}: {why}" for calls in self._calls for verdict, why in calls.said if verdict == "whole"]
        if reasons:
            return "; ".join(sorted(reasons)[:3])
        return "in a whole iteration it called no module with parameters that could be divided"

    def close(self) -> None:
        """Let all followers go; idempotent. Modules are as torch made them."""
        self._door.close()
        self._end_look()
        self.followers.close()
        for calls in list(self._calls):
            calls.remove()

    # -- followers

    def _greet(self, connection: socket.socket, name: str, shared: bool) -> None:
        """A follower has come (in a thread of the door)."""
        import torch

        from .tensor_link import Link

        link = Link(connection, shared, torch.device(self._device), _STALL_S)
        if self.followers.closed or self._ungrowable is not None:
            link.send("refused", self._ungrowable or "the trial has ended here")
            link.close()
            return
        group = of_torch(self._device.partition(":")[0]).group
        if group:
            self._pair(link, connection, group)
        link.send("welcome")
        peer = Peer(name, link, self.followers)
        with self.followers.turn():
            for calls in list(self._calls):
                calls.introduce(peer)
            self.followers.arrive(peer)
        self._begin_look()

    def _pair(self, link: Link, connection: socket.socket, group: str) -> None:
        """Both ends have an accelerator: connect these."""
        from .pair import Pair

        host = LOOPBACK if link.shares else connection.getsockname()[0]
        pair = Pair(host, None, group)
        link.send("pair", (host, pair.port, group))
        pair.meet()
        link.pair = pair

    # -- which modules are called at the top of the stack

    def _begin_look(self) -> bool:
        """Whether one has begun."""
        now = time.monotonic()
        with self._lock:
            if (
                self._look is not None
                or self.followers.closed
                or now - self._looked < _LOOK_S
                or "torch" not in sys.modules
            ):
                return False
            self._looked = now
            self._look = _Look(self, amid=True).end
            return True

    def _end_look(self) -> None:
        with self._lock:
            look, self._look = self._look, None
        if look is not None:
            look()

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look which modules are called within a call that stays whole."""
        look = _Look(self, amid=False)
        try:
            yield
        finally:
            look.end()

    def found(self, module: nn.Module) -> None:
        """A module with parameters is called at the top of the stack."""
        from .module_calls import ModuleCalls
        from .torch_private import answering, have_answer

        self._calls_modules = True
        if not self.followers.can_divide():  # no more is to be known of a trial without followers
            self._end_look()
            self._looked = 0.0
        elif answering(module) is None and not self.followers.closed:
            calls = ModuleCalls(module, self.followers, self.looking)
            self._calls.add(calls)
            self.followers.undecided += 1
            have_answer(module, calls)


class _Look:
    """Looks by hooks which modules are called at the top of the stack; it ends itself after `_LOOKED` calls
    that followers could have divided, of which one had parameters.

    ``amid``: it may begin while a module computes. The loop's first calls may be for shapes alone (Keras): a module
    that is asked for its parameters then makes them of what stands in their place.
    """

    def __init__(self, division: DataParallelLeader, amid: bool) -> None:
        from torch.nn.modules import module as hooks

        self._division, self._left, self._amid = division, _LOOKED, amid
        division.followers.looks += 1
        self._stacks = threading.local()
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, module: nn.Module, args: Any) -> None:
        from .module_calls import ModuleCalls
        from .torch_private import answering, is_amid_call, parameters_of

        if self._division.followers.in_turn():  # a part is computed
            return
        stack = self._stacks.__dict__.setdefault("stack", [])
        calls = answering(module)
        if not stack and self._amid and is_amid_call():
            stack.append(True)
        elif not stack or not stack[-1]:
            through = isinstance(calls, ModuleCalls) and calls.descends
            if not through and (parameters_of(module) if self._amid else list(module.parameters())):
                self._division.found(module)
                stack.append(True)
            else:
                stack.append(False)
        else:
            stack.append(True)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._division.followers.in_turn():
            return
        stack = self._stacks.__dict__.setdefault("stack", [])
        if stack:
            stack.pop()
        if not stack and self._division._calls_modules and self._division.followers.can_divide():
            self._left -= 1
            if self._left <= 0:
                self._division._end_look()

    def end(self) -> None:
        self._division.followers.looks -= 1
        for handle in self._handles:
            handle.remove()
