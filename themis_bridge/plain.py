"""Makes plain, bounded values of what a tenant sent, so that nothing behind it has to think of any others.

A message comes as a Python object of whatever types its sender chose. A number may be a Fraction, which JSON does not
have, or it may have a million digits. Here each field becomes an exact int, float, str or None, or the message is
refused. What the values mean is checked in `messages`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Container, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from themis_bridge.errors import ThemisError

Message = TypeVar("Message")

#: Characters of a text. Judgement: names of jobs are names of folders, which have at most 255 bytes.
MOST_CHARACTERS = 1000
#: Bits of a whole number without its sign. Tokens are counted, some from the milliseconds of the time of day, and
#: never need more.
BITS = 63
#: The largest number, of seconds, of a rho or of a resource. Judgement: a million years have 3e13 seconds, and no
#: product of a few such numbers is infinite. Ray counts ten-thousandths of a resource in 63 bits.
MOST_NUMBER = 1e14


def shown(value: Any) -> str:
    """The value for a message to people, shortened."""
    try:
        return reprlib.repr(value)
    except Exception:
        # Such as that of an int with too many digits, or of an object that its sender has made.
        return f"a {type(value).__name__}"


def text(value: Any) -> str:
    """An exact str. Raises ThemisError for anything else, and for one that is too long or has no UTF-8."""
    if not isinstance(value, str) or len(value) > MOST_CHARACTERS:
        raise ThemisError(f"{shown(value)}: expected at most {MOST_CHARACTERS} characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ThemisError(f"{shown(value)}: expected characters that UTF-8 has") from None
    return str(value)


def whole(value: Any) -> int:
    """An exact int. Raises ThemisError for anything else, and for one that is too large."""
    if not isinstance(value, int) or isinstance(value, bool) or value.bit_length() > BITS:
        raise ThemisError(f"{shown(value)}: expected a whole number of at most {BITS} bits")
    return int(value)


def number(value: Any) -> float:
    """An exact float that is finite. Raises ThemisError for what is no int or float, and for one that is too large."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not -MOST_NUMBER <= value <= MOST_NUMBER:
        raise ThemisError(f"{shown(value)}: expected a finite number of at most {MOST_NUMBER:g}")
    return float(value)


#: Annotation of a field -> what makes a plain value of it.
_KINDS: Mapping[str, Callable[[Any], Any]] = {
    "str": text,
    "int": whole,
    "int | None": lambda value: None if value is None else whole(value),
    "float": number,
}


def plain(message: Message, but: Container[str] = ()) -> Message:
    """The same message with plain, bounded values in its fields.

    ``message``: a dataclass. ``but``: fields that stay as they are. Raises ThemisError for a value that cannot be made
    plain, and AttributeError for a field that is not there.
    """
    values: dict[str, Any] = {}
    for each in fields(message):  # type: ignore[arg-type]
        if each.name not in but:
            try:
                values[each.name] = _KINDS[str(each.type)](getattr(message, each.name))
            except ThemisError as error:
                raise ThemisError(f"{each.name} of a {type(message).__name__} is {error}") from None
    return replace(message, **values)  # type: ignore[type-var]
