"""A follower in its worker process: it runs the trial's code beside the leader's, and nothing of it is seen.

A trial's side effects are its leader's alone. So a follower gets a new working directory, which is removed when
the follower ends, or by the next follower if it is killed; its log files are there, too. What it prints goes nowhere,
its reports are dropped, and trackers record nothing (`silent_trackers`). What remains is said in `fluidtune.elastic`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ray.tune import Trainable
from ray.tune.trainable import FunctionTrainable

from fluidtune.cluster import held_folders
from fluidtune.cluster.hosting.silent_trackers import silent
from fluidtune.elastic import LoopThread, Reform, current
from fluidtune.elastic.checks.verdict import Verdict
from fluidtune.elastic.errors import CannotDivide, Refused
from fluidtune.elastic.random_streams import Streams, restore_streams
from fluidtune.ray_compat import trainable as ray_trainable

if TYPE_CHECKING:
    from fluidtune.cluster.sharing.gpu_probe import GpuProbe
    from fluidtune.cluster.sharing.lanes import Lack
    from fluidtune.elastic import FollowerSession

#: How the names of followers' directories begin, and the file by which a follower holds its own. Older versions, whose
#: followers hold none, have other names.
PREFIX, LOCK = "fluidtune-following-", ".fluidtune.lock"
#: How long the end of a follower's loop is waited for, seconds.
END_S = 5.0


@dataclass(frozen=True)
class NotTakenIn:
    """How a follower's part ended: the leader has refused it, and says so with its next result."""


@dataclass(frozen=True)
class Ungrowable:
    """How a follower's part ended: what the trial's loop does cannot be divided among workers, for this reason."""

    reason: str


class FollowerHost:
    """Hosts one follower, from its joining to its end. ``gpu``: the process' look at its GPU; None: on cores."""

    def __init__(self, session: FollowerSession, gpu: GpuProbe | None) -> None:
        self.session = session
        self._gpu = gpu
        #: The trial's trainable, once it is constructed.
        self.trainable: Trainable | None = None
        self._loop: LoopThread | None = None
        self._unseen = contextlib.ExitStack()

    def join(
        self,
        trainable_cls: type[Trainable],
        kwargs: dict[str, Any],
        streams: Streams | None,
        rehearse_on: str | None = None,
    ) -> str | Verdict | None:
        """Run the trial's code up to where it can enter the group. Returns why it cannot; None: it is ready.

        ``kwargs``: what Tune would pass to the trainable's constructor. ``streams``: see `GroupFacts`.
        ``rehearse_on``: a device, on which a step is rehearsed first. The verdict is returned instead of None, and with
        "differs" the follower does not get ready.
        """
        folder = self._unseen.enter_context(_own_directory())
        self._unseen.enter_context(_silence())
        self._unseen.enter_context(silent(folder))
        if kwargs.get("storage") is not None:
            kwargs = dict(kwargs, storage=_storage_in(folder, kwargs["storage"]))
        creator = kwargs.get("logger_creator")
        if isinstance(creator, functools.partial):  # older versions of Ray name the working directory there
            creator = functools.partial(creator.func, *creator.args, **{**creator.keywords, "logdir": folder})
            kwargs = dict(kwargs, logger_creator=creator)
        if streams is not None:
            restore_streams(streams)
        verdict = None
        if rehearse_on is not None and not issubclass(trainable_cls, FunctionTrainable):
            verdict = _rehearsed(partial(_class_rehearsal, trainable_cls, kwargs), rehearse_on)
        trainable = self.trainable = trainable_cls(**kwargs)
        ray_trainable.mute_session()
        if isinstance(trainable, FunctionTrainable):
            function = ray_trainable.training_function(trainable)
            if rehearse_on is not None:
                verdict = _rehearsed(lambda: function(dict(trainable.config)), rehearse_on)
            loop = LoopThread(self.session, function, trainable.config)
        else:
            loop = LoopThread(self.session, _step_for_ever, trainable)
        if verdict is not None and verdict.kind == "differs":
            return verdict
        self._loop = loop.start()
        while loop.outcome is None:
            if self.session.wait_ready(timeout=0.2):
                return verdict
        error = loop.outcome.error
        return "a new worker's loop ended early" + ("" if error is None else f": {error!r}")

    def enter(self, reform: Reform) -> str | Lack | Ungrowable | NotTakenIn | None:
        """Enter the group, and follow until dismissed. Returns the error of the trial's code; None: no error.

        A `Lack` says that the GPU has failed, and not the trial's code.
        """
        assert self._loop is not None
        self.session.enter(reform)
        outcome = self._loop.join()
        assert outcome is not None
        if isinstance(outcome.error, Refused):
            return NotTakenIn()
        if isinstance(outcome.error, CannotDivide):
            return Ungrowable(str(outcome.error))
        if outcome.kind == "failed" and self._gpu is not None and outcome.error is not None:
            broken = self._gpu.broken(outcome.error)
            if broken is not None:
                return broken
        return repr(outcome.error) if outcome.kind == "failed" else None

    def leave(self) -> str | None:
        """End the loop. Returns None if it has ended, else a line that says that it has not."""
        if self._loop is None:
            return None
        self.session.leave()
        return "the follower's loop did not end" if self._loop.join(timeout=END_S) is None else None

    def close(self) -> None:
        """The trial's code has ended here: remove its directory, and let the process print again."""
        self._unseen.close()


def _rehearsed(run: Callable[[], Any], device: str) -> Verdict:
    from fluidtune.elastic.checks.rehearsal import rehearse  # here, because an emulated follower needs no torch

    return rehearse(run, device=device)


def _class_rehearsal(trainable_cls: type[Trainable], kwargs: dict[str, Any]) -> None:
    trainable = trainable_cls(**dict(kwargs, config=dict(kwargs["config"])))
    try:
        _step_for_ever(trainable)
    finally:
        with contextlib.suppress(Exception):
            trainable.stop()


def _step_for_ever(trainable: Trainable) -> None:
    """A class trainable's loop in a follower with an `ElasticSession`; it ends with `Left`."""
    session = current()
    assert session is not None
    while True:
        session.boundary()
        ray_trainable.set_iteration(trainable, session.iteration)
        trainable.step()


@contextlib.contextmanager
def _own_directory() -> Iterator[str]:
    """A new directory, removed at the end. Removes those of followers that were killed."""
    held_folders.sweep(PREFIX, LOCK)
    before = os.getcwd()
    folder = tempfile.mkdtemp(prefix=PREFIX)
    try:
        with held_folders.hold(folder, LOCK):
            yield folder
    finally:
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)


def _storage_in(folder: str, storage: Any) -> Any:
    """``storage`` as Tune gives it to a trial, with ``folder`` as the working directory, which is not kept.

    Tune changes into it (unless the user has set ``RAY_CHDIR_TO_TRIAL_DIR=0``), and writes log files there.
    """
    own = copy.copy(storage)
    others = {
        "trial_working_directory": property(lambda self: folder),
        "persist_artifacts": lambda self, *args, **kwargs: None,
    }
    own.__class__ = type("FollowerStorage", (type(storage),), others)
    return own


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """What this process prints, and what processes print that it starts, goes nowhere.

    The file of stderr stays open: what a crash of the interpreter says goes to Ray's log.
    """
    sys.stdout.flush()
    printed = os.dup(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        try:
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                yield
        finally:
            os.dup2(printed, 1)
            os.close(printed)
