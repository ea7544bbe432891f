"""An `AsyncServer` on an event loop of a thread of its own, which other threads ask: for benchmarks and tests.

In the product all is one loop. A sender of requests that sleeps until the next one is due needs a thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from symphony_serve.model_side import Model
from symphony_serve.shell.async_server import Answer, AsyncServer
from symphony_serve.shell.device import Device, Function, LocalDevice


def copy(answer: Answer, asked: Future[Any]) -> None:
    """What becomes of a request, for the thread that asks."""
    if answer.exception() is not None:
        asked.set_exception(answer.exception())
    else:
        asked.set_result(answer.result())


class LoopThread:
    """An event loop that runs in a thread until `end`."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="serve-loop", daemon=True)
        self._thread.start()

    def run(self, awaited: Coroutine[Any, Any, Any]) -> Any:
        """Wait for the coroutine, which runs on the loop."""
        return asyncio.run_coroutine_threadsafe(awaited, self.loop).result()

    def call(self, function: Callable[[], Any]) -> Any:
        """Call the function on the loop."""

        async def calls() -> Any:
            return function()

        return self.run(calls())

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class ServedByThread:
    """Makes and calls the server on a loop. devices: for each the functions by model, or a `Device`."""

    def __init__(
        self,
        models: Sequence[Model],
        devices: Sequence[Mapping[str, Function] | Device] | Mapping[int, Device],
        *,
        kind: Callable[..., AsyncServer] = AsyncServer,
    ):
        self.thread = LoopThread()
        self._local: list[LocalDevice] = []
        numbered = devices if isinstance(devices, Mapping) else dict(enumerate(devices))
        try:
            made = {number: self._device(device) for number, device in numbered.items()}
            self.server = self.thread.call(lambda: kind(models, made))
        except BaseException:
            self.thread.end()
            raise

    def _device(self, device: Mapping[str, Function] | Device) -> Device:
        if not isinstance(device, Mapping):
            return device
        self._local.append(LocalDevice(device))
        return self._local[-1]

    def submit(self, model: str, value: Any) -> Future[Any]:
        """As `AsyncServer.ask`, from any thread. Callbacks run on the loop."""
        asked: Future[Any] = Future()
        ask = partial(self.server.ask, model, value)
        self.thread.loop.call_soon_threadsafe(lambda: ask().add_done_callback(lambda answer: copy(answer, asked)))
        return asked

    def close(self) -> None:
        """Close the server. Its loop goes on, for those who ask it."""
        self.thread.run(self.server.close())
        for device in self._local:
            device.close()

    def __enter__(self) -> ServedByThread:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        self.thread.end()
