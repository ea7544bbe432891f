"""What a request must look like before it may join a batch."""

from __future__ import annotations

import pytest

from symphony_serve.errors import ServeError
from symphony_serve.forms import Form

IMAGES = Form.of([[[0.0, 1], [2, 3.5]]])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([[1, 2], [3, 4]], None),
        ([[1, 2]], "the input is a list of length 1, expected length 2"),
        ([[1, 2], [3]], "the input[1] is a list of length 1, expected length 2"),
        ([[1, 2], [3, "4"]], "the input[1][1] is a text, expected number"),
        ([[1, 2], [3, True]], "the input[1][1] is a truth value, expected number"),
        ([[1, 2], [3, None]], "the input[1][1] is a null, expected number"),
        ({"a": 1}, "the input is a object, expected list"),
        (7, "the input is a number, expected list"),
        (
            [(1, 2), [3, 4]],
            "a sample or an input has a value of type tuple, expected what JSON has: numbers, text, lists, "
            "objects; or arrays of NumPy or torch",
        ),
    ],
)
def test_of_lists(value, said):
    assert IMAGES.trouble(value) == said


def test_lists_have_any_length_if_samples_differ_in_it():
    words = Form.of([[1, 2, 3], [4]])
    assert [words.trouble(value) for value in ([], [1] * 9)] == [None, None]
    assert words.trouble(["a"]) == "the input[0] is a text, expected number"


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


def test_of_objects():
    form = Form.of([{"text": "a", "top": 1}, {"text": "b", "top": None}])
    assert form.trouble({"text": "c", "top": None}) is None
    assert form.trouble({"text": "c"}) == "the input has the keys ['text'], expected ['text', 'top']"
    assert form.trouble({"text": 1, "top": 1}) == "the input.text is a number, expected text"


@pytest.mark.parametrize("samples", [[{"a": 1}, {"b": 1}], [(1, 2)], [object()]])
def test_samples_that_are_refused(samples):
    with pytest.raises(ServeError):
        Form.of(samples)


@pytest.mark.parametrize("values", [[10**400, -(10**400)], [10**400, -(10**400), 0.5], [-(10**309), 10**309, 1]])
def test_integers_that_no_float_holds_do_not_cancel_out(values):
    """Seen: an integer of 400 digits and its negative passed as finite numbers, and made a batch fail."""
    form = Form.of([[0.5], [1, 2]])
    assert form.trouble(values) == "the input[0] is no finite number"
    assert form.trouble([2**1023, -(2**1023), 1e308, 0.5]) is None
