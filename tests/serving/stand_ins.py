"""Stands for processes of models, which load, run and die when the test says so."""

from __future__ import annotations

import asyncio

from fluidtune.serving.device import Device
from fluidtune.serving.loaded_model import Samples
from symphony_serve.errors import DeviceLost, ServeError
from symphony_serve.shell.device import Waited


class FakeProcess:
    """Stands for a `Process`. A batch of the model "a" with the input 1 is answered "a1", when `go` is set.

    loads: whether it is ready at once, or why it does not load. mortal: what becomes of its next batches. entered: how
    many batches it was given.
    """

    started = 0

    def __init__(self, loading, changed, loads=True):
        self.loading, self.changed, self.key = loading, changed, loading.trials[0].name
        self.samples, self.bytes, self.trouble, self.stages = Samples([1], [1]), 7, "", []
        FakeProcess.started += 1
        self.pids, self._pid, self.mortal, self.where = [], FakeProcess.started, False, None
        self.go, self.stopped, self.entered = asyncio.Event(), False, 0
        self.go.set()
        self.state = "loading"
        if loads is True:
            self.loads()
        elif loads:
            self.fails(str(loads))

    def loads(self):
        self.state, self.pids, self.trouble = "ready", [self._pid], ""
        self.changed()

    def fails(self, why):
        self.state, self.pids, self.trouble = "loading", [], why
        self.changed()

    def dies(self):
        self.state, self.pids = "loading", []
        self.changed()

    def stop(self):
        self.state, self.pids, self.stopped = "ended", [], True

    async def loaded(self):
        while self.state != "ready":
            if self.trouble or self.stopped:
                raise ServeError(self.trouble or "its process was ended")
            await asyncio.sleep(0.001)

    async def back(self):
        await asyncio.sleep(0)
        if self.trouble or self.stopped:
            raise ServeError(self.trouble or "its process was ended")
        return self.state == "ready"

    async def run(self, inputs, passed=None):
        self.entered += 1
        await self.go.wait()
        if self.mortal and self.state == "ready":
            self.dies()
        if self.state != "ready":
            raise DeviceLost("killed", self.back)
        return Waited([f"{self.key}{value}" for value in inputs], 0.5)

    measure = run

    async def check(self):
        await self.answers()

    async def answers(self):
        await self.go.wait()
        if self.mortal and self.state == "ready":
            self.dies()
        return self.state == "ready"

    async def place(self):
        return self.where


class FakeDevices:
    """Stands for `Devices`: has these devices, which have what is desired."""

    def __init__(self, desired, *devices):
        self.desired, self.present = desired, dict(enumerate(devices))

    def reconcile(self):
        for number, device in self.present.items():
            device.want(self.desired(number))


async def settled():
    """All versions have loaded or ended."""
    while work := [one for one in asyncio.all_tasks() if one.get_name() == "serve-rollout"]:
        await asyncio.wait(work)


def device(loads=True, happens=lambda key: None):
    """A device of such processes. happens: is called with the key of a process that starts."""

    def make(loading, changed):
        happens(loading.trials[0].name)
        return FakeProcess(loading, changed, loads(loading.trials[0].name) if callable(loads) else loads)

    return Device(make)
