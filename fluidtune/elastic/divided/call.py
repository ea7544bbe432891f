"""One divided call of a module: parts go out, one is computed here, and the whole output comes back with a gradient.

The leader keeps what the call was given until its backward. So whatever becomes of a follower, the leader computes the
missing part itself: of the forward, or forward and backward. Where parts meet within a forward, as for the statistics
of batch normalisation, it computes the whole batch.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from .batch_statistics import WholeStatistics
from .description import Description, Marks
from .flags import Flags, under
from .parts import Outputs, Rule, Tree, tree_of
from .tensor_link import Link, Lost, Message
from .torch_private import computed, is_batched, keeps_graph, outside_transforms
from .whole_draws import WholeDraws

#: A follower is given up when it takes this many times as long as the leader's own part, and `GRACE_S` seconds more.
#: Judgement: a device that is slower than that is no help, and one that hangs is found before its trial looks dead.
PATIENCE, GRACE_S = 100.0, 20.0


class Undivided(Exception):
    """The call cannot be divided now: it is to be computed whole. ``lasting``: nor can later ones like it."""

    def __init__(self, why: str, lasting: bool = False) -> None:
        super().__init__(why)
        self.lasting = lasting


class Peer(Protocol):
    """A follower, as a call needs it."""

    link: Link
    #: Seconds a sample of its latest parts, by what it says; None: not known.
    pace: float | None

    def lost(self, why: str) -> None:
        """It is gone."""


class Streams:
    """The random streams that a forward draws from. ``device``: a GPU, if the module is on one."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._states = [torch.get_rng_state()]
        if device is not None:
            self._states.append(torch.cuda.get_rng_state(device))

    def restore(self) -> None:
        torch.set_rng_state(self._states[0])
        if self._device is not None:
            torch.cuda.set_rng_state(self._states[1], self._device)

    def tensors(self) -> list[torch.Tensor]:
        return self._states

    @property
    def digest(self) -> bytes:
        return hashlib.sha1(b"".join(state.numpy().tobytes() for state in self._states)).digest()


def other_streams() -> Any:
    """The states of the random numbers of Python and NumPy."""
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    return random.getstate(), None if state is None else (state[0], state[1].tobytes(), *state[2:])


def restore_others(streams: Any) -> None:
    random.setstate(streams[0])
    numpy = sys.modules.get("numpy")
    if numpy is not None and streams[1] is not None:
        name, keys, *rest = streams[1]
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


class Twin:
    """A replica in the leader's process, on which parts are computed: hooks of the module's weights do not see them.

    Its parameters are those of the module under another name. ``copies``: what else a forward may write is a copy, so
    that it leaves no trace. ``all_copies``: parameters are copies, too.
    """

    def __init__(self, described: Description, copies: bool, all_copies: bool = False) -> None:
        self._described, self._copies, self._all_copies = described, copies, all_copies
        with torch.inference_mode(False):
            self.tensors = [self._alias(tensor) for tensor in described.tensors]
            self.module: nn.Module = described.replica(self.tensors)
        self.marks: Marks | None = None

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter) or tensor.requires_grad:
            own = tensor.detach().clone() if self._all_copies else tensor.detach()
            return nn.Parameter(own, requires_grad=tensor.requires_grad)
        return tensor.detach().clone() if self._copies else tensor.detach()

    @property
    def trained(self) -> list[torch.Tensor]:
        """Its tensors that get gradients."""
        return [self.tensors[number] for number in self._described.trained]

    @property
    def written(self) -> list[int]:
        """The numbers of tensors that a forward may write: all but parameters."""
        return [number for number, tensor in enumerate(self.tensors) if not isinstance(tensor, nn.Parameter)]

    def refresh(self) -> None:
        """Be as the module is now."""
        with torch.no_grad():
            for own, tensor in zip(self.tensors, self._described.tensors, strict=True):
                if self._all_copies or (self._copies and not isinstance(own, nn.Parameter)):
                    own.data.copy_(tensor.detach())
                elif own.data_ptr() != tensor.data_ptr():
                    own.data = tensor.detach()
        self.marks = None if self._copies else Marks(self.module)


