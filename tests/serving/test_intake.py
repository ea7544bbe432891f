"""What comes from outside: bodies are read in pieces, within limits and until a deadline. Without Ray."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from fluidtune.serving import intake as intakes
from fluidtune.serving.intake import MOST_BYTES, MOST_READ, Holding, collect_seldom, largest_body
from tests.serve.driving import PATIENCE_S
from tests.serving.fronts import answering, ask, begun, made

pytestmark = pytest.mark.serve

LISTS = [[1.0], [1.0, 2.0]]
#: More than the event loop reads itself.
LARGE = json.dumps([0.5] * 40_000).encode()


@pytest.mark.parametrize(("length", "unread"), [(b"11", 3), (None, 1), (b"3", 1), (b"x", 1)])
async def test_of_a_body_that_is_too_large_no_more_than_the_limit_is_read(length, unread):
    parts = [b"[1,234", b"567,89", b"01234]"]
    front = made(most=10)
    status, said, _ = await ask(front, body=parts, headers=[(b"content-length", length)] if length else [])
    text = "the body has more than 10 bytes; send less, or serve with a larger max_body"
    assert (status, said, len(parts)) == (413, {"error": text, "code": "too_large"}, unread)
    assert front.books.requests("t") == {"bad": 1}


def test_the_limit_follows_from_the_samples():
    assert largest_body([[1, 2], ["four"]]) == 1 << 20
    assert largest_body([["four" * 100_000], np.zeros(2)]) == 64 * len('[""]' + "four" * 100_000)


@pytest.mark.parametrize("encoding", [b"gzip", b"br", b"GZIP, identity"])
async def test_a_compressed_body_is_told_apart_unread(encoding):
    front = made(slo=PATIENCE_S)
    status, said, headers = await ask(front, body=None, headers=[(b"content-encoding", encoding)])
    assert (status, said["code"], headers["Accept-Encoding"]) == (415, "content_encoding", "identity")
    assert (await answering(front, 1, [(200, "2")], headers=[(b"content-encoding", b"Identity")]))[0] == 200


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
async def test_what_is_no_input_is_told(text, words):
    front = made(samples=LISTS)
    status, said, _ = await ask(front, body=text)
    assert (status, said["code"]) == (400, "bad_input") and words in said["error"]
    assert front.books.requests("t") == {"bad": 1}


@pytest.mark.parametrize("value", [(1 << 64) + 1, -(1 << 70), "\ud800", ["a\udfff"]])
async def test_a_whole_number_keeps_its_digits_and_a_text_its_half_of_a_surrogate_pair(value):
    front = made(samples=[value])
    await answering(front, 1, [(200, "1")], body=json.dumps(value).encode())
    assert front.server.values == [value]


async def test_a_half_body_is_refused_at_its_deadline_and_its_connection_ends():
    status, said, headers = await ask(made(slo=0.01), body=b"[1,", half=True)
    assert (status, said["code"]) == (503, "body_late")
    assert (headers["Retry-After"], headers["Connection"]) == ("1", "close")


async def test_half_bodies_are_limited_and_leave_nothing_behind():
    """There is room for three."""
    front = made(slo=PATIENCE_S)
    front.intake.reading = others = MOST_READ - 3
    halves = [asyncio.ensure_future(ask(front, half=True)) for _ in range(3)]
    await asyncio.sleep(0)
    assert (front.intake.open, front.intake.reading) == (3, MOST_READ)
    status, said, _ = await ask(front, body=None)
    assert (status, said["code"]) == (503, "too_many_bodies")
    for half in halves:
        half.cancel()
    await asyncio.gather(*halves, return_exceptions=True)
    assert (front.intake.open, front.intake.reading, front.intake.bytes) == (0, others, 0)
    assert (await answering(front, 1, [(200, "2")]))[0] == 200


@pytest.mark.parametrize("told", [True, False])
async def test_large_bodies_are_limited_by_bytes_until_they_are_answered_and_small_ones_are_not(told):
    """There is room for one."""
    front = made(slo=PATIENCE_S, samples=LISTS)
    headers = [(b"content-length", str(len(LARGE)).encode())] if told else []
    front.intake.bytes = others = MOST_BYTES - len(LARGE) - 1
    first = await begun(front, 1, body=LARGE, headers=headers)
    second = [LARGE]
    status, said, _ = await ask(front, body=second, headers=headers)
    assert (status, said["code"], len(second)) == (503, "too_many_bytes", 1 if told else 0)
    small = await begun(front, 2, body=b"[1]")
    front.server.answer((200, "1"), (200, "2"))
    assert ((await first)[:2], (await small)[:2], front.intake.bytes) == ((200, 1), (200, 2), others)
    assert (await answering(front, 1, [(200, "3")], body=LARGE, headers=headers))[0] == 200


async def test_a_large_body_that_is_read_past_its_deadline_holds_its_bytes_and_the_only_thread():
    """Seen: bodies whose deadline had passed were read in ten threads at once, and counted as no bytes."""
    front, goes_on, began = made(slo=PATIENCE_S), threading.Event(), []
    form = SimpleNamespace(trouble=lambda value: began.append(len(value)) or (goes_on.wait(PATIENCE_S) and None))
    front.have(interface=SimpleNamespace(form=form))
    try:
        for number in (1, 2, 3):
            status, said, _ = await ask(front, body=LARGE, headers=[(b"request-timeout-ms", b"200")])
            assert (status, said["reason"]) == (503, "its body was not there and read at its deadline")
            assert (began, front.intake.open, front.intake.bytes) == ([40_000], 0, number * len(LARGE))
        goes_on.set()
        while front.intake.bytes:
            await asyncio.sleep(0.001)
        assert (await answering(front, 1, [(200, "1")], body=LARGE))[0] == 200
    finally:
        goes_on.set()
    assert began == [40_000] * 2


async def test_while_large_bodies_are_read_python_collects_no_garbage_among_all_objects():
    """Such a collection holds the process for 100 ms."""
    front = made(slo=PATIENCE_S, samples=[[[1.5, 2]], [[1, 2]] * 2], most=1 << 23)
    text, seen, before = json.dumps([[0.5, 1]] * 300_000).encode(), [], gc.get_threshold()

    def look(phase, told):
        seen.append(told["generation"])

    gc.collect()
    gc.callbacks.append(look)
    try:
        collect_seldom()
        assert (await answering(front, 1, [(200, "1")], body=text))[0] == 200
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
