"""The front's side of the processes that hold the models: starts them, calls them, and replaces one that has died."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from fluidtune.cluster.forks.forked import ForkedActors
from fluidtune.cluster.forks.shelf import NeedsPlainProcess
from fluidtune.serving.model_process import Loading, ModelProcess, Outcome
from symphony_serve.errors import DeviceLost, ServeError
from symphony_serve.shell.threaded_server import AfterWaiting, Function

#: Seconds after which a batch that has not ended ends its process. Judgement: `ThreadedServer` has given the batch up
#: long before, after three times its time; a process that is only slow may answer others later.
HUNG_S = 60.0
#: Seconds for a process to start and to load the models; then another one is tried. Judgement: torch's import takes ten
#: on a busy machine, and a model of many gigabytes takes minutes to read.
LOAD_S = 600.0
#: Seconds within which an idle process must answer, else it gets no batch until it does. Judgement: as
#: `threaded_server.LEAST_PATIENCE_S`, for the same reason.
CHECK_S = 1.0
#: Seconds that one look waits, and the pause before another process is tried. Judgement: nothing is asked in that time.
LOOK_S = 0.2
PAUSE_S = 1.0


class RemoteDevice:
    """One device: a process of its own (`ModelProcess`), and after its death the next one.

    number: the device's number. resources: Ray's options for the process, such as ``num_gpus``. tell: is called with an
    event and its fields when a process is there, and when one is lost. forks: has the process forked; None: it is
    started as Ray does. One thread at a time calls its functions.
    """

    def __init__(
        self,
        number: int,
        loading: Loading,
        resources: Mapping[str, float],
        tell: Callable[..., None],
        forks: ForkedActors | None = None,
    ):
        # Ray would restart it at once and for ever; here it is tried again after a pause, and told with a reason.
        self._class, self._options = ray.remote(ModelProcess), {"max_restarts": 0, **resources}
        self._loading = loading
        self._number, self._tell, self._forks = number, tell, forks
        self._names = [trial.name for trial in loading.trials]
        #: How many processes it has had.
        self._processes = 0
        #: The id of its process; None: it is not there.
        self.pid: int | None = None
        #: The question that its idle process has not answered, and when it is given up; None: there is none.
        self._asked: tuple[Any, float] | None = None
        #: Whether there is to be no process any more.
        self._over = False
        self._start()

    def _start(self) -> None:
        runtime_env = self._forks.runtime_env() if self._forks is not None else {}
        self._actor = self._class.options(**self._options, runtime_env=runtime_env or None).remote(self._loading)
        self._told = self._actor.ready.remote()
        self._began = time.monotonic()
        self._until = self._began + LOAD_S
        self._processes += 1

    def look(self, wait_s: float = LOOK_S) -> dict[str, list[Any]] | None:
        """The samples of each model, if the process is there within ``wait_s`` seconds.

        Raises ServeError if a model cannot be loaded.
        """
        try:
            pid, samples = ray.get(self._told, timeout=wait_s)
        except GetTimeoutError:
            if time.monotonic() > self._until:
                said = f"no process has loaded the models within {LOAD_S:.0f} s"
                raise ServeError(f"{said}; is there a free device, and does load end?")
            return None
        except RayError as error:
            if self._plainly(error):
                self.again()
                return None
            ended = f"a process has ended before it had loaded the models ({_said(error)})"
            raise ServeError(_own(error) or f"{ended}; does load end it, or need more memory than there is?") from None
        self.pid = pid
        seconds = time.monotonic() - self._began
        self._tell("worker_started", worker=self._worker, device=self._number, pid=pid, seconds=seconds)
        return samples

    @property
    def _worker(self) -> str:
        return f"models-{self._number}-{self._processes}"

    def functions(self) -> dict[str, Function]:
        """By model, what `ThreadedServer` calls: inputs in, an `Outcome` for each out."""
        return {name: self._function(name) for name in self._names}

    def measured(self) -> dict[str, Function]:
        """By model, what is measured: the same way, but what fails raises."""
        return {name: self._measure(name) for name in self._names}

    def check(self) -> None:
        """Ask the process, which is idle, whether it is there. Raises DeviceLost if it does not answer."""
        self._asked = self._actor.alive.remote(), time.monotonic() + HUNG_S
        if not self._answers(CHECK_S):
            raise DeviceLost("it is idle and does not answer", self._back)

    def _answers(self, wait_s: float) -> bool:
        """Whether the process answers what it was asked, within ``wait_s``. One that has died is replaced."""
        assert self._asked is not None
        told, until = self._asked
        try:
            ray.get(told, timeout=wait_s)
        except RayError as error:
            if isinstance(error, GetTimeoutError) and time.monotonic() < until:
                return False
            self._asked = None
            self._replace(_said(error))
            return False
        self._asked = None
        return True

    def _replace(self, why: str) -> None:
        if not self._over:
            self._tell("worker_lost", worker=self._worker, device=self._number, reason=why)
            self.again()

    def stop(self) -> None:
        """End the process. The batch that it runs is lost."""
        self._over = True
        self.pid = None
        ray.kill(self._actor)

    def again(self) -> None:
        """End the process and start another one, unless the device was stopped."""
        self.pid = None
        ray.kill(self._actor)
        if not self._over:
            self._start()

    def _function(self, name: str) -> Callable[[list[Any]], list[Outcome]]:
        def run(inputs: list[Any]) -> list[Outcome]:
            try:
                outcomes, waited = ray.get(self._actor.run.remote(name, inputs), timeout=HUNG_S)
            except RayTaskError as error:
                if not self._plainly(error):
                    raise
                self.again()
                raise DeviceLost(_said(error), self._back) from None
            except RayError as error:  # the process died, or cannot be reached, or hangs
                said = _said(error)
                self._replace(said)
                raise DeviceLost(said, self._back) from None
            return AfterWaiting(outcomes, waited)

        return run

    def _plainly(self, error: Exception) -> bool:
        """Whether the process must not be a forked one, and the next one will not be."""
        why = NeedsPlainProcess.said_by(error)
        if why is None or self._forks is None:
            return False
        self._forks.turn_off(why)
        return True

    def _measure(self, name: str) -> Callable[[list[Any]], list[Outcome]]:
        def run(inputs: list[Any]) -> list[Outcome]:
            try:
                return AfterWaiting(*ray.get(self._actor.measure.remote(name, inputs), timeout=HUNG_S))
            except RayTaskError as error:
                self._plainly(error)  # the next attempt has plain processes
                raise

        return run

    def _back(self) -> bool:
        if self._asked is not None:
            return self._answers(LOOK_S)
        try:
            return self.look() is not None
        except ServeError:
            time.sleep(PAUSE_S)
            self.again()
            return False


def _own(error: Exception) -> str | None:
    """What the model's own process has said of the error; None: it has said nothing."""
    cause: BaseException = getattr(error, "cause", None) or error
    own = [line for line in str(cause).splitlines() if "ServeError: " in line]
    return own[-1].split("ServeError: ", 1)[1] if own else None


def _said(error: Exception) -> str:
    """The error in one line. An error of the model's own process is told by its own text."""
    cause: BaseException = getattr(error, "cause", None) or error
    text = str(cause).strip()
    return _own(error) or (text.splitlines()[-1] if text else type(cause).__name__)