class Call:
    """``own`` computes the first part. ``given``: what the module is called with, ``pieces``: its parts. ``peers``: of
    the other parts.
    """

    def __init__(
        self,
        key: int,
        own: Twin,
        described: Description,
        given: Tree,
        pieces: Sequence[Tree],
        rule: Rule,
        sizes: Sequence[int],
        peers: Sequence[Peer],
        flags: Flags,
        module_key: int,
        turn: Callable[[], AbstractContextManager[Any]],
        dropped: Callable[[int], None],
        probe: bool = False,
    ) -> None:
        self.key, self._own, self._described = key, own, described
        self._given, self._pieces, self._rule, self._sizes = given, list(pieces), rule, list(sizes)
        self._peers: list[Peer | None] = [None, *peers]
        self._flags, self._module_key = flags, module_key
        self._needs = [i for i, t in enumerate(given.tensors) if t.requires_grad] if flags["grad"] else []
        self.graded = flags["grad"] and bool(self._needs or described.trained)
        #: By part that was computed here, what its graph begins and ends with.
        self._graphs: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self.requires: list[list[bool]] = []
        self._streams = Streams(described.device)
        #: Parts whose followers have a request that they have not answered.
        self._owing: set[int] = set()
        self._twins: dict[int, Twin] = {}
        #: Seconds of this part's forward and backward, and of the whole call's.
        self.own_s = self.forward_s = self.backward_s = 0.0
        #: A follower computes the leader's part first: an index out of range on a GPU ends the process that meets it.
        self._probe = probe and described.device is not None
        #: Its followers are not to be asked by two calls at a time.
        self.turn = turn
        self.outputs: Outputs
        #: Tells followers, with the next request, that this call has no backward any more. Called once.
        self._drop = weakref.finalize(self, dropped, key)
        self._drop.atexit = False

    # -- forward

    def forward(self) -> Outputs:
        """Compute the outputs of all parts, which fit together.

        Raises:
            Undivided: the batch must be computed whole; nothing of the leader has changed.
        """
        started = time.perf_counter()
        self.outputs = Outputs(self.compute(), self._rule)
        if not self.outputs.fit():
            self.take_back()
            raise Undivided("what parts of the batch return differs in more than its samples", lasting=True)
        self.forward_s = time.perf_counter() - started
        return self.outputs

    def join(self, rule: Rule, parts: Sequence[Tree]) -> Outputs:
        """Outputs of `compute`, by a rule that has been found meanwhile."""
        self._rule, self.outputs = rule, Outputs(parts, rule)
        return self.outputs

    def compute(self) -> list[Tree]:
        """The outputs of the parts. Raises as `forward`."""
        self._before = [(t, t.detach().clone()) for t in self._described.tensors if not isinstance(t, nn.Parameter)]
        try:
            found = self._forward()
        except Undivided:
            self._stop_others()
            self.take_back()
            raise
        except Exception as error:  # the same as alone is raised by the whole forward
            self._stop_others()
            self.take_back()
            lasting = not isinstance(error, _Broken) or error.raised
            raise Undivided(f"a part of the batch fails ({type(error).__name__}: {error})", lasting) from error
        except BaseException:  # the loop is ended from outside
            for part in range(1, len(self._sizes)):
                self._gone(part, "the loop was ended")
            raise
        self.requires = [[t.requires_grad for t in found[0].tensors], *self._said]
        return found

    @property
    def own_samples(self) -> int:
        return self._sizes[0]

    def take_back(self) -> None:
        """The call is to be computed whole after all: random streams and buffers are as before."""
        self._streams.restore()
        self.end()
        with torch.no_grad():
            for tensor, before in self._before:
                tensor.data.copy_(before)  # not a write for graphs that hold it

    def _forward(self) -> list[Tree]:
        states = self._streams.tensors() if self._rule.draws else []
        if self._probe and not self._rule.statistics:
            self._request_part(1, 0, states, graded=False)
            message = self._answer(1)
            if message is None or message.kind == "raised":
                why = "a follower is gone" if message is None else f"a part of the batch fails ({message.value})"
                raise Undivided(why, lasting=message is not None)
        for part in range(1, len(self._sizes)):
            self._request_part(part, part, states, self.graded)
        # What is drawn may tell where a forward goes: there it may draw others.
        others = other_streams() if self._rule.draws else None
        started = time.perf_counter()
        found = [self._computed_here(self._own.module, 0)]
        self.own_s = time.perf_counter() - started
        drawn = Streams(self._described.device)
        if self._own.marks is not None and self._own.marks.put_back():
            raise Undivided("it leaves something behind", lasting=True)
        if others is not None and other_streams() != others:
            restore_others(others)
            raise Undivided("it draws from the random numbers of Python or NumPy", lasting=True)
        if not self._rule.draws and drawn.digest != self._streams.digest:
            raise Undivided("it draws random numbers, and did not when it was checked", lasting=True)
        self._said: list[list[bool]] = []
        odd: Undivided | None = None
        for part in range(1, len(self._sizes)):
            message = self._answer(part)
            if message is None:
                found.append(self._missing(part))
                self._said.append([t.requires_grad for t in found[part].tensors])
                continue
            said = message.value
            if message.kind == "raised":
                odd = odd or Undivided(f"a part of the batch fails in another process ({said})", lasting=True)
                continue
            self._note_pace(part, said["seconds"])
            found.append(Tree(said["skeleton"], tuple(t.clone() for t in message.tensors), self._given.classes))
            self._said.append(said["requires"])
            if self._rule.draws and said["drawn"] != drawn.digest:
                odd = odd or Undivided("what it draws cannot be cut into parts of the batch", lasting=True)
        if odd is not None:
            raise odd
        return found

    def _request_part(self, peer: int, part: int, states: list[torch.Tensor], graded: bool) -> None:
        """Have a follower compute a part."""
        piece = self._pieces[part]
        value = {
            "key": self.key,
            "module": self._module_key,
            "digest": self._described.digest,
            "flags": self._flags,
            "skeleton": piece.skeleton,
            "needs": self._needs,
            "graded": graded,
            "cut": self._cut(part),
            "draws": len(states),
            "statistics": self._rule.statistics,
        }
        self._request(peer, "forward", value, [*piece.tensors, *states])

    def _note_pace(self, part: int, seconds: float) -> None:
        peer = self._peers[part]
        if peer is not None:
            peer.pace = seconds / self._sizes[part]

    def _computed_here(self, module: nn.Module, part: int) -> Tree:
        """Compute a part in this process, from the random streams as they are."""
        piece = self._pieces[part]
        tensors = list(piece.tensors)
        for i in self._needs:
            tensors[i] = tensors[i].detach().requires_grad_()
        args, kwargs = piece.value(tensors)
        with self.modes(part):
            result = computed(module, args, kwargs)
        found = tree_of(result, "output", self._given.classes)
        if self.graded:
            self._graphs[part] = [tensors[i] for i in self._needs], list(found.tensors)
        return found

    def modes(self, part: int) -> AbstractContextManager[Any]:
        """What this part is computed under, forward and backward."""
        return part_modes(self._rule.draws, self._rule.statistics, self._cut(part), self._gather)

    def _cut(self, part: int) -> tuple[int, int, int, int]:
        """See `part_modes`."""
        return sum(self._sizes), sum(self._sizes[:part]), self._sizes[part], self._rule.dim

    def _missing(self, part: int) -> Tree:
        """The part of a follower that is gone, forward only; its graph stays here."""
        if self._rule.statistics:
            raise Undivided("a follower is gone")
        after = Streams(self._described.device)
        twin = Twin(self._described, copies=True)
        self._streams.restore()
        self._twins[part] = twin
        try:
            with under(self._flags):
                return self._computed_here(twin.module, part)
        finally:
            after.restore()

    # -- between parts

    def _gather(self, row: torch.Tensor) -> torch.Tensor:
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
        return table

    def _request(self, part: int, kind: str, value: Any, tensors: Sequence[torch.Tensor]) -> None:
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
            message = peer.link.receive(GRACE_S + PATIENCE * self.own_s)
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

    def backward(self, grads: Sequence[torch.Tensor | None], keep: bool) -> list[torch.Tensor | None]:
        """The gradients of what the call was given (those that need one), then of the trained tensors."""
        started = time.perf_counter()
        split = self.outputs.split(grads)
        asked = [part for part in range(1, len(self._sizes)) if any(g is not None for g in split[part])]
        meet = self._rule.statistics and len(asked) + 1 == len(self._sizes)
        for part in asked:
            if part in self._graphs or (self._rule.statistics and not meet):
                continue
            have = [g is not None for g in split[part]]
            sent = [g for g in split[part] if g is not None]
            value = {"key": self.key, "keep": keep, "have": have}
            self._request(part, "backward", value, sent)
        try:
            if self._rule.statistics and (not meet or None in self._peers[1:]):
                raise _Broken(None)
            parts = self._backward(split, asked, keep)
        except Exception as error:
            self._stop_others()
            if not isinstance(error, _Broken):
                raise
            parts = [self._whole_backward(grads)]
        if not keep:
            self.end()
        self.backward_s = time.perf_counter() - started
        count = len(self._needs)
        whole: list[torch.Tensor | None] = []
        for place, number in enumerate(self._needs):
            whole.append(self._joined_gradient(number, [part[place] if part else None for part in parts], len(parts)))
        for place in range(len(self._described.trained)):
            whole.append(_sum([part[count + place] for part in parts if part]))
        return whole

    def _backward(self, split: Any, asked: Sequence[int], keep: bool) -> list[list[torch.Tensor | None]]:
        parts: list[list[torch.Tensor | None]] = [[] for _ in self._sizes]
        if any(g is not None for g in split[0]):
            parts[0] = self._graph_backward(0, split[0], keep)
        for part in asked:
            message = None if part in self._graphs else self._answer(part)
            if message is None:
                if part not in self._graphs:
                    if self._rule.statistics:
                        raise _Broken(None)
                    self._missing(part)
                parts[part] = self._graph_backward(part, split[part], keep)
            elif message.kind == "raised":
                raise _Broken(message)
            else:
                tensors = iter(message.tensors)
                parts[part] = [next(tensors).clone() if there else None for there in message.value]
        return parts

    def _graph_backward(self, part: int, grads: Sequence[Any], keep: bool) -> list[torch.Tensor | None]:
        begins, ends = self._graphs[part] if keep else self._graphs.pop(part)
        trained = self._twins.get(part, self._own).trained
        pairs = [(end, grad) for end, grad in zip(ends, grads, strict=True) if grad is not None and end.requires_grad]
        if not pairs:
            return []
        wanted = [*begins, *trained]
        with self.modes(part):
            found = torch.autograd.grad(
                [end for end, _ in pairs], wanted, [grad for _, grad in pairs], retain_graph=keep, allow_unused=True
            )
        return list(found)

    def _joined_gradient(self, number: int, parts: list[torch.Tensor | None], count: int) -> torch.Tensor | None:
        """Of an input, from those of the parts."""
        dim = self._rule.cut[number]
        if dim is None or count == 1:
            return _sum(parts)
        if all(part is None for part in parts):
            return None
        pieces = [
            torch.zeros_like(piece.tensors[number]) if grad is None else grad
            for grad, piece in zip(parts, self._pieces, strict=True)
        ]
        return torch.cat(pieces, dim)

    def _whole_backward(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Forward and backward of the whole batch in this process."""
        after, twin = Streams(self._described.device), Twin(self._described, copies=True)
        self._streams.restore()
        try:
            tensors = list(self._given.tensors)
            for i in self._needs:
                tensors[i] = tensors[i].detach().requires_grad_()
            args, kwargs = self._given.value(tensors)
            with under(self._flags):
                ends = tree_of(computed(twin.module, args, kwargs), "output", self._given.classes).tensors
        finally:
            after.restore()
        pairs = [(end, grad) for end, grad in zip(ends, grads, strict=True) if grad is not None and end.requires_grad]
        wanted = [*(tensors[i] for i in self._needs), *twin.trained]
        return list(torch.autograd.grad([e for e, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))

    def differentiable(self, inputs: Sequence[torch.Tensor], grads: Sequence[Any]) -> list[torch.Tensor | None]:
        """The gradients with a graph of their own (``create_graph=True``), or of several outputs at once
        (``is_grads_batched=True``): the call is computed once more, whole.
        """
        after = Streams(self._described.device)
        weights = [t if isinstance(t, nn.Parameter) or t.requires_grad else t.clone() for t in self._described.tensors]
        replica = self._described.replica(weights)
        tensors = list(self._given.tensors)
        for i, tensor in zip(self._needs, inputs, strict=False):
            tensors[i] = tensor
        args, kwargs = self._given.value(tensors)
        self._streams.restore()
        try:
            with outside_transforms(), under(self._flags):
                ends = tree_of(computed(replica, args, kwargs), "output", self._given.classes).tensors
        finally:
            after.restore()
        pairs = [(end, grad) for end, grad in zip(ends, grads, strict=True) if grad is not None and end.requires_grad]
        return list(
            torch.autograd.grad(
                [e for e, _ in pairs],
                list(inputs),
                [g for _, g in pairs],
                create_graph=torch.is_grad_enabled(),
                allow_unused=True,
            )
        )

    def end(self) -> None:
        """No backward comes any more: let go of what it would need."""
        self._graphs.clear()
        self._twins.clear()
        self._drop()

    # -- as a part of the loop's graph

    def result(self) -> Any:
        """What the call returns."""
        joined = self.outputs.joined()
        if not self.graded:
            return self.outputs.value(joined)
        flags = self.outputs.by_joined(lambda part: self.requires[part])
        if not any(flags):
            return self.outputs.value(joined)
        trained = [self._described.tensors[number] for number in self._described.trained]
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
            return None, None, None, *call.differentiable(ctx.inputs, grads)
        keep = keeps_graph()
        with call.turn():
            return None, None, None, *call.backward(grads, keep)


def part_modes(
    draws: bool, statistics: bool, cut: tuple[int, int, int, int], gather: Callable[[torch.Tensor], torch.Tensor]
) -> AbstractContextManager[Any]:
    """What a part is computed under. ``cut``: samples of the batch, the part's first one, its own, their dimension."""
    if not draws and not statistics:
        return nullcontext()
    stack = ExitStack()
    if statistics:
        stack.enter_context(WholeStatistics(gather))
    if draws:
        stack.enter_context(WholeDraws(*cut))
    return stack


def _sum(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    there = [tensor for tensor in tensors if tensor is not None]
    total = there[0] if there else None
    for each in there[1:]:
        total = total + each  # type: ignore[operator]
    return total
