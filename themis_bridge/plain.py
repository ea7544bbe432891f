"""Makes plain, bounded values of what a tenant sent, so that nothing behind it has to think of any others.

A message comes as a Python object of whatever types its sender chose. A number may be a Fraction, which JSON does not
have, or it may have a million digits. Here a value becomes an exact int, float or str, or the message is refused. Which
values a message has is said in `messages`.
"""

from __future__ import annotations

import reprlib
from typing import Any

from themis_bridge.errors import ThemisError

#: Characters of a text. Judgement: names of jobs are names of folders, which have at most 255 bytes.
MOST_CHARACTERS = 1000
#: The largest whole number: those that are counted, such as tokens from the milliseconds of the time of day, never
#: need more than 63 bits.
MOST_WHOLE = (1 << 63) - 1
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


def text(value: Any, name: str) -> str:
    """An exact str. Raises ThemisError for anything else, and for one that is too long or has no UTF-8."""
    if not isinstance(value, str) or len(value) > MOST_CHARACTERS:
        raise ThemisError(f"{name} is {shown(value)}: expected at most {MOST_CHARACTERS} characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ThemisError(f"{name} is {shown(value)}: expected characters that UTF-8 has") from None
    return str(value)


def whole(value: Any, name: str, least: int = -MOST_WHOLE, most: int = MOST_WHOLE) -> int:
    """An exact int. Raises ThemisError for anything else, and for one that is out of range."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ThemisError(f"{name} is {shown(value)}: expected a whole number from {least} to {most}")
    return int(value)


def number(value: Any, name: str, least: float = -MOST_NUMBER, most: float = MOST_NUMBER) -> float:
    """An exact float. Raises ThemisError for what is no int or float, and for one that is out of range."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value <= most:
        raise ThemisError(f"{name} is {shown(value)}: expected a number from {least:g} to {most:g}")
    return float(value)
