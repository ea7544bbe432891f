"""Which text is JSON, and of which kind a value is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluidtune.steering.json_values import DEEPEST, cut, kind_of, read_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_what_is_json_is_read_as_python_reads_it(value: Any) -> None:
    assert read_json(json.dumps(value)) == read_json(json.dumps(value, ensure_ascii=False).encode()) == value
    assert kind_of(value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("NaN", "NaN is no JSON number"),
        ("[1, -Infinity]", "-Infinity is no"),
        ("1e999", "greater than any float"),
        ("1" + "0" * 400, "greater than any float"),
        ("1" * 5000, "limit"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "a key twice"),
        ('{"a": "\\ud800"}', "half of a character"),
        ("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), "deeper than 50"),
        ("[" * 30000, "deeper than 50"),
        ("0,1", "Extra data at character 2"),
        (b"\xff", "utf"),
    ],
)
def test_what_python_would_take_or_fail_at_is_an_error_of_one_line(text: str | bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        read_json(text)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 200


def test_what_is_no_json_has_no_kind() -> None:
    assert [kind_of(value) for value in (print, object(), {1}, b"x")] == ["", "", "", ""]


def test_a_long_text_is_cut() -> None:
    assert cut("as it is") == "as it is" and cut("a\nb") == "a b" and cut("x" * 200, 9) == "xxxxxx..."
