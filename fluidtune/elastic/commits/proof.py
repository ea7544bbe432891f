"""The proof that a trial's commits are whole: an epoch run again from a commit is compared with what it was before.

A commit holds what the loop has prepared. A loop may carry more from epoch to epoch (a counter, an average made by
hand, a scheduler), and would go on from its commit with that as at the start. Nobody can see that in the commit. But
the trial itself has run the epoch behind it: what it reported then, and what all prepared objects became, is in the
next commit, and an epoch that is run again must make the same of them.

On cores, all must be equal to the bit, if the same kind of cores computes with as many threads, and no call of a module
was divided (`machine`). Elsewhere sums are made in another order each time, and `_METRICS_APART` and `_STEPS_APART` say
what still is the same. Python's
own random stream is restored but not compared: other threads of the process, as those of trackers, draw from it. What a
loop makes of its draws shows elsewhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import numpy
import torch

#: How far two metrics or numbers may be apart, relative to the larger one, where sums have no fixed order. Source: of
#: eight loops that kept something of their own, the one that was nearest to right was off by 0.03.
_METRICS_APART = 0.02
#: How far tensors may be apart together, relative to how far the epoch has moved them. Judgement: an epoch with another
#: rate of learning, or another state of its optimizer, is off by more, and rounding by less unless the loop is chaotic.
_STEPS_APART = 0.1
#: Relative to its norm, what moves a tensor no more than rounding does. Source: `torch.finfo(torch.float32).eps`, eight
#: times, for the layers behind each other.
_ROUNDING = 1e-6
#: Words in the names of what is measured anew each time: times, speeds and memory.
_MEASURED = re.compile(
    r"\b(time\w*|date|secs?|seconds?|minutes?|hours?|duration|elapsed|eta|speed|throughput|fps|latency|mem|memory|rss|"
    r"vram|ram|gpu|cpu|pid|host\w*)\b|\w\W+m?s$",
    re.IGNORECASE,
)
#: How many differences a message names.
_NAMED = 3


@dataclass(frozen=True)
class Epoch:
    """What an epoch was given and what it made of it: all prepared state before and after it, and its reports."""

    before: dict[str, Any]
    after: dict[str, Any]
    reports: Sequence[dict[str, Any]]


def machine(device: torch.device, divided: bool = False) -> str:
    """What computes here: where two names are equal, the same operations give the same numbers to the bit.

    Empty where they do not: on GPUs, and where calls of modules are ``divided``.
    """
    if device.type != "cpu" or divided:
        return ""
    return f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def is_measured(name: str) -> bool:
    """Whether what has this name is measured anew each time, as it seems."""
    return _MEASURED.search(re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", name)) is not None  # in words


def differences(
    now: dict[str, Any], reports: Sequence[dict[str, Any]], then: Epoch, names: Sequence[str], exact: bool
) -> str | None:
    """What an epoch that was run again has made differently, in words; None: the commits are proved.

    ``now``: the live state (`TrialState.now`), with ``names`` of its objects. ``reports``: those of this run.
    """
    compare = _Comparison(exact)
    said = []
    if metrics := list(_metrics_apart(reports, then.reports, compare)):
        said.append("reports " + ", ".join(metrics[:_NAMED]))
    if parts := list(_parts_apart(now, then, names, compare)):
        said.append(f"ends with other values of {', '.join(parts[:_NAMED])}")
    return " and ".join(said) or None


def _metrics_apart(
    now: Sequence[dict[str, Any]], then: Sequence[dict[str, Any]], compare: _Comparison
) -> Iterator[str]:
    if len(now) != len(then):
        yield f"{len(now)} times, not {len(then)}"
        return
    for mine, others in zip(now, then, strict=True):
        for name in dict.fromkeys((*others, *mine)):
            if is_measured(str(name)):
                continue
            if name not in mine or name not in others:
                yield f"{name}, which it did not before" if name in mine else f"no {name}"
            elif not compare.equal(mine[name], others[name]):
                yield f"{name} {_short(mine[name])}, not {_short(others[name])}"


def _parts_apart(now: dict[str, Any], then: Epoch, names: Sequence[str], compare: _Comparison) -> Iterator[str]:
    before, after = then.before, then.after
    for name, mine, others, was in zip(names, now["stateful"], after["stateful"], before["stateful"], strict=True):
        if compare.equal(mine, others, was):
            continue
        if not name.startswith("elastic.state()"):
            yield f"the {name}"
            continue
        for key in dict.fromkeys((*others, *mine)):
            if not compare.equal(mine.get(key), others.get(key), was.get(key)):
                yield f"{key!r} of {name}"
    if not compare.equal(now["loose"], after["loose"], before["loose"]):
        yield "a parameter that belongs to no module"
    if not compare.equal(now["parameters"], after["parameters"], before["parameters"]):
        yield "a gradient"
    exactly = _Comparison(exact=True)
    for what, same in (("generators", exactly.equal), ("samplers", compare.equal)):
        for number, parts in enumerate(zip(now[what], after[what], strict=True), 1):
            if not same(*parts):
                yield f"the {what[:-1]} of DataLoader {number}"
    for library in sorted({*now["streams"], *after["streams"]} - {"python"}):
        if not exactly.equal(now["streams"].get(library), after["streams"].get(library)):
            yield f"the random stream of {library}"


class _Comparison:
    """``exact``: to the bit. Else tensors are compared together: a module's, and an optimizer's of one name.

    So a gradient that is zero but for rounding, as of a bias in front of a norm, does not count.
    """

    def __init__(self, exact: bool) -> None:
        self._exact = exact
        self._deep: set[tuple[int, int]] = set()
        #: By group of tensors the squares of: how far they are apart, how far the epoch has moved them, their norm.
        self._sums: dict[str, list[float]] = {}

    def equal(self, mine: Any, others: Any, was: Any = None) -> bool:
        """Whether two values are the same. ``was``: the value before the epoch."""
        self._sums.clear()
        self._deep.clear()
        return self._same(mine, others, was) and all(
            off <= max(_STEPS_APART**2 * moved, _ROUNDING**2 * size) for off, moved, size in self._sums.values()
        )

    def _same(self, mine: Any, others: Any, was: Any = None, key: Any = None, group: str = "") -> bool:
        if mine is others:
            return True
        if isinstance(mine, numpy.generic | numpy.ndarray) and isinstance(others, numpy.generic | numpy.ndarray):
            if mine.dtype.kind in "biufc" and others.dtype.kind in "biufc":
                return self._same_tensors(torch.as_tensor(mine.copy()), torch.as_tensor(others.copy()), None, group)
            return bool(numpy.array_equal(mine, others))
        if isinstance(mine, torch.Tensor) and isinstance(others, torch.Tensor):
            return self._same_tensors(mine.detach(), others.detach(), was, group)
        if isinstance(mine, torch.Tensor) or isinstance(others, torch.Tensor):
            return False
        if isinstance(mine, dict) and isinstance(others, dict):
            old = was if isinstance(was, dict) else {}
            return mine.keys() == others.keys() and all(
                # An optimizer's tensors have names below the numbers of their parameters.
                self._same(mine[each], others[each], old.get(each), each, str(each) if isinstance(key, int) else group)
                for each in mine
            )
        if isinstance(mine, list | tuple) and isinstance(others, list | tuple):
            past = was if isinstance(was, list | tuple) and len(was) == len(mine) else [None] * len(mine)
            return len(mine) == len(others) and all(map(self._same, mine, others, past))
        if isinstance(mine, Number) and isinstance(others, Number):
            return self._same_numbers(mine, others)
        return self._same_objects(mine, others)

    def _same_numbers(self, mine: Any, others: Any) -> bool:
        if mine == others or (mine != mine and others != others):  # NaN twice
            return True
        floats = isinstance(mine, float) and isinstance(others, float)
        if self._exact or not floats or not (math.isfinite(mine) and math.isfinite(others)):
            return False
        return bool(abs(mine - others) <= _METRICS_APART * max(abs(mine), abs(others)))

    def _same_tensors(self, mine: torch.Tensor, others: torch.Tensor, was: Any, group: str) -> bool:
        if mine.shape != others.shape or mine.dtype != others.dtype:
            return False
        mine, others = _plain(mine), _plain(others)
        if not (mine.is_floating_point() or mine.is_complex()):
            return torch.equal(mine, others)
        if self._exact:
            return bool(((mine == others) | (mine.isnan() & others.isnan())).all())
        if not torch.equal(mine.isfinite(), others.isfinite()):
            return False
        wide = torch.complex128 if mine.is_complex() else torch.float64
        mine, others = (torch.nan_to_num(each.to(wide), 0.0, 0.0, 0.0) for each in (mine, others))
        known = isinstance(was, torch.Tensor) and was.shape == others.shape
        start = _plain(was.detach()).to(wide) if known else 0 * others
        found = [float(each.norm()) ** 2 for each in (mine - others, others - start, others)]
        self._sums[group] = [a + b for a, b in zip(self._sums.get(group, [0.0] * 3), found, strict=True)]
        return True

    def _same_objects(self, mine: Any, others: Any) -> bool:
        if type(mine).__qualname__ != type(others).__qualname__:
            return False
        if (id(mine), id(others)) in self._deep:
            return True
        self._deep.add((id(mine), id(others)))
        try:
            if bool(mine == others):
                return True
        except Exception:  # it cannot be said in one word, as for arrays in arrays
            pass
        if isinstance(mine, str | bytes | set | frozenset):
            return False
        if hasattr(mine, "__code__"):
            return bool(mine.__code__.co_code == others.__code__.co_code)
        return self._same(getattr(mine, "__dict__", None), getattr(others, "__dict__", None))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, as numbers in memory."""
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    return (tensor if tensor.layout == torch.strided else tensor.to_dense()).cpu()


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor | numpy.generic) and getattr(value, "ndim", 1) == 0:
        value = value.item()
    said = f"{value:.6g}" if isinstance(value, float) else str(value)
    return said if len(said) <= 40 else f"{said[:37]}..."
