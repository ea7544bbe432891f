"""What comes from outside: bodies are read in pieces, within limits and until a deadline. Without Ray."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import threading
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from fluidtune.serving import intake as intakes
from fluidtune.serving.answers import HTTPError
from fluidtune.serving.intake import Holding, Intake, collect_seldom, largest_body
from fluidtune.serving.plain_input import PlainInput
from symphony_serve.errors import ServeError
from symphony_serve.forms import Form
from tests.serve.driving import PATIENCE_S

pytestmark = pytest.mark.serve

NUMBERS = Form.of([[1.0], [1.0, 2.0]])


class Body:
    """A request whose body comes in these chunks; behind the last one nothing comes if it is ``half``."""

    def __init__(self, chunks, half=False, **headers):
        self.chunks, self.half, self.asked = list(chunks), half, 0
        self.headers = [(name.replace("_", "-").encode(), str(value).encode()) for name, value in headers.items()]

    async def receive(self):
        self.asked += 1
        if self.asked > len(self.chunks):
            await asyncio.Event().wait()
        more = self.half or self.asked < len(self.chunks)
        return {"type": "http.request", "body": self.chunks[self.asked - 1], "more_body": more}

    def request(self):
        from starlette.requests import Request

        return Request({"type": "http", "method": "POST", "path": "/", "headers": self.headers}, self.receive)


def intake(slo=0.5):
    return Intake(slo)


async def read(one, body, form=NUMBERS, most=math.inf, within=PATIENCE_S, holds=None):
    """The input, or what is said instead."""
    try:
        holding = Holding(time.monotonic() + within)
        with one.one(holding):
            decode = partial(PlainInput(form).decode, {}, most=1)
            (value,) = (await one.read(body.request(), decode, most, holding)).inputs
            if holds is not None:
                await holds.wait()
            return value
    except ServeError as error:
        return HTTPError(400, "bad_input", str(error))
    except HTTPError as said:
        return said


def said(body, **given):
    return asyncio.run(read(intake(), body, **given))


@pytest.mark.parametrize(("length", "read_chunks"), [(11, 0), (None, 2), (3, 2), ("x", 2)])
def test_of_a_body_that_is_too_large_no_more_than_the_limit_is_read(length, read_chunks):
    body = Body([b"[1,234", b"567,89", b"01234]"], **{} if length is None else {"content_length": length})
    found = said(body, most=10)
    text = "the body has more than 10 bytes; send less, or serve with a larger max_body"
    assert (found.status, found.code, found.text, body.asked) == (413, "too_large", text, read_chunks)


def test_the_limit_follows_from_the_samples():
    assert largest_body([[1, 2], ["four"]]) == 1 << 20
    assert largest_body([["four" * 100_000], np.zeros(2)]) == 64 * len('[""]' + "four" * 100_000)


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP, identity"])
def test_a_compressed_body_is_told_apart_unread(encoding):
    body = Body([b"\x1f\x8b"], content_encoding=encoding)
    found = said(body)
    assert (found.status, found.code, body.asked) == (415, "content_encoding", 0)
    assert found.headers["Accept-Encoding"] == "identity"
    assert said(Body([b"[1]"], content_encoding="Identity")) == [1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{}", "the input is a object, expected list"),
        (b"[1", "the body is no JSON value"),
        (b"", "the body is no JSON value"),
        (b"[1e400]", "the body is no JSON value: Number out of range"),
        (b"[NaN]", "the body is no JSON value"),
        (b"[1] 2", "the body is no JSON value"),
        (b"[" * 100_000, "the body is no JSON value"),
        (b"\xff", "the body is no JSON value"),
        (b"\xef\xbb\xbf[1]", "the body is no JSON value"),
        ("[1]".encode("utf-16"), "the body is no JSON value"),
    ],
)
def test_what_is_no_input_is_told(text, words):
    found = said(Body([text]))
    assert (found.status, found.code) == (400, "bad_input")
    assert words in found.text


@pytest.mark.parametrize("value", [(1 << 64) + 1, -(1 << 70), "\ud800", ["a\udfff"]])
def test_a_whole_number_keeps_its_digits_and_a_text_its_half_of_a_surrogate_pair(value):
    assert said(Body([json.dumps(value).encode()]), form=Form.of([value])) == value


def test_a_half_body_is_refused_at_its_deadline_and_its_connection_ends():
    found = said(Body([b"[1,"], half=True), within=0.01)
    assert (found.status, found.code) == (503, "body_late")
    assert found.headers == {"Retry-After": "1", "Connection": "close"}


async def test_half_bodies_are_limited_and_leave_nothing_behind(monkeypatch):
    monkeypatch.setattr(intakes, "MOST_READ", 3)
    one = intake()
    halves = [asyncio.ensure_future(read(one, Body([b"["], half=True))) for _ in range(3)]
    await asyncio.sleep(0)
    assert (one.open, one.reading) == (3, 3)
    refused = Body([b"[1]"])
    found = await read(one, refused)
    assert (found.code, found.headers["Retry-After"], refused.asked) == ("too_many_bodies", "1", 0)
    for half in halves:
        half.cancel()
    await asyncio.gather(*halves, return_exceptions=True)
    assert (one.open, one.reading, one.bytes) == (0, 0, 0)
    assert await read(one, Body([b"[1]"])) == [1]


@pytest.mark.parametrize("told", [True, False])
async def test_large_bodies_are_limited_by_bytes_until_they_are_answered_and_small_ones_are_not(monkeypatch, told):
    text = json.dumps([0.5] * 40_000).encode()
    monkeypatch.setattr(intakes, "MOST_BYTES", len(text) + 1)

    def large():
        return Body([text], **{"content_length": len(text)} if told else {})

    one, answered = intake(), asyncio.Event()
    first = asyncio.ensure_future(read(one, large(), holds=answered))
    while one.bytes < len(text):
        await asyncio.sleep(0)
    second = large()
    found = await read(one, second)
    assert (found.code, found.status, second.asked) == ("too_many_bytes", 503, 0 if told else 1)
    assert await read(one, Body([b"[1]"])) == [1]
    answered.set()
    assert len(await first) == 40_000 and one.bytes == 0
    assert len(await read(one, large())) == 40_000


def test_a_large_body_that_is_read_past_its_deadline_holds_its_bytes_and_the_only_thread():
    """Seen: bodies whose deadline had passed were read in ten threads at once, and counted as no bytes."""
    goes_on, began, text = threading.Event(), [], json.dumps([0.5] * 40_000).encode()

    def decode(body):
        began.append(len(body))
        assert goes_on.wait(PATIENCE_S)
        raise ServeError("nobody hears it")

    async def run():
        one = intake()
        for number in (1, 2, 3):
            holding = Holding(time.monotonic() + 0.2)
            with pytest.raises(HTTPError, match="not there and read at its deadline"), one.one(holding):
                await one.read(Body([text]).request(), decode, math.inf, holding)
            assert (began, one.open, one.bytes) == ([len(text)], 0, number * len(text))
        goes_on.set()
        while one.bytes:
            await asyncio.sleep(0.001)
        assert len(await read(one, Body([text]))) == 40_000

    try:
        asyncio.run(run())
    finally:
        goes_on.set()
    assert began == [len(text)]


def test_while_large_bodies_are_read_python_collects_no_garbage_among_all_objects():
    """Such a collection holds the process for 100 ms."""
    text = json.dumps([[0.5, 1]] * 300_000).encode()
    rows, seen, before = Form.of([[[1.5, 2]], [[1, 2]] * 2]), [], gc.get_threshold()

    def look(phase, told):
        seen.append(told["generation"])

    gc.collect()
    gc.callbacks.append(look)
    try:
        collect_seldom()
        assert len(said(Body([text]), form=rows)) == 300_000
    finally:
        gc.callbacks.remove(look)
        gc.set_threshold(*before)
        gc.unfreeze()
    assert {0, 1} <= set(seen)
    assert 2 not in seen


def test_a_part_that_the_fronts_own_loop_reads_late_is_not_waited_for(monkeypatch):
    """On a clock that each part moves. Seen: a busy front took bodies of more than 64 KiB for slow ones."""
    now = 0.0
    monkeypatch.setattr(intakes, "time", SimpleNamespace(monotonic=lambda: now))

    def waited(seconds):
        async def stream():
            nonlocal now
            for _ in range(10):
                now += seconds
                yield b"1"

        async def main():
            holding = Holding(0.0)
            await intakes.Intake(1.0)._gather(SimpleNamespace(stream=stream), 10, holding)
            return holding.waited

        return asyncio.run(main())

    assert waited(0.9 * intakes.TURN_S) == 0.0
    assert waited(1.0) == pytest.approx(10 * (1.0 - intakes.TURN_S))
