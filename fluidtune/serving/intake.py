"""Takes requests in: the limits of what a front holds at once, and the reading of a body, with its deadline.

Here are all limits and deadlines of what comes from outside. One other thread reads the large bodies, and one writes
the large answers, each one at a time. The many inputs of one request are asked for in pieces, one in each turn of the
event loop, whatever the number of requests, so that small ones pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from fluidtune.serving.answers import HTTPError, refused
from fluidtune.serving.loaded_model import as_json

T = TypeVar("T")
#: Inputs that are being read or wait for their answer: far more than a front answers within any SLO. Each is held, so
#: without a limit a flood under a long SLO would need all memory.
MOST_OPEN = 10_000
#: Bodies of which a part is there: far more than a burst of whole bodies has at once. Half bodies are dropped at their
#: deadlines.
MOST_READ = 1000
#: Bytes of JSON that the event loop reads or writes itself. Source: msgspec and `Form.trouble` together take 2 ms for
#: as many bytes of numbers on a core of an AMD EPYC. Other threads share Python's lock with the loop, and hold it for
#: some of the steps of a body: 25 ms for the numbers of 10 MB.
LARGE = 128 << 10
#: Bytes of the bodies that are `LARGE`, of all open requests. As numbers they take up to ten times the memory, 640 MB.
#: A sample with an empty list allows anything in it: nested lists of one item take 45 times the memory, 2.9 GB.
MOST_BYTES = 64 << 20
#: The largest body divided by the longest of the samples, and its bytes at the least, unless the caller says otherwise:
#: lists and texts of any length differ from their samples. Source of the bytes: nginx's `client_max_body_size`.
TIMES_SAMPLE, LEAST_BODY = 64, 1 << 20
#: The body of a request with tensors, in bodies of one input.
MOST_TENSORS = 16
#: Collections of Python's middle generation before one of all objects (`gc.set_threshold`, whose default is 10). One of
#: all holds the process for 100 ms and more while nested lists are read. With this there is one in 70 million objects.
SELDOM = 10_000


def collect_seldom() -> None:
    """Let Python's collector never look again at what is there now, and seldom at all objects that came since."""
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], SELDOM)


def largest_body(samples: Sequence[Any]) -> int:
    """Bytes that a body may have, by these inputs."""
    return max(LEAST_BODY, TIMES_SAMPLE * max(len(json.dumps(sample, default=as_json)) for sample in samples))


#: Seconds that the front itself may let a part of a body wait: its loop reads on when it has served the others.
#: Judgement: some turns of a busy loop.
TURN_S = 0.05


class Holding:
    """What an open request holds: its inputs, of which it has one until it is read, and bytes of its body.

    until: when its answer is wanted, on `time.monotonic`. waited: seconds in which its client let the front wait. job:
    the latest work for it in another thread, which holds the bytes until that thread is done with it.
    """

    def __init__(self, until: float) -> None:
        self.until = until
        self.job: asyncio.Future[Any] | None = None
        self.inputs, self.bytes, self.waited = 1, 0, 0.0


class Turns:
    """In a turn of the event loop one piece of a certain work is done, whoever has such work to do.

    A piece is what is done in 1 to 2 ms.
    """

    def __init__(self) -> None:
        #: Held by whoever does a part; and the pieces that were done since the loop last had its turn.
        self._lock, self._done = asyncio.Lock(), 0.0

    @contextlib.asynccontextmanager
    async def one(self, pieces: float = 1.0) -> AsyncIterator[None]:
        """Do a part of so many pieces, when it is its turn."""
        async with self._lock:
            yield
            self._done += pieces
            if self._done >= 1.0:
                self._done = 0.0
                await asyncio.sleep(0)


