"""The value of Tune's metric in a result, and which trials are best by it, both as Tune says."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from numbers import Number
from operator import itemgetter
from typing import Any, TypeVar

T = TypeVar("T")


def value_of(result: Mapping[str, Any], metric: str) -> float | None:
    """The metric's value in ``result``; a name such as "eval/loss" may lead into nested results.

    None: there is no such value, or it is no finite number. A scalar array or tensor is a number.
    """
    value = result[metric] if metric in result else next((each for name, each in flat(result) if name == metric), None)
    if not isinstance(value, Number) and getattr(value, "shape", None) != ():
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def ranked(last: Iterable[tuple[T, float | None]], mode: str | None) -> list[tuple[T, float]]:
    """The trials that have a last value, with it, best first; equal ones stay in their order. [] if there is no mode.

    So Ray's `ResultGrid.get_best_result` compares them.
    """
    known = [(trial, value) for trial, value in last if value is not None]
    return sorted(known, key=itemgetter(1), reverse=mode == "max") if mode in ("min", "max") else []


def flat(result: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Each value in ``result`` that holds no others, with the name that Tune gives it: "eval/loss" where it is nested.

    ``above``: what begins each name.
    """
    for key, value in result.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{key}/")
        else:
            yield f"{above}{key}", value
