"""Stands for processes of models, which load, run and die when the test says so."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from fluidtune.serving.device import Device
from fluidtune.serving.loaded_model import Samples
from fluidtune.serving.rollouts import Answering, Rollouts
from symphony_serve.delays import Delays
from symphony_serve.errors import DeviceLost, ServeError
from symphony_serve.model_side import EAGER, Batching, Model
from symphony_serve.profiles import Profile
from symphony_serve.shell.device import Waited
from tests.serving.fake_ray import loading


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


class FakeServer:
    """Stands for a server: the models that were added, and `go`, which is waited for by each that is removed."""

    def __init__(self):
        self.added, self.go = [], asyncio.Event()
        self.go.set()
        self.add = self.added.append

    async def remove(self, key):
        await self.go.wait()


def rollouts(*devices, trials="a", folder="folder", tell=lambda event, **fields: None):
    """A `Rollouts` whose first version serves on these devices. trials: their names, or how they are loaded."""
    loads = loading(*trials) if isinstance(trials, str) else trials
    known = SimpleNamespace(name="digits", user="anna")
    about = {"slo": 1.0, "max_batch": 4, "max_body": None, "batching": Batching.WINDOW, "policy": EAGER}
    setting = SimpleNamespace(known=known, run="run", folder=folder, stages=1, placing=None, loading=loads, **about)
    made = Rollouts(setting, tell)
    model = Model(made.keys[0], Profile.linear(0.0, 1e-9, 1), 1.0, delays=Delays(jitter=0.01))
    made.answering[model.name] = Answering.of(model, Samples([1], [1]), 100)
    there = FakeDevices(made.desired, *devices)
    there.reconcile()
    made.begin(FakeServer(), SimpleNamespace(serves=lambda *given: None, forget=lambda key: None), there)
    return made


async def settled():
    """All versions have loaded or ended."""
    while work := [one for one in asyncio.all_tasks() if one.get_name() == "serve-rollout"]:
        await asyncio.wait(work)


def device(loads=True):
    """A device of such processes. loads: as of each, or what is called with its key."""

    def make(loading, changed):
        return FakeProcess(loading, changed, loads(loading.trials[0].name) if callable(loads) else loads)

    return Device(make)
