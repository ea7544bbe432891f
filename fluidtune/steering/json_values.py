"""What somebody types or sends as JSON, read strictly: what Python's json takes beyond the standard is an error."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping
from typing import Any

#: The longest message, in bytes. Judgement: parameters are numbers and words.
LONGEST = 1 << 20
#: Lists and objects within each other. Judgement: Tune copies and saves a configuration recursively, and Python's limit
#: is 1,000 calls.
DEEPEST = 50


def cut(text: str, most: int = 100) -> str:
    """The text in one line; its beginning where it is longer than ``most`` characters."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def read_json(text: str | bytes) -> Any:
    """What the text means.

    Raises:
        ValueError: it is no JSON, has a number that no float holds, a key twice in an object, or text that is no
            Unicode, or is nested deeper than `DEEPEST`. The message is one short line.
    """
    try:
        found = json.loads(text, parse_constant=_constant, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEEPEST}")
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos + 1}")
    _check(found, DEEPEST)
    return found


def kind_of(value: Any) -> str:
    """The kind of a JSON value, in words; "" for what is no JSON value."""
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case numbers.Real():
            return "a number"
        case str():
            return "text"
        case list() | tuple():
            return "a list"
        case Mapping():
            return "an object"
    return ""


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _check(value: Any, deeper: int) -> None:
    if isinstance(value, int | float):
        try:
            finite = math.isfinite(value)
        except OverflowError:
            finite = False
        if not finite:
            raise ValueError("a number is greater than any float")
    elif isinstance(value, str):
        if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise ValueError("text has half of a character (a lone surrogate)")
    elif isinstance(value, list | dict):
        if not deeper:
            raise ValueError(f"it is nested deeper than {DEEPEST}")
        for each in value if isinstance(value, list) else (*value, *value.values()):
            _check(each, deeper - 1)
