"""The form that the inputs of a model have: what a request must look like before it may join a batch.

An input is a JSON value. Its form is learned from samples: numbers, text, truth values, objects with certain keys, and
lists. A list has a certain length if all samples have that length there, else any length. One input of another form
could make the whole batch fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from symphony_serve.errors import ServeError

#: By Python's type, the JSON word for it. A truth value is no number.
_WORDS = {int: "number", float: "number", str: "text", bool: "truth value", type(None): "null"}


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
        try:
            word = _word(value)
        except ServeError as error:
            return str(error)
        if word not in self.words:
            return f"{place} is a {word}, expected {' or '.join(sorted(self.words))}"
        if word == "list":
            if self.length not in (None, len(value)):
                return f"{place} is a list of length {len(value)}, expected length {self.length}"
            if self.items is not None and not self.items._plain.issuperset(map(type, value)):
                found = (self.items.trouble(item, f"{place}[{at}]") for at, item in enumerate(value))
                return next((said for said in found if said is not None), None)
        if word == "object":
            if value.keys() != self.keys.keys():
                return f"{place} has the keys {sorted(value)}, expected {sorted(self.keys)}"
            inside = (self.keys[key].trouble(value[key], f"{place}.{key}") for key in value)
            return next((said for said in inside if said is not None), None)
        return None

    @property
    def _plain(self) -> frozenset[type]:
        """The Python types of what may be here and has nothing inside. A long list is looked at by types first."""
        return frozenset(kind for kind, word in _WORDS.items() if word in self.words)


def _word(value: Any) -> str:
    if isinstance(value, list):
        return "list"
    if isinstance(value, dict):
        return "object"
    try:
        return _WORDS[type(value)]
    except KeyError:
        said = f"a sample or an input has a value of type {type(value).__name__}"
        raise ServeError(f"{said}, expected what JSON has: numbers, text, lists, objects") from None
