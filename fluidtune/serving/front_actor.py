"""The process of the front: a detached Ray actor with an event loop in a thread of its own. Ray restarts it.

What a caller asks through Ray is carried to that loop. If the front can answer nothing any more, the process ends, and
Ray starts the next one, which loads and measures anew.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop
from ray import cloudpickle
from starlette.middleware.cors import CORSMiddleware

from fluidtune.ray_compat import kept_state
from fluidtune.serving.door import Door
from fluidtune.serving.front import Front
from fluidtune.serving.service_controller import ServiceController
from fluidtune.serving.setting import Setting

logger = logging.getLogger(__name__)

#: Seconds between two looks whether the front can answer.
LOOK_S = 1.0


class OpenFront:
    """The front and its door, on their event loop. Raises OSError if the address cannot be had."""

    def __init__(self, setting: Setting):
        self.controller = ServiceController(setting)
        app: Any = Front(setting, self.controller)
        if setting.cors:
            app = CORSMiddleware(app, allow_origins=setting.cors, allow_methods=["GET", "POST"], allow_headers=["*"])
        self._door = Door(app, setting.host, setting.port)
        self._watching = asyncio.create_task(self._watch(), name="serve-health")

    async def close(self) -> None:
        self._watching.cancel()
        await self.controller.stop()
        await self._door.close()

    async def _watch(self) -> None:
        while not self.controller.trouble:
            await asyncio.sleep(LOOK_S)
        logger.error("The front ends, and Ray starts another one: %s", self.controller.trouble)
        os._exit(1)


class FrontActor:
    """Serves the `Setting` that is kept by the name ``kept``.

    Raises OSError if the address cannot be had. It has no coroutines, so that Ray calls its methods in threads.
    """

    def __init__(self, kept: str):
        self._kept = kept
        setting: Setting = cloudpickle.loads(kept_state.kept(kept))
        #: It costs a request half of asyncio's own time.
        self._loop = uvloop.new_event_loop()
        threading.Thread(target=self._run, name="serve-front", daemon=True).start()
        self._open = self._call(_awaited(OpenFront, setting))

    def ask(self, what: str, *given: Any) -> Any:
        """What this method answers: one of `ServiceController`, or of its `Rollouts`."""
        controller = self._open.controller
        return self._call(_awaited(getattr(controller, what, None) or getattr(controller.rollouts, what), *given))

    def stop(self) -> None:
        """Refuse, answer what runs, close the port, and keep what is to be kept."""
        self._call(self._open.close())
        kept_state.forget(self._kept)

    def _call(self, asked: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            os._exit(1)  # Nothing can be answered any more.


async def _awaited(ask: Callable[..., Any], *given: Any) -> Any:
    found = ask(*given)
    return await found if inspect.isawaitable(found) else found
