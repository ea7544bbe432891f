"""An `AsyncServer` on an event loop of a thread of its own, which other threads ask: for benchmarks and tests.

In the product all is one loop. A sender of requests that sleeps until the next one is due needs a thread.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from symphony_serve.messages import Reason
from symphony_serve.model_side import Model
from symphony_serve.shell.async_server import Answer, AsyncServer, BatchSeen
from symphony_serve.shell.device import Device, Function, LocalDevice


class Asked(Future):
    """What becomes of a request. `cancel` works until its batch is sent."""

    def __init__(self, call: Callable[[Callable[[], Any]], Any]):
        super().__init__()
        self._call = call
        self.answer: Answer | None = None

    def cancel(self) -> bool:
        """Take the request out of its queue. False: its batch was sent, or it is answered."""
        return self._call(lambda: not self.answer.sent and self.answer.cancel())

    def copy(self, answer: Answer) -> None:
        if answer.cancelled():
            super().cancel()
            self.set_running_or_notify_cancel()
        elif answer.exception() is not None:
            self.set_exception(answer.exception())
        else:
            self.set_result(answer.result())


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
        watch: Callable[[BatchSeen], None] | None = None,
        kind: Callable[..., AsyncServer] = AsyncServer,
    ):
        self.thread = LoopThread()
        self.call = self.thread.call
        self._local: list[LocalDevice] = []
        numbered = devices if isinstance(devices, Mapping) else dict(enumerate(devices))
        try:
            made = {number: self._device(device) for number, device in numbered.items()}
            self.server = self.call(lambda: kind(models, made, watch))
        except BaseException:
            self.thread.end()
            raise

    def _device(self, device: Mapping[str, Function] | Device) -> Device:
        if not isinstance(device, Mapping):
            return device
        self._local.append(LocalDevice(device))
        return self._local[-1]

    def submit(self, model: str, value: Any, within: float = math.inf) -> Asked:
        """As `AsyncServer.ask`, from any thread. Callbacks run on the loop."""
        asked = Asked(self.call)

        def ask() -> None:
            asked.answer = self.server.ask(model, value, within)
            asked.answer.add_done_callback(asked.copy)

        self.thread.loop.call_soon_threadsafe(ask)
        return asked

    def hopeless(self, model: str, within: float = math.inf, count: int = 1) -> Reason | None:
        return self.call(lambda: self.server.hopeless(model, within, count))

    def look(self, name: str) -> Any:
        """The server's attribute of this name, when all that was asked before has reached it."""
        return self.call(lambda: getattr(self.server, name))

    def join(self, number: int, device: Mapping[str, Function] | Device) -> None:
        self.call(lambda: self.server.join(number, self._device(device)))

    def leave(self, number: int) -> None:
        self.call(lambda: self.server.leave(number))

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
