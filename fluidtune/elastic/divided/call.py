"""One divided call of a module: parts go out, one is computed here, and the whole output comes back with a gradient.

The leader keeps what the call was given until its backward. So whatever becomes of a follower, the leader computes the
call itself, whole: the forward, or forward and backward.
"""

from __future__ import annotations

import pickle
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..random_streams import restore_streams
from .batch_statistics import Merge
from .computation import Computation, Modes, Streams, cut_of, gradients_of, other_streams, part_modes
from .description import Description, Marks
from .flags import Flags, under
from .followers import Peer
from .meeting import Lost
from .parts import Outputs, Rule, joined_gradients, parts_of
from .tensor_link import Message
from .torch_private import computed, is_batched, keeps_graph, outside_transforms
from .trees import Tree, tree_of

#: A follower is given up when it takes this many times as long as the leader's own part, and `GRACE_S` seconds more.
#: Judgement: a device that is slower than that is no help, and one that hangs is found before its trial looks dead.
PATIENCE, GRACE_S = 100.0, 20.0


def patience(own_s: float) -> float:
    """Seconds in which a follower must have answered, where this process computes for ``own_s`` s."""
    return GRACE_S + PATIENCE * own_s


class Undivided(Exception):
    """The call cannot be divided now: it is to be computed whole. ``lasting``: nor can later ones like it."""

    def __init__(self, why: str, lasting: bool = False) -> None:
        super().__init__(why)
        self.lasting = lasting


class Replica:
    """A replica in the leader's process, on which parts are computed: hooks of the module's weights do not see them.

    Its parameters are those of the module under another name.
    """

    def __init__(self, described: Description) -> None:
        self._described = described
        with torch.inference_mode(False):
            self.tensors = [self._alias(tensor) for tensor in described.tensors]
            self.module: nn.Module = described.tree.value(self.tensors)
        self.marks: Marks | None = None

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter) or tensor.requires_grad:
            return nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
        return tensor.detach()

    @property
    def trained(self) -> list[torch.Tensor]:
        """Its tensors that get gradients."""
        return [self.tensors[number] for number in self._described.trained]

    def refresh(self) -> None:
        """Be as the module is now."""
        for own, tensor in zip(self.tensors, self._described.tensors, strict=True):
            if own.data_ptr() != tensor.data_ptr():
                own.data = tensor.detach()
        self.marks = Marks(self.module)


@dataclass(frozen=True)
class Asked:
    """What a module is called with: ``given``, args and kwargs."""

    described: Description
    given: Tree
    flags: Flags

    @property
    def needs(self) -> list[int]:
        """The numbers of the tensors in it that get gradients."""
        return [i for i, t in enumerate(self.given.tensors) if t.requires_grad] if self.flags["grad"] else []

    @property
    def graded(self) -> bool:
        """Whether there may be a backward."""
        return bool(self.flags["grad"]) and bool(self.needs or self.described.trained)


