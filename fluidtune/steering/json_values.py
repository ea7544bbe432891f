"""What somebody types or sends as JSON, read strictly: what Python's json takes beyond the standard is an error."""

from __future__ import annotations

import json
import numbers
from collections.abc import Mapping
from typing import Any

#: The longest message, in bytes. Judgement: parameters are numbers and words.
LONGEST = 1 << 20
#: Lists and objects within each other. Judgement: Tune copies and saves a configuration recursively, and Python's limit
#: is 1,000 calls.
DEEPEST = 50
#: The kinds of JSON values, in words. The first one that a value is of is its kind.
KINDS: Mapping[str, Any] = {
    "null": type(None),
    "true or false": bool,
    "a number": numbers.Real,
    "text": str,
    "a list": list | tuple,
    "an object": Mapping,
}


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
        found = json.loads(
            text, parse_constant=_number, parse_float=_number, parse_int=_whole, object_pairs_hook=_object
        )
        if _depth(found) > DEEPEST:
            raise RecursionError
        json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEEPEST}")
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos + 1}")
    except UnicodeEncodeError:
        raise ValueError("text has half of a character (a lone surrogate)")
    return found


def kind_of(value: Any) -> str:
    """The kind of a JSON value, in words; "" for what is no JSON value."""
    return next((kind for kind, types in KINDS.items() if isinstance(value, types)), "")


def _number(text: str) -> float:
    if not text.isalpha() and abs(value := float(text)) != float("inf"):
        return value
    raise ValueError(f"{cut(text)} is no JSON number, or greater than any float")


def _whole(text: str) -> int:
    value = int(text)
    _number(text)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)
