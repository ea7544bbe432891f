"""What a request must look like before it may join a batch."""

from __future__ import annotations

import pytest

from symphony_serve.errors import ServeError
from symphony_serve.forms import Form

IMAGES, NUMBERS = Form.of([[[0.0, 1], [2, 3.5]]]), Form.of([[0.5], [1, 2]])
WORDS, OBJECTS = Form.of([[1, 2, 3], [4]]), Form.of([{"text": "a", "top": 1}, {"text": "b", "top": None}])


@pytest.mark.parametrize(
    ("form", "value", "said"),
    [
        (IMAGES, [[1, 2], [3, 4]], None),
        (IMAGES, [[1, 2]], "the input is a list of length 1, expected length 2"),
        (IMAGES, [[1, 2], [3]], "the input[1] is a list of length 1, expected length 2"),
        (IMAGES, [[1, 2], [3, "4"]], "the input[1][1] is a text, expected number"),
        (IMAGES, [[1, 2], [3, True]], "the input[1][1] is a truth value, expected number"),
        (IMAGES, [[1, 2], [3, None]], "the input[1][1] is a null, expected number"),
        (IMAGES, {"a": 1}, "the input is a object, expected list"),
        (IMAGES, 7, "the input is a number, expected list"),
        (
            IMAGES,
            [(1, 2), [3, 4]],
            "a sample or an input has a value of type tuple, expected what JSON has: numbers, text, lists, "
            "objects; or arrays of NumPy or torch",
        ),
        # Lists have any length if samples differ in it.
        (WORDS, [], None),
        (WORDS, [1] * 9, None),
        (WORDS, ["a"], "the input[0] is a text, expected number"),
        (OBJECTS, {"text": "c", "top": None}, None),
        (OBJECTS, {"text": "c"}, "the input has the keys ['text'], expected ['text', 'top']"),
        (OBJECTS, {"text": 1, "top": 1}, "the input.text is a number, expected text"),
        # Seen: an integer of 400 digits and its negative passed as finite numbers, and made a batch fail.
        (NUMBERS, [10**400, -(10**400)], "the input[0] is no finite number"),
        (NUMBERS, [10**400, -(10**400), 0.5], "the input[0] is no finite number"),
        (NUMBERS, [-(10**309), 10**309, 1], "the input[0] is no finite number"),
        (NUMBERS, [2**1023, -(2**1023), 1e308, 0.5], None),
    ],
)
def test_what_is_wrong_with_a_value_is_said_with_its_place(form, value, said):
    assert form.trouble(value) == said


def test_a_long_list_costs_no_call_for_each_item(monkeypatch):
    """A body of 16 MiB has millions of numbers, and meanwhile the front answers nobody else."""
    form, asked, have = Form.of([[1, 2.5, None], [4]]), [], Form._have
    monkeypatch.setattr(Form, "_have", lambda self, *given: asked.append(given) or have(self, *given))
    monkeypatch.setattr(Form, "_trouble", lambda *given: pytest.fail("each item was looked at"))
    assert form.trouble([1, 2.5, None] * 1000) is None
    assert len(asked) == 2
    rows = Form.of([[[1, {"a": [2]}]], [[3, {"a": [4]}]] * 2])
    assert rows.trouble([[5, {"a": [6]}]] * 1000) is None
    assert len(asked) <= 2 + 6
    monkeypatch.undo()
    assert form.trouble([[1]]) == "the input[0] is a list, expected null or number"


@pytest.mark.parametrize("samples", [[{"a": 1}, {"b": 1}], [(1, 2)], [object()]])
def test_samples_that_are_refused(samples):
    with pytest.raises(ServeError):
        Form.of(samples)