class Call:
    """``own`` computes the first part, ``peers`` the others. ``sizes``: samples of each part."""

    def __init__(
        self, own: Replica, module: int, asked: Asked, rule: Rule, sizes: Sequence[int], peers: Sequence[Peer]
    ) -> None:
        self._own, self._module_key, self._described, self._given = own, module, asked.described, asked.given
        self._flags, self._needs, self.graded = asked.flags, asked.needs, asked.graded
        self._trained = self._described.trained
        self._rule, self._sizes = rule, list(sizes)
        self._pieces = parts_of(asked.given, rule, sizes)
        self._peers: list[Peer | None] = [None, *peers]
        self.followers = peers[0].followers
        self.key = self.followers.new_key()
        #: The leader's own part, if there may be a backward.
        self._made: Computation | None = None
        self._said: list[list[bool]] = []
        self._streams = Streams(self._described.device)
        #: Parts whose followers have a request that they have not answered.
        self._owing: set[int] = set()
        #: Seconds of this part's forward, and of the whole call's forward and backward.
        self.own_s = self.forward_s = self.backward_s = 0.0
        self.outputs: Outputs
        #: Tells followers, with the next request, that this call has no backward any more. Called once.
        self._drop = weakref.finalize(self, self.followers.drop, self.key)
        self._drop.atexit = False

    @property
    def may_go_back(self) -> bool:
        """Whether a backward may come."""
        return self.graded and self._drop.alive

    # -- forward

    def forward(self) -> None:
        """Compute the outputs of all parts, which fit together.

        Raises:
            Undivided: the batch must be computed whole; nothing of the leader has changed.
        """
        started = time.perf_counter()
        self._before = [(t, t.detach().clone()) for t in self._described.tensors if not isinstance(t, nn.Parameter)]
        try:
            self.outputs = Outputs(self._forward(), self._rule)
            if not self.outputs.fit():
                raise Undivided("what parts of the batch return differs in more than its samples", lasting=True)
        except Exception as error:  # the same as alone is raised by the whole forward
            self._stop_others()
            self.take_back()
            if isinstance(error, Undivided):
                raise
            lasting = not isinstance(error, _Broken) or error.raised
            raise Undivided(f"a part of the batch fails ({type(error).__name__}: {error})", lasting) from error
        except BaseException:  # the loop is ended from outside
            for part in range(1, len(self._sizes)):
                self._gone(part, "the loop was ended")
            raise
        self.forward_s = time.perf_counter() - started

    def take_back(self) -> None:
        """The call is to be computed whole after all: random streams and buffers are as before."""
        self._streams.restore()
        self.end()
        with torch.no_grad():
            for tensor, before in self._before:
                tensor.data.copy_(before)  # not a write for graphs that hold it

    def _forward(self) -> list[Tree]:
        for part in range(1, len(self._sizes)):
            self._request_part(part)
        # What is drawn may tell where a forward goes: there it may draw others.
        others = other_streams() if self._rule.draws else None
        started = time.perf_counter()
        made = Computation(self._own.module, self._own.trained, self._pieces[0], self._needs, self._modes(0))
        self._made = made if self.graded else None
        self._said.append(made.requires)
        found = [made.output]
        self.own_s = time.perf_counter() - started
        drawn = Streams(self._described.device)
        if self._own.marks is not None and self._own.marks.put_back():
            raise Undivided("it leaves something behind", lasting=True)
        if others is not None and other_streams() != others:
            restore_streams(pickle.loads(others))
            raise Undivided("it draws from the random numbers of Python or NumPy", lasting=True)
        if not self._rule.draws and drawn.digest != self._streams.digest:
            raise Undivided("it draws random numbers, and did not when it was checked", lasting=True)
        odd: Undivided | None = None
        for part in range(1, len(self._sizes)):
            message = self._answer(part)
            if message is None:
                raise Undivided("a follower is gone")
            said = message.value
            if message.kind == "raised":
                odd = odd or Undivided(f"a part of the batch fails in another process ({said})", lasting=True)
                continue
            peer = self._peers[part]
            if peer is not None:
                peer.pace = said["seconds"] / self._sizes[part]
            found.append(Tree(said["skeleton"], tuple(t.clone() for t in message.tensors), self._given.classes))
            self._said.append(said["requires"])
            if self._rule.draws and said["drawn"] != drawn.digest:
                odd = odd or Undivided("what it draws cannot be cut into parts of the batch", lasting=True)
        if odd is not None:
            raise odd
        return found

    def _request_part(self, part: int) -> None:
        piece = self._pieces[part]
        states = self._streams.states if self._rule.draws else []
        value = {
            "key": self.key,
            "module": self._module_key,
            "digest": self._described.digest,
            "flags": self._flags,
            "skeleton": piece.skeleton,
            "needs": self._needs,
            "graded": self.graded,
            "cut": cut_of(self._rule, self._sizes, part),
            "draws": len(states),
            "statistics": self._rule.statistics,
        }
        self._request(part, "forward", value, [*piece.tensors, *states])

    def _modes(self, part: int) -> Modes:
        """What this part is computed under, forward and backward."""
        me = weakref.ref(self)  # a graph that held its call would hold itself

        def gather(row: torch.Tensor, merge: Merge) -> torch.Tensor:
            call = me()
            assert call is not None
            return call._gather(row, merge)

        return part_modes(self._rule.draws, self._rule.statistics, cut_of(self._rule, self._sizes, part), gather)

    # -- between parts

    def _gather(self, row: torch.Tensor, merge: Merge) -> torch.Tensor:
        """See `batch_statistics.Gather`: the leader has the rows of all, and hands them on."""
        rows = [row]
        for part in range(1, len(self._sizes)):
            message = self._answer(part)
            if message is None or message.kind != "row":
                raise _Broken(message)
            rows.append(message.tensors[0].to(row.device, copy=True))
        table = torch.stack(rows)
        for part in range(1, len(self._sizes)):
            self._send(part, "rows", None, [table])
        return merge(table)

    def _request(self, part: int, kind: str, value: Any, tensors: Sequence[torch.Tensor]) -> None:
        peer = self._peers[part]
        try:
            if peer is not None:
                self.followers.wait_for_check(peer, patience(self.own_s))
        except Lost as error:
            self._gone(part, str(error))
        self._owing.add(part)
        self._send(part, kind, value, tensors)

    def _send(self, part: int, kind: str, value: Any = None, tensors: Sequence[torch.Tensor] = ()) -> None:
        peer = self._peers[part]
        if peer is None:
            return
        try:
            peer.link.send(kind, value, tensors)
        except Lost as error:
            self._gone(part, str(error))

    def _answer(self, part: int) -> Message | None:
        """What a follower says; None: it is gone."""
        peer = self._peers[part]
        if peer is None:
            return None
        try:
            message = self.followers.answer(peer, patience(self.own_s))
        except Lost as error:
            self._gone(part, str(error))
            return None
        if message.kind != "row":
            self._owing.discard(part)
        return message

    def _gone(self, part: int, why: str) -> None:
        peer, self._peers[part] = self._peers[part], None
        self._owing.discard(part)
        if peer is not None:
            peer.lost(why)

    def _stop_others(self) -> None:
        """This part goes no further: bring the followers to where they wait for the next request."""
        for part in list(self._owing):  # one that is gone owes nothing more
            self._send(part, "stop")
        for part in list(self._owing):
            while part in self._owing and self._answer(part) is not None:
                pass

    # -- backward

    def backward(
        self, inputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], keep: bool
    ) -> list[torch.Tensor | None]:
        """The gradients of what the call was given (those that need one), then of the trained tensors: ``inputs``."""
        started = time.perf_counter()
        split = self.outputs.split(grads)
        asked = [part for part in range(1, len(self._sizes)) if any(g is not None for g in split[part])]
        try:
            met = not self._rule.statistics or len(asked) + 1 == len(self._sizes)
            if not met or any(self._peers[part] is None for part in asked):
                raise _Broken(None)
            for part in asked:
                have = [g is not None for g in split[part]]
                sent = [g for g in split[part] if g is not None]
                self._request(part, "backward", {"key": self.key, "keep": keep, "have": have}, sent)
            nothing = [None] * len(inputs)
            parts = [
                self._part_backward(part, own, keep) if any(g is not None for g in own) else nothing
                for part, own in enumerate(split)
            ]
            whole = joined_gradients(self._rule, self._needs, self._pieces, parts)
        except Exception as error:
            self._stop_others()
            if not isinstance(error, _Broken):
                raise
            whole = self.recomputed(inputs, grads)
        if not keep:
            self.end()
        self.backward_s = time.perf_counter() - started
        return whole

    def _part_backward(self, part: int, grads: Sequence[Any], keep: bool) -> list[torch.Tensor | None]:
        if part == 0:
            assert self._made is not None
            return self._made.gradients(grads, self._modes(0), keep)
        message = self._answer(part)
        if message is None or message.kind == "raised":
            raise _Broken(message)
        tensors = iter(message.tensors)
        return [next(tensors).clone() if there else None for there in message.value]

    def recomputed(self, inputs: Sequence[torch.Tensor], grads: Sequence[Any]) -> list[torch.Tensor | None]:
        """The gradients of the call computed once more, whole: a follower is gone, or they have a graph of their own
        (``create_graph=True``), or are of several outputs at once (``is_grads_batched=True``).
        """
        differentiable, after = torch.is_grad_enabled(), Streams(self._described.device)
        self._streams.restore()
        try:
            with outside_transforms(), under(self._flags):
                # Hooks of the loop's own tensors do not see what is computed here.
                own = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in inputs]
                tensors, trained = (
                    list(self._given.tensors),
                    dict(zip(self._trained, own[len(self._needs) :], strict=True)),
                )
                for number, tensor in zip(self._needs, own, strict=False):
                    tensors[number] = tensor
                weights = [
                    trained[number] if number in trained else tensor.detach().clone()
                    for number, tensor in enumerate(self._described.tensors)
                ]
                args, kwargs = self._given.value(tensors)
                result = computed(self._described.tree.value(weights), args, kwargs)
                ends = tree_of(result, "its output", self._given.classes).tensors
        finally:
            after.restore()
        return gradients_of(ends, grads, own, create_graph=differentiable)

    def end(self) -> None:
        """No backward comes any more: let go of what it would need."""
        self._made = None
        self._drop()

    # -- as a part of the loop's graph

    def result(self) -> Any:
        """What the call returns."""
        joined = self.outputs.joined()
        flags = [any(of_parts) for of_parts in zip(*self._said, strict=True)] if self.graded else []
        if not any(flags):
            return self.outputs.value(joined)
        trained = [self._described.tensors[number] for number in self._trained]
        inputs = [*(self._given.tensors[i] for i in self._needs), *trained]
        return self.outputs.value(_Joined.apply(self, joined, flags, *inputs))


class _Broken(Exception):
    """Parts that meet have not met: a follower is gone or has failed."""

    def __init__(self, message: Message | None) -> None:
        self.raised = message is not None
        super().__init__("a follower is gone" if message is None else str(message.value))


class _Joined(torch.autograd.Function):
    """Where the loop's graph and those of the parts meet."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, joined: list[torch.Tensor], flags: list[bool], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.call, ctx.inputs = call, inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(tensor for tensor, flag in zip(joined, flags, strict=True) if not flag))
        ctx.save_for_backward(torch.empty(0))  # so that a second backward is the error that it is alone
        return tuple(joined)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors
        call: Call = ctx.call
        batched = any(grad is not None and is_batched(grad) for grad in grads)
        if torch.is_grad_enabled() or batched:
            return None, None, None, *call.recomputed(ctx.inputs, grads)
        keep = keeps_graph()
        with call.followers.turn():
            return None, None, None, *call.backward(ctx.inputs, grads, keep)
