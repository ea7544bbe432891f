"""The form that the inputs of a model have: what a request must look like before it may join a batch.

An input is a JSON value. Its form is learned from samples: numbers, text, truth values, objects with certain keys, and
lists. A list has a certain length if all samples have that length there, else any length. A number is finite. One input
of another form could make the whole batch fail.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from symphony_serve.errors import ServeError

#: By Python's type, the JSON word for it. A truth value is no number.
_WORDS: dict[type, str] = {
    int: "number",
    float: "number",
    str: "text",
    bool: "truth value",
    type(None): "null",
    list: "list",
    dict: "object",
}
_NUMBERS = {int, float}


@dataclass(frozen=True)
class Form:
    """The form of the values at one place.

    words: of "number", "text", "truth value", "null", "list" and "object", those that are allowed. items: the form of a
    list's items; None: no sample had an item. length: of a list; None: any. keys: the forms of an object's values.
    """

    words: frozenset[str]
    items: Form | None = None
    length: int | None = None
    keys: Mapping[str, Form] = field(default_factory=dict)

    @classmethod
    def of(cls, samples: Sequence[Any]) -> Form:
        """The form that all samples have. Raises ServeError if one is no JSON value, or objects have other keys."""
        lists = [value for value in samples if isinstance(value, list)]
        objects = [value for value in samples if isinstance(value, dict)]
        if any(one.keys() != objects[0].keys() for one in objects):
            raise ServeError("the samples have objects with different keys at one place; give all the same keys")
        lengths = {len(value) for value in lists}
        inside = [item for value in lists for item in value]
        return cls(
            frozenset(_word(value) for value in samples),
            cls.of(inside) if inside else None,
            lengths.pop() if len(lengths) == 1 else None,
            {key: cls.of([one[key] for one in objects]) for key in (objects[0] if objects else ())},
        )

    def trouble(self, value: Any, place: str = "the input") -> str | None:
        """What of ``value`` is not of this form, in words; None if nothing is."""
        return None if self._have([value]) else self._trouble(value, place)

    def _trouble(self, value: Any, place: str) -> str | None:
        try:
            word = _word(value)
        except ServeError as error:
            return str(error)
        wrong = self.word_trouble(word, place)
        if wrong is not None:
            return wrong
        if word == "number" and not _finite([value]):
            return f"{place} is no finite number"
        if word == "list":
            return self.length_trouble(len(value), place) or self.items_trouble(value, place)
        if word == "object":
            inside = (self.keys[key]._trouble(value[key], f"{place}.{key}") for key in value)
            return self.keys_trouble(value, place) or next((said for said in inside if said is not None), None)
        return None

    def word_trouble(self, word: str, place: str) -> str | None:
        """What is wrong with a value of this JSON word at ``place``."""
        return None if word in self.words else f"{place} is a {word}, expected {' or '.join(sorted(self.words))}"

    def length_trouble(self, length: int, place: str) -> str | None:
        """What is wrong with a list of this length at ``place``."""
        if self.length in (None, length):
            return None
        return f"{place} is a list of length {length}, expected length {self.length}"

    def items_trouble(self, values: Sequence[Any], place: str, first: int = 0) -> str | None:
        """What is wrong with these items of the list at ``place``, of which the first is the list's item ``first``."""
        if self.items is None or self.items._have(values):
            return None
        found = (self.items._trouble(item, f"{place}[{first + at}]") for at, item in enumerate(values))
        return next((said for said in found if said is not None), None)

    def keys_trouble(self, keys: Iterable[str], place: str) -> str | None:
        """What is wrong with an object that has these keys at ``place``."""
        if set(keys) == self.keys.keys():
            return None
        return f"{place} has the keys {sorted(keys)}, expected {sorted(self.keys)}"

    def _have(self, values: Sequence[Any]) -> bool:
        """Whether all the values have this form. They are looked at level by level, which costs no call for each."""
        kinds = set(map(type, values))
        if not all(_WORDS.get(kind) in self.words for kind in kinds):
            return False
        numbers = values if kinds <= _NUMBERS else [value for value in values if type(value) in _NUMBERS]
        lists = values if kinds == {list} else [value for value in values if type(value) is list]
        objects = [value for value in values if type(value) is dict]
        if self.length is not None and any(len(one) != self.length for one in lists):
            return False
        if any(one.keys() != self.keys.keys() for one in objects):
            return False
        return (
            _finite(numbers)
            and (not lists or self.items is None or self.items._have(list(itertools.chain.from_iterable(lists))))
            and all(form._have([one[key] for one in objects]) for key, form in self.keys.items() if objects)
        )


def _finite(numbers: Sequence[Any]) -> bool:
    """Whether the sum is a number that a float holds, and each integer is one; then each number is one.

    Floats that are not finite make the sum so; integers that no float holds may cancel out.
    """
    try:
        if not math.isfinite(sum(numbers)):
            return False
    except OverflowError:  # an integer that no float holds
        return False
    most = sys.float_info.max
    return int not in set(map(type, numbers)) or (-most <= min(numbers) and max(numbers) <= most)


def _word(value: Any) -> str:
    try:
        return _WORDS[type(value)]
    except KeyError:
        said = f"a sample or an input has a value of type {type(value).__name__}"
        raise ServeError(f"{said}, expected what JSON has: numbers, text, lists, objects") from None
