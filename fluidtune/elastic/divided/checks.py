"""Whether a call can be divided: it is computed whole and divided, and outputs, gradients and random streams compared.

Nothing of it touches the module: both are computed by twins of it. What makes one sample's output depend on another
sample shows as a difference; what a forward leaves behind shows in the twin.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from fluidtune.error_lines import failure

from .batch_statistics import SeenStatistics
from .call import Call, Streams, Twin, Undivided, other_streams, restore_others
from .description import Classes, Description, dumped
from .flags import Flags, under
from .parts import Odd, Rule, Tree, candidates, join_rule, tree_of
from .torch_private import computed
from .weights import same_bytes

#: By type, how far outputs may differ, as a part of the largest, and gradients, as a part of their norm: some 1e6 times
#: the rounding of float64, 1e3 of float32 and 10 of the halves, as sums are taken in another order (docs/divided.md).
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
#: A gradient below this part of the largest one's norm, in units of the type's rounding, may be rounding alone.
_ROUNDING = 1000.0


class Later(Exception):
    """Nothing was found out, because a follower was lost."""


@dataclass
class Whole:
    """A call that a twin has computed whole. ``requires``: which tensors of its output have a gradient. ``seconds``: of
    forward and backward, if there is one.
    """

    output: Tree
    requires: list[bool]
    gradients: list[torch.Tensor | None]
    cotangents: list[torch.Tensor | None]
    after: Streams
    buffers: list[torch.Tensor]
    draws: bool
    statistics: bool
    seconds: float


class CannotDivide(Exception):
    """Calls like this one stay whole; the message says why, in words of the user's."""


