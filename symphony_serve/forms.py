"""The form that the inputs of a model have: what a request must look like before it may join a batch.

An input is a JSON value. Its form is learned from samples: numbers, text, truth values, objects with certain keys, and
lists. A list has a certain length if all samples have that length there, else any length. A number is finite. One input
of another form could make the whole batch fail.

The form also says of which type the model gets a number, so that no input depends on those beside it. Where no sample
has a fraction, all numbers are whole; elsewhere all are floats. Where the samples have arrays of NumPy, lists become
arrays of that type, and null becomes NaN.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
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
#: Items of a list that are looked at together. Judgement: two passes through as many are as fast.
PART = 1000
#: Types of whole numbers, Python's and NumPy's -> the least and the largest that each holds.
WHOLE: dict[str, tuple[float, float]] = {"int": (-math.inf, math.inf)}
WHOLE |= {f"int{bits}": (-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (8, 16, 32, 64)}
WHOLE |= {f"uint{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32, 64)}


@dataclass(frozen=True)
class Form:
    """The form of the values at one place.

    words: of "number", "text", "truth value", "null", "list" and "object", those that are allowed. items: the form of a
    list's items; None: no sample had an item. length: of a list; None: any. keys: the forms of an object's values.
    number: the type that numbers here get, "int" or "float", or NumPy's name of the type of an array. array: whether
    the model gets an array from this place on.
    """

    words: frozenset[str]
    items: Form | None = None
    length: int | None = None
    keys: Mapping[str, Form] = field(default_factory=dict)
    number: str = "float"
    array: bool = False

    @classmethod
    def of(cls, samples: Sequence[Any]) -> Form:
        """The form that all samples have.

        Raises ServeError if one is neither a JSON value nor an array of numbers, if objects have other keys, or if
        arrays have other types or numbers of axes.
        """
        kinds = {type(value): value for value in samples}
        if any(map(is_array, kinds.values())):
            return cls._of_arrays(samples)
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
            "float" if float in kinds else "int",
        )

    @classmethod
    def _of_arrays(cls, samples: Sequence[Any]) -> Form:
        kinds = {(str(one.dtype), one.ndim) if is_array(one) else type(one).__name__ for one in samples}
        number = str(samples[0].dtype) if is_array(samples[0]) else ""
        if len(kinds) > 1 or not (number == "bool" or number in WHOLE or number.startswith("float")):
            said = ", ".join(sorted(map(str, kinds)))
            raise ServeError(
                f"the samples have at one place {said}; give arrays of one type of numbers, and as many axes"
            )
        words = ["truth value"] if number == "bool" else ["number"] if number in WHOLE else ["number", "null"]
        form = cls(frozenset(words), number=number, array=True)
        for axis in reversed(range(samples[0].ndim)):
            lengths = {one.shape[axis] for one in samples}
            length = lengths.pop() if len(lengths) == 1 else None
            form = cls(frozenset({"list"}), form, length, number=number, array=True)
        return form

    def given(self, value: Any) -> Any:
        """What the model gets of a value of this form. Arrays in it are new."""
        return self._given([value])[0]

    def _given(self, values: Sequence[Any]) -> Sequence[Any]:
        """`given` of each. Where all are numbers, that costs no call for each."""
        if self.array:
            import numpy as np  # a model of other values needs none

            return [np.array(value, self.number) for value in values]
        kind: type = int if self.number in WHOLE else float
        if set(map(type, values)) == {kind}:
            return values
        return [self._one_given(value, kind) for value in values]

    def _one_given(self, value: Any, kind: type) -> Any:
        if type(value) is list:
            return value if self.items is None else list(self.items._given(value))
        if type(value) is dict:
            return {key: self.keys[key].given(one) for key, one in value.items()}
        return kind(value) if type(value) in _NUMBERS else value

    def trouble(self, value: Any, place: str = "the input") -> str | None:
        """What of ``value`` is not of this form, in words; None if nothing is."""
        return None if self._have([value]) else self._trouble(value, place)

    def _trouble(self, value: Any, place: str) -> str | None:
        if self.array and is_array(value) and value.dtype == self.number:
            return None
        try:
            word = _word(value)
        except ServeError as error:
            return str(error)
        if word not in self.words:
            return f"{place} is a {word}, expected {' or '.join(sorted(self.words))}"
        if word == "number" and (said := self._number_trouble([value])) is not None:
            return f"{place} {said}"
        if word == "list" and self.length not in (None, len(value)):
            return f"{place} is a list of length {len(value)}, expected length {self.length}"
        if word == "list" and self.items is not None:
            # Where the wrong one is, is looked for in parts: to look at each of a million items takes seconds.
            items = self.items
            parts = (range(at, min(at + PART, len(value))) for at in range(0, len(value), PART))
            wrong = (at for part in parts if not items._have(value[part.start : part.stop]) for at in part)
            found = (items._trouble(value[at], f"{place}[{at}]") for at in wrong)
            return next((said for said in found if said is not None), None)
        if word == "object":
            if value.keys() != self.keys.keys():
                return f"{place} has the keys {sorted(value)}, expected {sorted(self.keys)}"
            found = (form._trouble(value[key], f"{place}.{key}") for key, form in self.keys.items())
            return next((said for said in found if said is not None), None)
        return None

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
            self._number_trouble(numbers) is None
            and (not lists or self.items is None or self.items._have(list(itertools.chain.from_iterable(lists))))
            and all(form._have([one[key] for one in objects]) for key, form in self.keys.items() if objects)
        )

    def _number_trouble(self, numbers: Sequence[Any]) -> str | None:
        """What is wrong with one of the numbers at this place."""
        if not _finite(numbers):
            return "is no finite number"
        if self.number not in WHOLE:
            return None
        if float in set(map(type, numbers)) and not all(float(one).is_integer() for one in numbers):
            return "has a fraction, and all samples are whole numbers; give a sample that has one"
        least, most = WHOLE[self.number]
        if numbers and not (least <= min(numbers) and max(numbers) <= most):
            return f"is an integer that {self.number} cannot hold"
        return None


def is_array(value: Any) -> bool:
    """Whether it is an array or a number of NumPy, or one that is like it, as torch's tensors are."""
    return hasattr(value, "dtype") and hasattr(value, "ndim")


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
        said = f"a sample or an input has a value of type {type(value).__name__}, expected what JSON has"
        raise ServeError(f"{said}: numbers, text, lists, objects; or arrays of NumPy or torch") from None
