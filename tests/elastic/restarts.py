"""Runs a training loop as the host of its process does, ends it, and starts it again: for tests of commits.

A `Trial` is what outlives a process: Tune's results and the folder of the commits. `Trial.life` is one process: a
session, and fresh objects of the loop. All lives are in this process, so that a test has dozens of them in a second.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch

from fluidtune import elastic
from fluidtune.elastic import BeginsAnew, Commit, CommitStore, ElasticSession, Left
from fluidtune.elastic.data.trial_state import TrialState
from fluidtune.elastic.random_streams import capture_streams, restore_streams

Loop = Callable[[Callable[..., None]], Any]


class Died(BaseException):
    """The process was killed."""


class LocalFiles:
    """Folders of this machine."""

    def write_bytes(self, path: str, data: bytes) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(data)

    def read_bytes(self, path: str) -> bytes:
        return Path(path).read_bytes()


def state_of(*objects: Any, pickling: Any = pickle, device: str = "cpu") -> TrialState:
    """That of a trial whose loop begins now, with these objects."""
    state = TrialState(torch.device(device), pickling)
    state.add(objects)
    state.loop_begins()
    return state


def store_in(folder: Any, **more: Any) -> CommitStore:
    return CommitStore(str(folder), **{"files": LocalFiles(), **more})


class EveryBoundary(CommitStore):
    """Commits at every boundary, at once. ``at``: only at these iterations."""

    at: set[int] | None = None

    def __init__(self, folder: Any) -> None:
        super().__init__(str(folder), files=LocalFiles())

    def offer(self, make: Callable[[], Commit], *, force: bool = False, times: int = 1) -> bool:
        if not force and self.at is not None and make().iteration not in self.at:
            return False
        return super().offer(make, force=True) and self.flush()


class Trial:
    """One trial. ``at``: the iterations that are committed, None: all."""

    def __init__(self, folder: Path, at: set[int] | None = None) -> None:
        self.folder, self.at = str(folder), at
        #: What Tune has of each iteration.
        self.results: list[dict[str, Any]] = []
        #: Of each life, the iterations that it has run, and the line that it ended with.
        self.ran: list[list[int]] = []
        self.said: list[str | None] = []
        self.session: ElasticSession | None = None
        #: Calls of modules are divided in this life.
        self.divided = False
        #: The iterations done, as the host counts them.
        self.iteration = 0

    def life(self, loop: Loop, *, dies: int | None = None, leaves: int | None = None) -> Any:
        """One process, which is killed in report number ``dies``, or asked to leave there. Returns what it returns."""
        random.seed(3), numpy.random.seed(4), torch.manual_seed(5)
        resume = store_in(self.folder).load()
        if resume is not None:
            restore_streams(resume.streams or {})
        self.iteration = 0 if resume is None else resume.starts.note
        since: list[dict[str, Any]] = []
        ran: list[int] = []

        def go_on(note: int) -> None:
            self.iteration = note

        def take() -> list[dict[str, Any]]:
            found = list(since)
            since.clear()
            return found

        def report(**metrics: Any) -> None:
            self.iteration += 1
            ran.append(self.iteration)
            since.append(metrics)
            if self.iteration > len(self.results):
                why = session.unproved_by(None)
                if why is not None:
                    raise BeginsAnew(why)
                self.results.append(metrics)
            if self.iteration == dies:
                raise Died
            if self.iteration == leaves:
                session.leave()

        store = EveryBoundary(self.folder)
        store.at = self.at
        self.session = session = ElasticSession(
            trial="t",
            commits=store,
            resume=resume,
            fingerprint="f",
            note=lambda: self.iteration,
            rewind=go_on,
            reports=take,
            divided=lambda: self.divided,
            streams=capture_streams(),
        )
        elastic.use(session)
        self.ran.append(ran)
        self.said.append(None)
        try:
            value = loop(report)
            session.ended()
            return value
        except (Died, Left):
            return None
        except BeginsAnew as error:
            self.said[-1] = str(error)
            return None
        except Exception as error:
            self.said[-1] = session.unproved_by(error)
            if self.said[-1] is None:
                raise
            return None
        finally:
            session.close()
            elastic.use(None)
            for loader in session._objects._loaders:
                if loader._iterator is not None:
                    loader._iterator._shutdown_workers()

    def to_its_end(self, loop: Loop) -> Any:
        """Lives until one comes to the end of the loop, as the host begins a trial anew."""
        value = self.life(loop)
        while self.said[-1] is not None:
            assert len(self.said) < 9
            value = self.life(loop)
        return value


def same(a: Any, b: Any) -> bool:
    """Whether two results are the same to the bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b or (a != a and b != b))
