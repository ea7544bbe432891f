"""Whether a call can be divided: a follower computes it whole and in parts, and compares what comes of both.

It compares outputs, gradients, statistics of batches and random streams. The leader computes the call meanwhile, as
alone, and compares its output with the follower's whole one. So nothing of the leader's process is touched, and its
loop does not wait. What makes one sample's output depend on another sample shows as a difference; what a forward leaves
behind shows in the follower's copy of the module.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fluidtune.error_lines import failure

from ..references import dumped
from .batch_statistics import Gather, Recorded, SeenStatistics, WholeStatistics
from .computation import Computation, Modes, Streams, cut_of, other_streams, part_modes
from .description import Watch, statistics_of
from .flags import Flags, under
from .parts import Outputs, Rule, candidates, join_rule, joined_gradients, parts_of, sizes_of
from .trees import Classes, StaysWhole, Tree, same_but_tensors
from .weights import same_bytes

#: By type, how far outputs may differ, as a part of the largest, and gradients, as a part of their norm: some 1e6 times
#: the rounding of float64, 1e3 of float32 and 10 of the halves, as sums are taken in another order (docs/divided.md).
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
#: A gradient below this part of the largest one's norm, in units of the type's rounding, may be rounding alone.
_ROUNDING = 1000.0


@dataclass(frozen=True)
class Question:
    """A call that may be divided, as the leader sends it. ``skeleton``: of the module, see `Description`.

    ``needs``: numbers of the inputs that get gradients. ``graded``: there may be a backward. ``shares``: by part, how
    large it is. ``known``: the rule of the call's structure; None: it is looked for.
    """

    skeleton: bytes
    needs: Sequence[int]
    graded: bool
    flags: Flags
    shares: Sequence[float]
    known: Rule | None


@dataclass(frozen=True)
class Answer:
    """How the call is divided. ``drawn``: the random streams after it, as a digest. ``skeleton``: of its whole output.

    ``seconds``: of its forward, and of its backward.
    """

    rule: Rule
    drawn: bytes
    skeleton: bytes
    seconds: tuple[float, float]


class _Copy:
    """A replica that may be written, with weights of its own."""

    def __init__(self, skeleton: bytes, weights: Sequence[torch.Tensor], classes: Classes) -> None:
        own = [tensor.detach().clone() for tensor in weights]
        self.tensors = [nn.Parameter(t) if w.requires_grad else t for t, w in zip(own, weights, strict=True)]
        self.module = Tree(skeleton, tuple(self.tensors), classes).value()
        self.trained = [tensor for tensor in self.tensors if tensor.requires_grad]

    def statistics(self) -> list[torch.Tensor]:
        """What a forward may write: the running statistics of batch normalisation."""
        return [buffer for layer in self.module.modules() for buffer in statistics_of(layer)]


class Check:
    """One check. ``weights``: of the module, as the leader's are; ``given``: what it is called with.

    ``streams``: from which the call draws.
    """

    def __init__(self, question: Question, weights: Sequence[torch.Tensor], given: Tree, streams: Streams) -> None:
        self._question, self._given = question, given
        self._weights = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in weights]
        self._streams, self._flags = streams, question.flags

    def answer(self) -> tuple[Answer, list[torch.Tensor]]:
        """The answer, and the tensors of the whole output. Raises StaysWhole."""
        seen = SeenStatistics()
        whole, copy = self._whole(seen)
        self._after = Streams(self._streams.device)
        draws = self._after.digest != self._streams.digest
        self._cotangents = _cotangents(whole.output.tensors)
        started = self._now()
        self._gradients: list[torch.Tensor | None] = []
        if self._question.graded and any(grad is not None for grad in self._cotangents):
            try:
                self._gradients = whole.gradients(self._cotangents, lambda: seen)
            except Exception as error:
                raise StaysWhole(f"its backward fails ({failure(error)})") from error
            if any(grad is not None and grad.layout is not torch.strided for grad in self._gradients):
                raise StaysWhole("a gradient of it is sparse")
        seconds = self._forward_s, self._now() - started
        reasons = []
        known = self._question.known
        for candidate in (known,) if known is not None else candidates(self._given):
            rule = replace(candidate, join=(), draws=draws, statistics=seen.seen)
            samples = rule.samples(self._given)
            if samples is None or samples < 2:
                continue
            sizes = sizes_of(samples, self._question.shares[:samples])
            try:
                found = self._in_parts(whole, copy, rule, sizes)
            except StaysWhole as error:
                reasons.append(str(error))
            else:
                answer = Answer(found, self._after.digest, whole.output.skeleton, seconds)
                return answer, [tensor.detach() for tensor in whole.output.tensors]
        raise StaysWhole(reasons[0] if reasons else "no dimension of its inputs is that of samples")

    def _computed(self, copy: _Copy, given: Tree, modes: Modes) -> Computation:
        self._streams.restore()
        with under(self._flags):
            return Computation(copy.module, copy.trained, given, self._question.needs, modes)

    def _whole(self, seen: SeenStatistics) -> tuple[Computation, _Copy]:
        """The call whole, if what its forward does besides does not show that it cannot be divided."""
        copy = self._copy()
        first, watch, others = self._skeleton(copy), Watch(copy.module, self._given.classes.pickling), other_streams()
        given = replace(self._given, tensors=tuple(tensor.clone() for tensor in self._given.tensors))
        started = self._now()
        try:
            whole = self._computed(copy, given, lambda: seen)
            self._forward_s = self._now() - started
        except StaysWhole:
            raise
        except Exception as error:
            raise StaysWhole(f"it fails ({failure(error)})") from error
        if watch.leaves_outside():
            raise StaysWhole("it leaves something behind outside of it")
        if other_streams() != others:
            raise StaysWhole("it draws from the random numbers of Python or NumPy")
        if not all(map(same_bytes, given.tensors, self._given.tensors)):
            raise StaysWhole("it changes its inputs")
        if self._skeleton(copy) != first:
            raise StaysWhole("it leaves something behind in its attributes")
        self._refuse_written(copy)
        _refuse_views(whole.output, [*given.tensors, *copy.tensors])
        return whole, copy

    def _now(self) -> float:
        if self._streams.device is not None:
            torch.get_device_module(self._streams.device).synchronize(self._streams.device)
        return time.perf_counter()

    def _copy(self) -> _Copy:
        return _Copy(self._question.skeleton, self._weights, self._given.classes)

    def _in_parts(self, whole: Computation, copy: _Copy, rule: Rule, sizes: Sequence[int]) -> Rule:
        """The rule, with how outputs are joined, if parts of these sizes make what the whole call has made."""
        met = Recorded()
        if rule.statistics:  # as parts compute them, from which each part gets the statistics of the whole
            modes: Modes = lambda: WholeStatistics(met.whole)  # noqa: E731
            again = self._copy()
            statistics = self._computed(again, self._given, modes)
            if self._gradients:
                statistics.gradients(self._cotangents, modes)
            if any(self._difference(*pair) for pair in zip(again.statistics(), copy.statistics(), strict=True)):
                raise StaysWhole("its statistics of the batch are not those of torch")
        pieces = parts_of(self._given, rule, sizes)
        parts: list[tuple[Computation, Modes]] = []
        for number, piece in enumerate(pieces):
            gather: Gather = met.part()
            modes = part_modes(rule.draws, rule.statistics, cut_of(rule, sizes, number), gather)
            try:
                parts.append((self._computed(self._copy(), piece, modes), modes))
            except Exception as error:
                raise StaysWhole(f"a part of the batch fails ({failure(error)})") from error
            if Streams(self._streams.device).digest != self._after.digest:
                raise StaysWhole("what it draws cannot be cut into parts of the batch")
        trees = [part.output for part, _ in parts]
        found = join_rule(whole.output, trees, rule)
        if isinstance(found, str):
            raise StaysWhole(found)
        outputs = Outputs(trees, found)
        if not outputs.fit():
            raise StaysWhole("what parts of the batch return differs in more than its samples")
        ours = outputs.joined()
        if [any(of_parts) for of_parts in zip(*(part.requires for part, _ in parts), strict=True)] != whole.requires:
            raise StaysWhole("a part of the batch has a gradient where the batch has none")
        for place, (own, other) in enumerate(zip(ours, whole.output.tensors, strict=True)):
            if (off := self._difference(own, other.detach())) is not None:
                raise StaysWhole(f"it mixes samples: output {place} differs by {off}")
        if self._gradients:
            split = outputs.split(self._cotangents)
            made = [part.gradients(grads, modes) for (part, modes), grads in zip(parts, split, strict=True)]
            _compare_gradients(
                joined_gradients(found, self._question.needs, pieces, made), self._gradients, self._flags
            )
        if rule.statistics and not met.agree(_tolerance(whole.output.tensors, self._flags)):
            raise StaysWhole("its parts do not have the statistics of the batch")
        return found

    def _difference(self, own: torch.Tensor, other: torch.Tensor) -> str | None:
        return difference(own, other, self._flags)

    def _skeleton(self, copy: _Copy) -> bytes:
        numbers = {id(tensor): number for number, tensor in enumerate(copy.tensors)}
        classes = self._given.classes

        def number(obj: Any) -> Any:
            return numbers.get(id(obj), "new") if isinstance(obj, torch.Tensor) else classes.number(obj)

        try:
            return dumped(copy.module, number, classes.pickling)
        except Exception as error:
            return failure(error).encode()

    def _refuse_written(self, copy: _Copy) -> None:
        """StaysWhole: the forward has changed weights or a buffer, other than `_Copy.statistics`."""
        allowed = {id(buffer) for buffer in copy.statistics()}
        names = {id(t): name for name, t in (*copy.module.named_parameters(), *copy.module.named_buffers())}
        for number, (own, tensor) in enumerate(zip(copy.tensors, self._weights, strict=True)):
            if id(own) not in allowed and not same_bytes(own.detach(), tensor.detach()):
                raise StaysWhole(f"its forward changes {names.get(id(own), f'tensor {number}')}")


def _compare_gradients(
    ours: Sequence[torch.Tensor | None], theirs: Sequence[torch.Tensor | None], flags: Flags
) -> None:
    norms = [0.0 if each is None else float(each.detach().abs().double().norm()) for each in theirs]
    largest = max(norms, default=0.0)
    for place, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        if own is None and other is None:
            continue
        if (own is None) != (other is None):
            if max(norms[place], 0.0 if own is None else float(own.double().norm())) == 0.0:
                continue
            raise StaysWhole(f"gradient {place} is there for a part of the batch only, or for the batch only")
        assert own is not None and other is not None
        if not other.dtype.is_floating_point and not other.dtype.is_complex:
            continue
        tolerance = _tolerance([other], flags)
        off = (
            float((own.double() - other.double()).norm())
            if not other.is_complex()
            else float((own - other).abs().norm())
        )
        floor = _ROUNDING * torch.finfo(other.dtype).eps * largest
        if (
            not off <= 5 * tolerance * max(norms[place], float(own.abs().double().norm())) + floor
            and norms[place] == norms[place]
        ):
            raise StaysWhole(f"it mixes samples: gradient {place} differs by {_percent(off, norms[place])}")


def _tolerance(tensors: Sequence[torch.Tensor], flags: Flags) -> float:
    casts = [flags[name] for name in flags if name.endswith("autocast")]
    types = [*(tensor.dtype for tensor in tensors), *(kind for enabled, kind in casts if enabled)]
    return max((TOLERANCE.get(each, 1e-9) for each in types), default=1e-9)


def apart_from(own: Tree, other: Tree, flags: Flags) -> str | None:
    """By what two values of a call differ, in words; None: by no more than rounding."""
    if not same_but_tensors(own, other) or len(own.tensors) != len(other.tensors):
        return "it returns something else"
    for place, pair in enumerate(zip(own.tensors, other.tensors, strict=True)):
        if (off := difference(*pair, flags)) is not None:
            return f"output {place} differs by {off}"
    return None


def difference(own: torch.Tensor, other: torch.Tensor, flags: Flags) -> str | None:
    """By how much two outputs differ, in words; None: by no more than rounding."""
    if own.dtype != other.dtype or own.shape != other.shape:
        return "its type or shape"
    if not other.numel():
        return None
    if not (other.dtype.is_floating_point or other.dtype.is_complex):
        return None if torch.equal(own, other) else "some of its numbers"
    wide = torch.complex128 if other.is_complex() else torch.float64
    a, b = own.to(wide), other.to(wide)
    scale = float(b.abs().nan_to_num(0.0, 0.0).max())
    if bool(torch.isclose(a, b, 0.0, _tolerance([other], flags) * scale, equal_nan=True).all()):
        return None
    off = float((a - b).abs().max())
    return _percent(off, scale) if off < float("inf") else "what is not finite in it"


def _percent(off: float, scale: float) -> str:
    return f"{100 * off / scale:.2g} %" if scale else f"{off:.2g} from 0"


def _cotangents(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """For each output that has a gradient, numbers of which no two samples have the same."""
    found: list[torch.Tensor | None] = []
    for place, tensor in enumerate(outputs):
        if not tensor.requires_grad:
            found.append(None)
            continue
        steps = torch.arange(1, tensor.numel() + 1, dtype=torch.float64)
        values = torch.cos(steps * (1.0 + 0.1 * place)).reshape(tensor.shape)
        found.append(values.to(device=tensor.device, dtype=tensor.dtype))
    return found


def _refuse_views(output: Tree, others: Sequence[torch.Tensor]) -> None:
    held = {tensor.untyped_storage().data_ptr() for tensor in others if tensor.numel()}
    for place, tensor in enumerate(output.tensors):
        if tensor.numel() and tensor.untyped_storage().data_ptr() in held:
            raise StaysWhole(f"output {place} is an input or a weight, or a view of one")
