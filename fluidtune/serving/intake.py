"""Takes requests in: the limits of what a front holds at once, and the reading of a body, with its deadline.

Here are all limits and deadlines of what comes from outside. A body is read in pieces by `symphony_serve.reading`, one
piece of a large body in each turn of the event loop, whatever the number of bodies, so that small requests pass. The
many inputs of one request are asked for in such pieces as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from fluidtune.serving.answers import Said, bad, refused
from fluidtune.serving.inference_protocol import JSON_SIZE
from fluidtune.serving.loaded_model import as_json
from symphony_serve.errors import ServeError
from symphony_serve.forms import Form
from symphony_serve.reading import PIECE, Reading

T = TypeVar("T")
#: Inputs that are being read or wait for their answer: far more than a front answers within any SLO. Each is held, so
#: without a limit a flood under a long SLO would need all memory.
MOST_OPEN = 10_000
#: Bodies of which a part is there: far more than a burst of whole bodies has at once. Half bodies are dropped at their
#: deadlines.
MOST_READ = 1000
#: Bytes of the bodies that are larger than a piece, of all open requests. An input takes up to ten times the
#: memory of its text, so these are up to 640 MB.
MOST_BYTES = 64 << 20
#: The largest body divided by the longest of the samples, and its bytes at the least, unless the caller says otherwise:
#: lists and texts of any length differ from their samples. Source of the bytes: nginx's `client_max_body_size`.
TIMES_SAMPLE, LEAST_BODY = 64, 1 << 20
#: The body of a request with tensors, in bodies of one input; and bytes of its JSON, which is read in one go: 10 ms at
#: the rate of `reading.PIECE`.
MOST_TENSORS, MOST_JSON = 16, 256 << 10
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

    waited: seconds in which its client let the front wait for it.
    """

    def __init__(self) -> None:
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
        #: The reading of large bodies, and the asking for many inputs. Each has its own turns, so that a request of two
        #: inputs does not wait behind a piece of each body.
        self._bodies, self.inputs = Turns(), Turns()

    @contextlib.contextmanager
    def one(self, holding: Holding) -> Iterator[None]:
        """A request is open. Raises `Said` if there are too many."""
        if self.open >= MOST_OPEN:
            raise refused("too_many", f"{MOST_OPEN} inputs are open already", self._slo)
        self.open += 1
        try:
            yield
        finally:
            self.open -= holding.inputs
            self.bytes -= holding.bytes

    def hold_inputs(self, holding: Holding, inputs: int) -> None:
        """An open request has been read, and has so many inputs. Raises `Said` if there are too many."""
        self.open += inputs - holding.inputs
        holding.inputs = inputs
        if inputs > 1 and self.open > MOST_OPEN:
            raise refused("too_many", f"with its inputs more than {MOST_OPEN} would be open", self._slo)

    async def read(self, request: Request, form: Form, most: int, until: float, holding: Holding) -> Any:
        """The input in the request's body.

        form: that it must have. most: bytes that it may have. until: when it must be read, on `time.monotonic`.
        Raises `Said`. Of a body that says that it is too large, nothing is read.
        """
        return await self._body(request, self._read(request, form, most, holding), most, until, holding)

    async def read_tensors(self, request: Request, most: int, until: float, holding: Holding) -> bytes:
        """The body of a request with tensors, of `MOST_TENSORS` times ``most`` bytes. Otherwise as `read`.

        Of its JSON, `MOST_JSON` bytes are taken: Python's parser holds the process until they are read.
        """
        text = request.headers.get(JSON_SIZE)
        length = text if text is not None else request.headers.get("content-length", "")
        if length.isdecimal() and (len(length) >= 20 or int(length) > MOST_JSON):  # Python reads 4,300 digits at most
            raise _too_much_json()
        most *= MOST_TENSORS
        body = await self._body(request, self._gather(request, most, holding), most, until, holding)
        if text is None and len(body) > MOST_JSON:
            raise _too_much_json()
        return body

    async def _body(
        self, request: Request, read: Coroutine[Any, Any, T], most: int, until: float, holding: Holding
    ) -> T:
        try:
            self._admit(request, most, holding)
        except BaseException:
            read.close()
            raise
        self.reading += 1
        try:
            return await asyncio.wait_for(read, until - time.monotonic())
        except asyncio.TimeoutError:
            said = "its body was not there and read at its deadline"
            raise refused("body_late", said, self._slo, closes=True) from None
        except ClientDisconnect:
            raise Said(400, "disconnected", "the client has gone") from None
        except ServeError as error:
            raise bad(error) from None
        finally:
            self.reading -= 1

    def _admit(self, request: Request, most: int, holding: Holding) -> None:
        """Raises `Said` for a body that is not even to be read."""
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            said = f"the body has the content encoding {encoding!r}; send it as it is"
            raise Said(415, "content_encoding", said, headers={"Accept-Encoding": "identity"})
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > most:
            raise _too_large(most)
        if self.reading >= MOST_READ:
            raise refused("too_many_bodies", f"{MOST_READ} bodies are being read already", self._slo)
        if length.isdecimal() and int(length) > PIECE:
            self._hold(holding, int(length))

    async def _gather(self, request: Request, most: int, holding: Holding) -> bytes:
        body = bytearray()
        async for chunk in _waited_for(request, holding):
            body += chunk
            if len(body) > most:
                raise _too_large(most)
            if len(body) > max(PIECE, holding.bytes):
                self._hold(holding, len(body))
        return bytes(body)

    async def _read(self, request: Request, form: Form, most: int, holding: Holding) -> Any:
        reading, fresh, size = Reading(form), bytearray(), 0
        async for chunk in _waited_for(request, holding):
            size += len(chunk)
            fresh += chunk
            if size > most:
                raise _too_large(most)
            if size > max(PIECE, holding.bytes):
                self._hold(holding, size)
            while len(fresh) > PIECE:
                await self._piece(reading, bytes(fresh[:PIECE]))
                del fresh[:PIECE]
        if size > PIECE:
            await self._piece(reading, bytes(fresh))
        elif fresh:
            reading.add(bytes(fresh))
        reading.end()
        while reading.step():
            await asyncio.sleep(0)
        return reading.value

    async def _piece(self, reading: Reading, piece: bytes) -> None:
        async with self._bodies.one():
            reading.add(piece)
            while reading.step():
                await asyncio.sleep(0)

    def _hold(self, holding: Holding, size: int) -> None:
        self.bytes += size - holding.bytes
        holding.bytes = size
        if self.bytes > MOST_BYTES and self.bytes > size:
            raise refused("too_many_bytes", f"bodies of {MOST_BYTES} bytes are being answered already", self._slo)


async def _waited_for(request: Request, holding: Holding) -> AsyncIterator[bytes]:
    """The parts of the body. What the client lets each be waited for is added to ``holding``."""
    parts = request.stream()
    while True:
        began = time.monotonic()
        try:
            part = await anext(parts)
        except StopAsyncIteration:
            return
        finally:
            holding.waited += max(0.0, time.monotonic() - began - TURN_S)
        yield part


def _too_large(most: int) -> Said:
    said = f"the body has more than {most} bytes; send less, or serve with a larger max_body"
    return Said(413, "too_large", said)


def _too_much_json() -> Said:
    said = f"the JSON of the body has more than {MOST_JSON} bytes; send binary tensors, or fewer inputs"
    return Said(413, "too_large", said)
