"""Reads an input from its JSON text in pieces, and refuses it at the first thing that is not of its form.

Python's own parser holds a process until the text is read, half a second for 15 MB. Here a step reads a piece of the
text, and the caller serves others between two steps. What has another form is refused at its first piece, and
the rest of it need not even come.

A list is the only thing that is long and has many parts. Those of its items that are there are read by one call of the
parser of the standard library: the text is cut at a comma, and if brackets are put around it and it is read, the comma
stood between two items. Only what is longer than half a piece is entered.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Generator
from typing import Any

from symphony_serve.errors import ServeError
from symphony_serve.forms import Form

#: Bytes that are read at once. Source: `json.loads` reads numbers at 24 to 30 MB/s on a core of a loaded AMD EPYC, so
#: that a step holds its process for 1 to 2 ms.
PIECE = 32 << 10
#: Items that are read one by one in a step. Each takes 1 to 2 us, so they take what a piece takes.
MANY = 1000

#: By its first character, the JSON word for a value.
_BEGINS = {
    **dict.fromkeys("-0123456789", "number"),
    **{'"': "text", "t": "truth value", "f": "truth value", "n": "null", "[": "list", "{": "object"},
}
_CLOSING = {"[": "]", "{": "}"}
_SPACE = re.compile(r"[ \t\n\r]*")
#: What a number, of which the end may not be there yet, has not.
_BEHIND_NUMBER = re.compile(r"[^-+.eE0-9]")
#: Characters and escapes of a text, each of them whole.
_UNITS = re.compile(r'(?:[^"\\]+|\\u[0-9a-fA-F]{4}|\\[^u])*')
#: Characters of the longest escape of a text. Source: RFC 8259, section 7.
_ESCAPE = 6

#: A step yields whether it could go on with the text that is there.
_Steps = Generator[bool, None, Any]


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


class Reading:
    """Reads one input of this form. `add` or `end` come first, then `step` until it returns False, and so on.

    form: None: any. Each of them raises ServeError if the text is no JSON value, or one of another form.
    """

    def __init__(self, form: Form | None):
        #: The text that is there and not read yet begins at ``_at``. ``_before``: characters that are there no more.
        self._text, self._at, self._before = "", 0, 0
        self._ended = False
        self._decoder: codecs.IncrementalDecoder | None = None
        self._steps = self._whole(form)
        #: The input, when `step` has returned False after `end`.
        self.value: Any = None

    def add(self, piece: bytes) -> None:
        """The next bytes of the text, `PIECE` or fewer. With few bytes at a time, it takes much longer."""
        if self._decoder is None:
            # As `json.loads` does.
            self._decoder = codecs.getincrementaldecoder(json.detect_encoding(piece))("surrogatepass")
        self._append(self._decode(piece))

    def end(self) -> None:
        """There are no more bytes."""
        if self._decoder is not None:
            self._append(self._decode(b"", final=True))
        self._ended = True

    def step(self) -> bool:
        """Read some of what is there. Returns whether there may be more to read without another `add`."""
        try:
            return next(self._steps)
        except StopIteration as done:
            self.value = done.value
            return False
        except RecursionError:
            raise self._none("it is too deep") from None

    def _decode(self, piece: bytes, final: bool = False) -> str:
        assert self._decoder is not None
        try:
            return self._decoder.decode(piece, final)
        except UnicodeDecodeError as error:
            raise self._none(str(error)) from None

    def _append(self, text: str) -> None:
        self._before += self._at
        self._text, self._at = self._text[self._at :] + text, 0

    def _none(self, why: str) -> ServeError:
        return ServeError(f"the body is no JSON value: {why} (character {self._before + self._at})")

    # The steps.

    def _whole(self, form: Form | None) -> _Steps:
        value = yield from self._element(form, "the input")
        while True:
            self._skip()
            if self._at < len(self._text):
                raise self._none("there is something behind it")
            if self._ended:
                return value
            yield False

    def _skip(self) -> None:
        space = _SPACE.match(self._text, self._at)
        assert space is not None
        self._at = space.end()

    def _more(self) -> _Steps:
        """Wait for more text."""
        if self._ended:
            raise self._none("it ends too soon")
        yield False

    def _next(self) -> _Steps:
        """The next character that is no space. It is not read yet."""
        self._skip()
        while self._at == len(self._text):
            yield from self._more()
            self._skip()
        return self._text[self._at]

    def _element(self, form: Form | None, place: str) -> _Steps:
        """A value. form: None: any."""
        first = yield from self._next()
        if form is not None and first in _BEGINS:
            _raise(form.word_trouble(_BEGINS[first], place))
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                why = "it is too long a number"
                if self._ended or first in '"[{' or _BEHIND_NUMBER.search(self._text, self._at) is not None:
                    self._at = end
                    _raise(form.trouble(value, place) if form is not None else None)
                    return value
            except ServeError:
                raise
            except ValueError as error:
                why = getattr(error, "msg", str(error))
            except RecursionError:
                why = "it is too deep"
            if self._ended:
                raise self._none(why)
            if len(self._text) - self._at >= PIECE // 2:
                break
            yield from self._more()
        if first == "[":
            return (yield from self._list(form, place))
        if first == "{":
            return (yield from self._object(form, place))
        if first == '"':
            return (yield from self._long_text())
        raise self._none(why)

    def _list(self, form: Form | None, place: str) -> _Steps:
        """A list that is longer than half a piece."""
        items: list[Any] = []
        at_once = True
        self._at += 1
        while True:
            first = yield from self._next()
            some, at_once = self._several(first) if at_once else ([], False)
            if some:
                _raise(form.items_trouble(some, place, len(items)) if form is not None else None)
                items += some
                yield True
            else:
                inner = form.items if form is not None else None
                items.append((yield from self._element(inner, f"{place}[{len(items)}]")))
                if len(items) % MANY == 0:
                    yield True
            if form is not None and form.length is not None and len(items) > form.length:
                raise ServeError(f"{place} is a list of more than {form.length} values, expected length {form.length}")
            if (yield from self._closed("]")):
                _raise(form.length_trouble(len(items), place) if form is not None else None)
                return items

    def _several(self, first: str) -> tuple[list[Any], bool]:
        """The items of a list that are there whole, as far as they are easily found; and whether to try so again."""
        text, at = self._text, self._at
        if first in _CLOSING:
            cut = text.rfind(f"{_CLOSING[first]},", at) + 1
        else:
            cut = text.find("]", at)
            cut = text.rfind(",", at) if cut < 0 else cut
        if cut <= at:
            return [], True
        try:
            some = _DECODER.decode(f"[{text[at:cut]}]")
        except (ValueError, RecursionError):
            return [], False
        self._at = cut
        return some, True

    def _object(self, form: Form | None, place: str) -> _Steps:
        """An object that is longer than half a piece."""
        found: dict[str, Any] = {}
        read = 0
        self._at += 1
        while True:
            if (yield from self._next()) != '"':
                raise self._none("a key is no text")
            key = yield from self._element(None, place)
            if form is not None and key not in form.keys:
                _raise(form.keys_trouble([*found, key], place))
            if (yield from self._next()) != ":":
                raise self._none("there is no colon behind a key")
            self._at += 1
            found[key] = yield from self._element(form.keys[key] if form is not None else None, f"{place}.{key}")
            read += 1
            if read % MANY == 0:
                yield True
            if (yield from self._closed("}")):
                _raise(form.keys_trouble(found, place) if form is not None else None)
                return found

    def _closed(self, closing: str) -> _Steps:
        """Whether the list or object ends here; else a comma was read."""
        found = yield from self._next()
        if found not in (closing, ","):
            raise self._none(f"there is neither a comma nor {closing}")
        self._at += 1
        return found == closing

    def _long_text(self) -> _Steps:
        """A text that is longer than half a piece."""
        said = [""]
        self._at += 1
        while True:
            units = _UNITS.match(self._text, self._at)
            assert units is not None
            end = units.end()
            try:
                part = json.loads(f'"{self._text[self._at : end]}"')
            except ValueError as error:
                raise self._none(getattr(error, "msg", str(error))) from None
            # Two escapes may be the two halves of one character, which `json.loads` puts together only if it sees both.
            half = (said[-1][-1:] + part[:1]).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
            said[-1:] = [said[-1][:-1], half + part[1:]]
            self._at = end
            if self._text[end : end + 1] == '"':
                self._at += 1
                return "".join(said)
            if len(self._text) - end >= _ESCAPE:
                raise self._none("a text has an escape that there is not")
            yield from self._more()


def value_of(text: str) -> Any:
    """The value of a JSON text. Of a long one other threads go on between the steps. Raises ServeError."""
    if len(text) <= PIECE:
        return json.loads(text)
    reading, whole = Reading(None), text.encode("utf-8", "surrogatepass")
    for at in range(0, len(whole), PIECE):
        reading.add(whole[at : at + PIECE])
        while reading.step():
            pass
    reading.end()
    while reading.step():
        pass
    return reading.value


def _raise(trouble: str | None) -> None:
    if trouble is not None:
        raise ServeError(trouble)
