"""The value of Tune's metric in a result: found under the name, and taken for a number, as Tune does both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from numbers import Number
from typing import Any


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


def flat(result: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Each value in ``result`` that holds no others, with the name that Tune gives it: "eval/loss" where it is nested.

    ``above``: what begins each name.
    """
    for key, value in result.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{key}/")
        else:
            yield f"{above}{key}", value
