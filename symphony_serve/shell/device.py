"""A device, as the server sees it: runs one batch of a model at a time. `LocalDevice` is a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from symphony_serve.errors import ServeError


class Waited(NamedTuple):
    """The outputs of a batch that has waited ``seconds`` for its turn, on a device that others use as well."""

    outputs: Sequence[Any]
    seconds: float


def as_waited(returned: Sequence[Any] | Waited) -> Waited:
    """What `Device.run` returned, with its seconds of waiting."""
    return returned if isinstance(returned, Waited) else Waited(returned, 0.0)


class Device(Protocol):
    """Runs batches. The server calls one method at a time, on its event loop.

    A pipeline of stages, whose profile has parts, is given a batch before the one before is over. It returns the
    batches in their order, and the seconds that it calls waiting are those that a batch stood before stages. It calls
    ``passed`` when the batch has left its first stage; no other device is given that.
    """

    @property
    def models(self) -> frozenset[str]:
        """The names of the models that it can run."""

    async def run(
        self, model: str, inputs: list[Any], passed: Callable[[], None] | None = None
    ) -> Sequence[Any] | Waited:
        """An output for each input. Raises DeviceLost if the device is gone; any other error is the batch's answer."""

    async def check(self) -> None:
        """Look whether the device, which is idle, is there. Raises DeviceLost if it is not."""


#: A model: takes a list of inputs, and returns an output for each. On a GPU it waits for them.
Function = Callable[[list[Any]], Sequence[Any] | Waited]


class LocalDevice:
    """A device of this process: a thread that calls ``functions``, which are named by their models.

    The thread is a daemon, so that a function that never returns does not keep the process from ending.
    """

    def __init__(self, functions: Mapping[str, Function]):
        self.models = frozenset(functions)
        self._functions = dict(functions)
        self._work: SimpleQueue[tuple[str, list[Any], Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(
        self, model: str, inputs: list[Any], passed: Callable[[], None] | None = None
    ) -> Sequence[Any] | Waited:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="serve-device", daemon=True)
            self._thread.start()
        answer: Future[Any] = Future()
        self._work.put((model, inputs, answer))
        return await asyncio.wrap_future(answer)

    async def check(self) -> None:
        """It is there as long as its process."""

    def close(self) -> None:
        """End the thread when what it runs has ended."""
        self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            model, inputs, answer = work
            if not answer.set_running_or_notify_cancel():
                continue  # Nobody waits.
            try:
                answer.set_result(self._functions[model](inputs))
            except (StopIteration, CancelledError) as failed:  # To asyncio, they say other things.
                answer.set_exception(ServeError(f"it raised {failed!r}"))
            except Exception as failed:
                answer.set_exception(failed)
            except BaseException as failed:
                answer.set_exception(
                    ServeError(f"the function of model {model} wanted to end its thread by {failed!r}")
                )
