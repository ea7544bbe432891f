"""A Ray that a test holds in its hands: actors answer what the test says, when it says it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from concurrent.futures import Future
from types import SimpleNamespace

from fluidtune.serving import process as process_module
from fluidtune.serving.loaded_model import Samples
from fluidtune.serving.model_layers import Stage
from fluidtune.serving.model_process import Loading, Passed, Started
from fluidtune.serving.process import Process
from fluidtune.serving.winners import Winner

STAGES = (Stage(0, 1, 1.0, 8, 4), Stage(1, 3, 1.0, 8, 4))
SAMPLES = Samples([1], [2])


def loading(*names):
    return Loading(b"", (), tuple(Winner(name, None, {}, 1.0) for name in names))


class FakeRay:
    """asked: what each call has asked, in their order: the actor, the method, what it got. alive: actors not killed."""

    def __init__(self, monkeypatch):
        self.asked, self.alive, self._made = [], [], 0
        self._answers = defaultdict(asyncio.Queue)
        monkeypatch.setattr(process_module, "ray", self)
        monkeypatch.setattr(Process, "ACTOR", self)
        monkeypatch.setattr(process_module, "PAUSE_S", 0.0)
        monkeypatch.setattr(process_module, "fetched", self.fetched)

    def say(self, method, answer):
        """The next call of the method that is waited for gets this answer; an exception is raised."""
        self._answers[method].put_nowait(answer)

    def options(self, **given):
        def start(*given):
            self._made += 1
            name = f"{self._made}"
            self.alive.append(name)
            methods = ("ready", "run", "measure", "alive", "place")
            calls = {one: SimpleNamespace(remote=lambda *got, one=one: (name, one, *got)) for one in methods}
            first = SimpleNamespace(options=lambda **given: SimpleNamespace(remote=lambda got: self._first(name, got)))
            return SimpleNamespace(name=name, run_first=first, **calls)

        return SimpleNamespace(remote=start)

    def _first(self, name, got):
        self.left = Future()
        return (name, "run_first", got), SimpleNamespace(future=lambda: self.left)

    def kill(self, actor):
        if actor.name in self.alive:
            self.alive.remove(actor.name)

    async def fetched(self, reference, wait_s):
        self.asked.append(reference)
        answer = await self._answers[reference[1]].get()
        answer = await answer if asyncio.isfuture(answer) else answer
        if isinstance(answer, Exception):
            raise answer
        return answer


class One:
    """A process of one actor."""

    actors, waited = 1, 0.5

    def make(self, ray, tell, changed, forks=None):
        return Process(1, loading("t"), {"CPU": 1.0}, "its group", tell, changed, forks)

    def ready(self, pid):
        return Started((pid,), SAMPLES, (), 9)

    def batch(self, *values):
        return Passed([(200, str(one)) for one in values], len(values), (0.0,), waited=0.5)


class Staged:
    """A chain of two actors, which is one process to its device."""

    actors, waited = 2, 0.0

    def make(self, ray, tell, changed, forks=None):
        return Process(1, loading("t"), {"CPU": 1.0}, "its group", tell, changed, forks, 2, 1e9)

    def ready(self, pid):
        return Started((pid, pid + 1), SAMPLES, STAGES)

    def batch(self, *values):
        return Passed([(200, str(one)) for one in values], len(values), (0.0, 0.0))
