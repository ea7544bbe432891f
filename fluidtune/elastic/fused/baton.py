"""Several loops in one process of which one runs at a time: whose turn it is, and whose work is done together.

A loop's thread holds the *baton* while it runs. It hands it on where it needs work that may be done for several trials
at once (a `Request`), and goes on when this is done. `choose` decides whose turn is next. It prefers a loop that can
run, so that the requests of all are there when the work is done; but a loop that has used up more time than the others
is not waited for.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .own_streams import OwnStreams

#: A loop is waited for until it has used this many times the common work more than the one that waits. Judgement: all
#: loops must run on this core in the end, so that waiting costs nothing but the order; but a loop that validates for
#: minutes must not hold up others for as long.
PATIENCE = 100.0
#: Seconds in a row in which a loop held the baton and did not compute, from which on they count as used. Judgement:
#: longer than an operating system lets another process run.
_IDLE = 0.05


@dataclass(eq=False)
class Request:
    """Work that a loop waits for.

    ``key``: requests of equal keys are done together, by ``perform``. If it raises, it must have changed nothing; each
    loop does its own work then. ``took``: seconds that such work took last; inf: not known.
    """

    key: Hashable
    perform: Callable[[list[Request]], None]
    took: float = math.inf
    data: Any = None
    #: What ``perform`` leaves here; None: the loop does the work by itself.
    result: Any = None
    #: What ``perform`` raised.
    error: Exception | None = None


@dataclass(eq=False)
class Runner:
    """One loop's thread. ``used``: the seconds of computing and waiting of its own, with the baton."""

    name: str
    streams: OwnStreams
    used: float = 0.0
    request: Request | None = None
    #: It blocks elsewhere, or has not begun, and takes no part.
    apart: bool = True
    since: tuple[float, float] = (0.0, 0.0)
    go: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.go.acquire()


def choose(runners: Sequence[Runner]) -> Runner | list[Runner] | None:
    """Who runs next: a runner, or the runners whose requests are done together. None: all are apart."""
    here = [runner for runner in runners if not runner.apart]
    ready = [runner for runner in here if runner.request is None]
    waiting = [runner for runner in here if runner.request is not None]
    first = min(ready, key=_used, default=None)
    longest = min(waiting, key=_used, default=None)
    if longest is None or longest.request is None:
        return first
    if first is not None and first.used <= longest.used + PATIENCE * longest.request.took:
        return first
    key = longest.request.key
    return [runner for runner in waiting if runner.request is not None and runner.request.key == key]


def _used(runner: Runner) -> float:
    return runner.used


class Baton:
    """Hands the turn from one runner to the next."""

    def __init__(self) -> None:
        self._runners: list[Runner] = []
        self._lock = threading.Lock()
        #: Who holds the baton; None: all are apart.
        self.holder: Runner | None = None

    def add(self, runner: Runner) -> None:
        """In any thread: let this runner take part from now on, so that the others wait for what it does first."""
        with self._lock:
            self._runners.append(runner)
        self._arrive(runner)

    def enter(self, runner: Runner) -> None:
        """In the thread of a runner that was added: wait for the first turn."""
        runner.go.acquire()
        self._start(runner)

    def end(self, runner: Runner) -> None:
        """In the runner's thread, which holds the baton: it takes no part any more."""
        self._stop(runner)
        with self._lock:
            self._runners.remove(runner)
        self._go_on(None)

    def wait(self, runner: Runner, request: Request | None) -> None:
        """In the runner's thread, which holds the baton: hand it on, and return when the request is done.

        None: as soon as it is this runner's turn again.
        """
        self._stop(runner)
        runner.request = request
        self._go_on(runner)
        self._start(runner)

    @contextmanager
    def apart(self, runner: Runner) -> Iterator[None]:
        """Let the others run while this thread, which holds the baton, waits for something else."""
        self._stop(runner)
        runner.apart = True
        self._go_on(None)
        try:
            yield
        finally:
            self._arrive(runner)
            self.enter(runner)

    def _arrive(self, runner: Runner) -> None:
        with self._lock:
            # Who was away has no claim to the time that the others had meanwhile.
            here = [other.used for other in self._runners if not other.apart]
            runner.used = max(runner.used, min(here, default=0.0))
            runner.apart = False
            free = self.holder is None
            if free:
                self.holder = runner
        if free:
            runner.go.release()

    def _start(self, runner: Runner) -> None:
        runner.streams.put()
        runner.since = time.perf_counter(), time.thread_time()

    def _stop(self, runner: Runner) -> None:
        passed, computed = time.perf_counter() - runner.since[0], time.thread_time() - runner.since[1]
        runner.used += passed if passed - computed > _IDLE else computed
        runner.streams.take()

    def _go_on(self, me: Runner | None) -> None:
        """Do common work, and hand the baton to whoever is next. Returns when ``me`` has it, at once if None."""
        while True:
            with self._lock:
                chosen = choose(self._runners)
                if not isinstance(chosen, list):
                    self.holder = chosen
                    break
            self._perform(chosen)
        if chosen is me:
            return
        if chosen is not None:
            chosen.go.release()
        if me is not None:
            me.go.acquire()

    def _perform(self, together: list[Runner]) -> None:
        requests = [runner.request for runner in together if runner.request is not None]
        try:
            requests[0].perform(requests)
        except Exception as error:
            for request in requests:
                request.result, request.error = None, error
        for runner in together:
            runner.request = None