def computed_whole(twin: Twin, described: Description, given: Tree, flags: Flags, classes: Classes) -> Whole:
    """Compute the call whole, by a twin of the module. The random streams of torch are where they were.

    Raises:
        CannotDivide: what the forward does besides shows that it cannot be divided.
    """
    before, others = Streams(described.device), other_streams()
    twin.refresh()
    first = _skeleton(twin, classes)
    tensors = [tensor.detach().clone() for tensor in given.tensors]
    needs = [i for i, tensor in enumerate(given.tensors) if tensor.requires_grad] if flags["grad"] else []
    for i in needs:
        tensors[i].requires_grad_()
    outside = described.outside()
    started = time.perf_counter()
    try:
        args, kwargs = given.value(tensors)
        with SeenStatistics() as seen:
            output = tree_of(computed(twin.module, args, kwargs), "output", classes)
        after = Streams(described.device)
        moved = other_streams() != others
        leaves = outside.has_changed()
    except Odd as error:
        raise CannotDivide(str(error)) from error
    except Exception as error:
        raise CannotDivide(f"it fails ({failure(error)})") from error
    finally:
        before.restore()
        restore_others(others)
        outside.restore()
    if leaves:
        raise CannotDivide("it leaves something behind outside of it")
    if moved:
        raise CannotDivide("it draws from the random numbers of Python or NumPy")
    if not all(same_bytes(own.detach(), tensor.detach()) for own, tensor in zip(tensors, given.tensors, strict=True)):
        raise CannotDivide("it changes its inputs")
    if _skeleton(twin, classes) != first:
        raise CannotDivide("it leaves something behind in its attributes")
    _refuse_written(twin, described)
    _refuse_views(output, [*tensors, *twin.tensors])
    cotangents = _cotangents(output.tensors)
    gradients: list[torch.Tensor | None] = []
    if flags["grad"] and any(grad is not None for grad in cotangents):
        wanted = [*(tensors[i] for i in needs), *twin.trained]
        pairs = [(end, grad) for end, grad in zip(output.tensors, cotangents, strict=True) if grad is not None]
        try:
            gradients = list(
                torch.autograd.grad([e for e, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
            )
        except Exception as error:
            raise CannotDivide(f"its backward fails ({failure(error)})") from error
        if any(grad is not None and grad.layout is not torch.strided for grad in gradients):
            raise CannotDivide("a gradient of it is sparse")
    seconds = time.perf_counter() - started
    detached = replace(output, tensors=tuple(tensor.detach() for tensor in output.tensors))
    return Whole(
        detached,
        [tensor.requires_grad for tensor in output.tensors],
        gradients,
        cotangents,
        after,
        [twin.tensors[i].clone() for i in twin.written],
        after.digest != before.digest,
        seen.seen,
        seconds,
    )


def computed_again(twin: Twin, given: Tree, flags: Flags) -> list[torch.Tensor]:
    """The tensors of the call's output, computed whole by a twin, without gradients.

    Raises:
        CannotDivide: it fails.
    """
    twin.refresh()
    try:
        args, kwargs = given.value()
        with under(flags):
            return list(tree_of(computed(twin.module, args, kwargs), "output", given.classes).tensors)
    except Exception as error:
        raise CannotDivide(f"it fails ({failure(error)})") from error


def find_rule(
    whole: Whole,
    twin: Twin,
    described: Description,
    given: Tree,
    arguments: Any,
    flags: Flags,
    known: Rule | None,
    divide: Callable[[Rule], Call | None],
) -> Rule:
    """The rule by which the call is divided. ``known``: that of its structure; None: it is looked for.

    ``divide``: makes a call that the twin computes the first part of; None: there are too few samples.

    Raises:
        CannotDivide: there is none.
        Later: a follower was lost.
    """
    reasons = []
    for candidate in (known,) if known is not None else candidates(given, arguments):
        rule = replace(candidate, join=(), draws=whole.draws, statistics=whole.statistics)
        twin.refresh()
        call = divide(rule)
        if call is None:
            continue
        before = Streams(described.device)
        try:
            return _compared(whole, call, twin, described, rule, flags)
        except Undivided as error:
            if not error.lasting:
                raise Later(str(error)) from error
            reasons.append(str(error))
        except CannotDivide as error:
            reasons.append(str(error))
        finally:
            call.end()
            before.restore()
    raise CannotDivide(reasons[0] if reasons else "no dimension of its inputs is that of samples")


def _compared(whole: Whole, call: Call, twin: Twin, described: Description, rule: Rule, flags: Flags) -> Rule:
    parts = call.compute()
    drawn = Streams(described.device)
    found = join_rule(whole.output, parts, rule)
    if isinstance(found, str):
        raise CannotDivide(found)
    outputs = call.join(found, parts)
    if not outputs.fit():
        raise CannotDivide("what parts of the batch return differs in more than its samples")
    ours = outputs.joined()
    if len(ours) != len(whole.output.tensors):
        raise CannotDivide("parts of the batch return another number of tensors")
    if outputs.by_joined(lambda part: call.requires[part]) != whole.requires:
        raise CannotDivide("a part of the batch has a gradient where the batch has none")
    for place, (own, other) in enumerate(zip(ours, whole.output.tensors, strict=True)):
        if (off := difference(own, other, flags)) is not None:
            raise CannotDivide(f"it mixes samples: output {place} differs by {off}")
    if drawn.digest != whole.after.digest:
        raise CannotDivide("what it draws cannot be cut into parts of the batch")
    if rule.statistics:
        for number, other in zip(twin.written, whole.buffers, strict=True):
            if (off := difference(twin.tensors[number], other, flags)) is not None:
                raise CannotDivide(f"its statistics of the batch differ by {off}")
    if whole.gradients:
        gradients = call.backward(whole.cotangents, keep=False)
        _compare_gradients(gradients, whole.gradients, flags)
    return found


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
            raise CannotDivide(f"gradient {place} is there for a part of the batch only, or for the batch only")
        assert own is not None and other is not None
        if not other.dtype.is_floating_point and not other.dtype.is_complex:
            continue
        tolerance = _tolerance(other, flags)
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
            raise CannotDivide(f"it mixes samples: gradient {place} differs by {_percent(off, norms[place])}")


def _tolerance(tensor: torch.Tensor, flags: Flags) -> float:
    types = [tensor.dtype, *(flags[name][1] for name in flags if name.endswith("autocast") and flags[name][0])]
    return max(TOLERANCE.get(each, 1e-9) for each in types)


def difference(own: torch.Tensor, other: torch.Tensor, flags: Flags) -> str | None:
    """By how much two outputs differ, in words; None: by no more than rounding."""
    if own.dtype != other.dtype or own.shape != other.shape:
        return "its type or shape"
    if not other.numel():
        return None
    if not (other.dtype.is_floating_point or other.dtype.is_complex):
        return None if torch.equal(own, other) else "some of its numbers"
    same = same_bytes(own.contiguous(), other.contiguous())
    if same:
        return None
    wide = torch.complex128 if other.is_complex() else torch.float64
    a, b = own.to(wide), other.to(wide)
    odd = ~(torch.isfinite(b) & torch.isfinite(a))
    if bool(odd.any()):
        if not torch.equal(torch.nan_to_num(a[odd], 1.0), torch.nan_to_num(b[odd], 1.0)) or bool(
            (a[odd].isnan() != b[odd].isnan()).any()
        ):
            return "what is not finite in it"
        a, b = a[~odd], b[~odd]
        if not b.numel():
            return None
    off, scale = float((a - b).abs().max()), float(b.abs().max())
    return None if off <= _tolerance(other, flags) * scale else _percent(off, scale)


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


def _skeleton(twin: Twin, classes: Classes) -> bytes:
    numbers = {id(tensor): number for number, tensor in enumerate(twin.tensors)}

    def number(obj: Any) -> Any:
        return numbers.get(id(obj), "new") if isinstance(obj, torch.Tensor) else classes.number(obj)

    try:
        return dumped(twin.module, number, classes.pickling)
    except Exception as error:
        return failure(error).encode()


def _refuse_written(twin: Twin, described: Description) -> None:
    """CannotDivide: the forward has changed a buffer, other than the statistics of batch normalisation."""
    allowed = {
        id(buffer)
        for module in twin.module.modules()
        if isinstance(module, _BatchNorm)
        for buffer in module.buffers(recurse=False)
    }
    names = {id(t): name for name, t in (*twin.module.named_parameters(), *twin.module.named_buffers())}
    for number, (own, tensor) in enumerate(zip(twin.tensors, described.tensors, strict=True)):
        if id(own) not in allowed and not (own.is_cuda or same_bytes(own.detach(), tensor.detach())):
            raise CannotDivide(f"its forward changes {names.get(id(own), f'tensor {number}')}")
        if own.is_cuda and id(own) not in allowed and not torch.equal(own.detach(), tensor.detach()):
            raise CannotDivide(f"its forward changes {names.get(id(own), f'tensor {number}')}")


def _refuse_views(output: Tree, others: Sequence[torch.Tensor]) -> None:
    held = {tensor.untyped_storage().data_ptr() for tensor in others if tensor.numel()}
    for place, tensor in enumerate(output.tensors):
        if tensor.numel() and tensor.untyped_storage().data_ptr() in held:
            raise CannotDivide(f"output {place} is an input or a weight, or a view of one")
