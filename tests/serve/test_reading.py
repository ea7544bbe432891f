"""Reading an input in pieces: as `json.loads` does, in small steps, and no further than to what is wrong."""

from __future__ import annotations

import json
import random

import pytest

from symphony_serve import reading
from symphony_serve.errors import ServeError
from symphony_serve.forms import Form
from symphony_serve.reading import Reading, value_of


def read(text, form, piece=None):
    """The input of this text, and the steps that it took."""
    text, piece = text if isinstance(text, bytes) else text.encode(), piece or reading.PIECE
    one, steps = Reading(form), 0
    for at in range(0, len(text), piece):
        one.add(text[at : at + piece])
        steps += 1
        while one.step():
            steps += 1
    one.end()
    while one.step():
        steps += 1
    return one.value, steps


def anything(draw, depth=0):
    """A random JSON value, mostly with long parts."""
    kind = draw.randrange(8 if depth < 3 else 5)
    if kind == 0:
        return draw.choice([None, True, False])
    if kind == 1:
        return draw.choice([0, -1, 10**20, draw.random(), -1e-300, 1e300])
    if kind in (2, 3):
        letters = ["a", '"', "\\", "]", "],", '",', "\n", "é", "\U0001f600", "\u2028", "\x00", "}", ":"]
        return "".join(draw.choices(letters, k=draw.choice([0, 1, 5, 200])))
    if kind == 4:
        return [draw.random() for _ in range(draw.choice([0, 1, 100]))]
    if kind == 5:
        return {anything_text(draw): anything(draw, depth + 1) for _ in range(draw.choice([0, 1, 3, 30]))}
    if kind == 6:
        row = anything(draw, depth + 1)
        return [row] * draw.choice([0, 1, 30])
    return [anything(draw, depth + 1) for _ in range(draw.choice([0, 1, 3, 30]))]


def anything_text(draw):
    return f"{draw.choice(['a', ' ', chr(0x1F600)])}{draw.randrange(100)}"


@pytest.mark.parametrize("seed", range(120))
def test_whatever_is_there_is_read_as_by_the_standard_library(monkeypatch, seed):
    draw = random.Random(seed)
    monkeypatch.setattr(reading, "PIECE", draw.choice([50, 90, 300]))
    value = anything(draw)
    try:
        form = Form.of([value])
    except ServeError:
        form = Form(frozenset({"list", "object", "text", "number", "null", "truth value"}))  # of any items
        if isinstance(value, dict):
            return
    text = json.dumps(value, ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, None, 1]))
    found, _ = read(text, form)
    assert found == json.loads(text) == value
    assert value_of(text) == value


@pytest.mark.parametrize("seed", range(120))
def test_what_is_no_json_value_is_refused_wherever_it_is_broken(monkeypatch, seed):
    draw = random.Random(seed)
    monkeypatch.setattr(reading, "PIECE", draw.choice([50, 90, 300]))
    value = [anything(draw) for _ in range(3)]
    text = json.dumps(value)
    at = draw.randrange(len(text))
    broken = draw.choice([text[:at], text[:at] + text[at + 1 :], text[:at] + draw.choice('],"}{[:\\1x ') + text[at:]])
    try:
        right = json.loads(broken)
    except ValueError:
        with pytest.raises(ServeError, match=r"the body is no JSON value|is a list|expected"):
            read(broken, Form(frozenset({"list"})))
    else:
        assert read(broken, Form(frozenset({"list"})))[0] == right if isinstance(right, list) else True


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32-be"])
def test_encodings_are_told_apart_as_by_the_standard_library(monkeypatch, encoding):
    monkeypatch.setattr(reading, "PIECE", 64)
    value = ["ü\U0001f600"] * 100
    assert read(json.dumps(value, ensure_ascii=False).encode(encoding), Form.of([value]))[0] == value
    with pytest.raises(ServeError, match=r"the body is no JSON value: .*utf-8"):
        read(b'["\xff\xfe\xff"]', Form.of([value]))


NUMBERS = [round(random.Random(0).random(), 4) for _ in range(200_000)]
LONG = {
    "flat": NUMBERS,
    "rows": [[one, one] for one in NUMBERS],
    "pixels": [[[one, one, one] for one in NUMBERS[:300]] for _ in range(300)],
    "objects": [{"a": one, "b": "x,]"} for one in NUMBERS],
    "texts": ["a, b]"] * 100_000,
    "text": "\U0001f600" * 100_000,
    "one deep": {"a": {"b": [NUMBERS, NUMBERS]}},
}


@pytest.mark.parametrize("name", LONG)
def test_no_step_reads_more_than_two_pieces(monkeypatch, name):
    text, value = json.dumps(LONG[name]).encode(), LONG[name]
    seen = []
    for owner, method in ((reading._DECODER, "decode"), (reading.json, "loads")):
        real = getattr(owner, method)
        monkeypatch.setattr(owner, method, lambda text, real=real: seen.append(len(text)) or real(text))
    found, steps = read(text, Form.of([value]))
    assert found == value
    assert steps >= len(text) / reading.PIECE
    assert max(seen, default=0) <= 2 * reading.PIECE + 2


@pytest.mark.parametrize(
    ("sample", "sent", "said"),
    [
        (1, NUMBERS, "the input is a list, expected number"),
        ([1, 2.5], NUMBERS, "the input is a list of more than 2 values, expected length 2"),
        ([[1]], NUMBERS, "the input[0] is a number, expected list"),
        ([[1], [1, 2]], [["a"] * 100_000], "the input[0][0] is a text, expected number"),
        ({"a": 1}, {"b": NUMBERS}, "the input has the keys ['b'], expected ['a']"),
        ({"a": 1}, {"a": NUMBERS}, "the input.a is a list, expected number"),
        ([1.0], "[" * 100_000, "the input[0] is a list, expected number"),
    ],
)
def test_another_form_is_refused_at_its_first_piece(sample, sent, said):
    text = (sent if isinstance(sent, str) else json.dumps(sent)).encode()
    one = Reading(Form.of([sample]))
    one.add(text[: reading.PIECE])
    with pytest.raises(ServeError) as refused:
        while one.step():
            pass
    assert str(refused.value) == said


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ('{"a": [1, 1e400]}', "the input.a[1] is no finite number"),
        ('{"a": [1, -1e400, 3]}', "the input.a[1] is no finite number"),
        (f'{{"a": [{"9" * 400}]}}', "the input.a[0] is no finite number"),
        ('{"a": [NaN]}', "the body is no JSON value: NaN is no JSON number (character 0)"),
        ('{"a": [' + "1, " * 50_000 + "1e999]}", "the input.a[50000] is no finite number"),
        ("", "the body is no JSON value: it ends too soon (character 0)"),
        ("1 2", "the body is no JSON value: there is something behind it (character 2)"),
        ("[" * 100_000, "the input is a list, expected object"),
    ],
)
def test_what_is_said_of_what_is_wrong(sent, said):
    form = Form.of([{"a": [1]}, {"a": [1, 2]}]) if sent[:1] != "1" else Form.of([1])
    with pytest.raises(ServeError) as refused:
        read(sent, form)
    assert str(refused.value) == said


def test_what_is_too_deep_is_refused():
    any_list = Form(frozenset({"list"}))
    for text in ("[" * 100_000, "[" * 20_000 + "]" * 20_000):
        with pytest.raises(ServeError, match="the body is no JSON value"):
            read(text, any_list)


def test_numbers_whose_sum_only_is_too_large_are_finite():
    assert read("[1e308, 1e308, 1e308]", Form.of([[1.0, 2.0, 3.0]]))[0] == [1e308] * 3
