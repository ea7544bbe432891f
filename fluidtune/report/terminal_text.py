"""Text of a log or of a user, as a terminal may show it: in one line, and without a code that the terminal obeys."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.text import Text

#: The control characters of ASCII and of ISO 6429 (C0, delete, C1), and halves of characters, which have no encoding.
_NOT_SHOWN = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
#: An error lists this many runs or trials. More would hide the error.
LISTED = 20


def printable(text: str) -> str:
    """``text`` with what a terminal would obey, or cannot show, as Python writes it: ``\\x1b``, ``\\n``."""
    return _NOT_SHOWN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def listed(what: Sequence[str]) -> str:
    """The first `LISTED` of these, and how many more there are."""
    more = len(what) - LISTED
    return ", ".join(map(printable, what[:LISTED])) + (f" and {more} more" if more > 0 else "")


def cell(text: str, **style: Any) -> Text:
    """``text`` for a cell, or a line, of `rich`, whose plain strings are markup. ``style``: as for `rich.text.Text`."""
    from rich.text import Text

    return Text(printable(text), **style)