class Intake:
    """The open requests of a front with this SLO, in seconds. One event loop calls it."""

    def __init__(self, slo: float):
        self._slo = slo
        #: How many inputs are open, how many requests are being read, and how many bytes they hold.
        self.open = self.reading = self.bytes = 0
        #: The asking for many inputs, and the threads for large bodies and large answers.
        self.inputs = Turns()
        self._reads, self._writes = ThreadPoolExecutor(1, "serve-reads"), ThreadPoolExecutor(1, "serve-writes")

    @contextlib.contextmanager
    def one(self, holding: Holding) -> Iterator[None]:
        """A request is open. Raises `HTTPError` if there are too many."""
        if self.open >= MOST_OPEN:
            raise refused("too_many", f"{MOST_OPEN} inputs are open already", self._slo)
        self.open += 1
        try:
            yield
        finally:
            self.open -= holding.inputs
            if holding.job is not None and not holding.job.done():  # The thread has the body still.
                holding.job.add_done_callback(lambda _: self._hold(holding, 0))
            else:
                self._hold(holding, 0)

    def hold_inputs(self, holding: Holding, inputs: int) -> None:
        """An open request has been read, and has so many inputs. Raises `HTTPError` if there are too many."""
        self.open += inputs - holding.inputs
        holding.inputs = inputs
        if inputs > 1 and self.open > MOST_OPEN:
            raise refused("too_many", f"with its inputs more than {MOST_OPEN} would be open", self._slo)

    async def read(self, request: Request, decode: Callable[[bytes], T], most: int, holding: Holding) -> T:
        """What is decoded of the request's body. most: bytes that it may have.

        Raises `HTTPError`, and what ``decode`` raises. Of a body that says that it is too large, nothing is read.
        """

        self._admit(request, most, holding)
        self.reading += 1
        try:
            body = await asyncio.wait_for(self._gather(request, most, holding), holding.until - time.monotonic())
            return decode(body) if len(body) <= LARGE else await _beside(self._reads, lambda: decode(body), holding)
        except asyncio.TimeoutError:
            said = "its body was not there and read at its deadline"
            raise refused("body_late", said, self._slo, closes=True) from None
        except ClientDisconnect:
            raise HTTPError(400, "disconnected", "the client has gone") from None
        finally:
            self.reading -= 1

    async def write(self, size: int, encode: Callable[[], T], holding: Holding) -> T:
        """An answer of so many bytes of JSON. Raises asyncio.TimeoutError if it is large and late."""
        return encode() if size <= LARGE else await _beside(self._writes, encode, holding)

    def _admit(self, request: Request, most: int, holding: Holding) -> None:
        """Raises `HTTPError` for a body that is not even to be read."""
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            said = f"the body has the content encoding {encoding!r}; send it as it is"
            raise HTTPError(415, "content_encoding", said, headers={"Accept-Encoding": "identity"})
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > most:
            raise _too_large(most)
        if self.reading >= MOST_READ:
            raise refused("too_many_bodies", f"{MOST_READ} bodies are being read already", self._slo)
        if length.isdecimal() and int(length) > LARGE:
            self._hold(holding, int(length))

    async def _gather(self, request: Request, most: int, holding: Holding) -> bytes:
        """The body. What the client lets each part of it be waited for is added to ``holding``."""
        body, parts = bytearray(), request.stream()
        while True:
            began = time.monotonic()
            try:
                body += await anext(parts)
            except StopAsyncIteration:
                return bytes(body)
            finally:
                holding.waited += max(0.0, time.monotonic() - began - TURN_S)
            if len(body) > most:
                raise _too_large(most)
            if len(body) > max(LARGE, holding.bytes):
                self._hold(holding, len(body))

    def _hold(self, holding: Holding, size: int) -> None:
        self.bytes += size - holding.bytes
        holding.bytes = size
        if size and self.bytes > MOST_BYTES and self.bytes > size:
            raise refused("too_many_bytes", f"bodies of {MOST_BYTES} bytes are being answered already", self._slo)


async def _beside(thread: ThreadPoolExecutor, do: Callable[[], T], holding: Holding) -> T:
    """What is done in this thread. Raises asyncio.TimeoutError at the deadline; what has not begun then never does."""

    def in_time() -> T:
        if time.monotonic() >= holding.until:
            raise asyncio.TimeoutError
        return do()

    holding.job = asyncio.get_running_loop().run_in_executor(thread, in_time)
    return await asyncio.wait_for(asyncio.shield(holding.job), holding.until - time.monotonic())


def _too_large(most: int) -> HTTPError:
    said = f"the body has more than {most} bytes; send less, or serve with a larger max_body"
    return HTTPError(413, "too_large", said)
