"""``hvd.elastic`` in a FluidTune worker: Horovod's own states and sampler, and a `run` whose driver is FluidTune.

Each ``state.commit()`` and ``state.check_host_updates()`` is a boundary, at which a worker may come or go. Then the
same happens as under Horovod's driver, except that no process is started or ended: the group is formed anew,
``HostsUpdatedInterrupt`` unwinds the function, reset callbacks run, the state is synchronised from rank 0, and the
function is called again. When a worker dies, the others go back to their last commit and do the same without it. When
rank 0 dies, the trial starts again in another worker, from the last commit that any worker still has.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from horovod.common.elastic import ObjectState, State
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.torch import elastic as _elastic
from horovod.torch.elastic import ElasticSampler, TorchState

from ..commits.committable import CommittableState
from ..errors import GroupLost
from ..group.current_session import current
from ..group.session import ElasticSession
from ..transport import CollectiveBackend

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """``hvd.elastic.run``: decorates the function that trains; its first argument is the state.

    After a restart of the trial, the state is that of the last commit before the function is called. If a script has
    several such functions, one that was done before that commit is not called, and None is returned.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        session = current()
        if session is None:
            return _elastic.run(func)(state, *args, **kwargs)
        return _ElasticRun(session, state).call(func, *args, **kwargs)

    return wrapper


class SavedState(CommittableState):
    """What a Horovod state has saved.

    A Horovod state saves copies, except for the plain values of an `ObjectState`. A state that is not built on one of
    Horovod's own saves in its own way, and cannot be committed to a disk.
    """

    own_streams = True

    def __init__(self, state: State) -> None:
        self._state = state
        self.loaded = False

    def capture(self) -> dict[str, Any]:
        handlers = getattr(self._state, "_handlers", {})
        return {
            "values": copy.deepcopy(getattr(self._state, "_saved_state", {})),
            "handlers": {name: _without_value(handler) for name, handler in handlers.items()},
        }

    def load(self, state: dict[str, Any], *, with_streams: bool) -> None:
        handlers = getattr(self._state, "_handlers", {})
        have, want = {*handlers, *getattr(self._state, "_saved_state", {})}, {*state["handlers"], *state["values"]}
        if have != want:
            raise ValueError(f"this commit is of a state with {sorted(want)}, the script's has {sorted(have)}")
        for name, saved in state["handlers"].items():
            vars(handlers[name]).update(saved)
        if state["values"]:
            self._state._saved_state = state["values"]
        if want:
            self.restore()
        self.loaded = True

    def restore(self) -> None:
        """Call the state's own ``restore`` with copies: an optimizer trains on with the tensors that it is given."""
        handlers = getattr(self._state, "_handlers", {})
        saved = {name: _without_value(handler) for name, handler in handlers.items()}
        for name, values in copy.deepcopy(saved).items():
            vars(handlers[name]).update(values)
        self._state.restore()
        for name, values in saved.items():
            vars(handlers[name]).update(values)

    def broadcast(self, backend: CollectiveBackend) -> None:
        """Nothing to do: the state's own ``sync`` does it, when the function is called again."""


def _without_value(handler: Any) -> dict[str, Any]:
    """What a state handler has saved, without the live object itself."""
    return {name: value for name, value in vars(handler).items() if name != "value"}


class _ElasticRun:
    """One call of a decorated function under a session."""

    def __init__(self, session: ElasticSession, state: State) -> None:
        self._session = session
        self._state = state
        self._saved = SavedState(state)
        self._original_save = state.save

    def call(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        session, state = self._session, self._state
        session.use_own_state(self._saved)
        if not session.first_boundary():
            return None
        if session.leader:
            session.save()  # what `recover_in_place` goes back to before the first commit
        # Set on the object, so that what the user's own subclass overrides is kept.
        state.save, state.check_host_updates = self._save, self._check_host_updates
        if self._saved.loaded or not session.leader:
            state.on_reset()  # what was built here, or committed, was for a group of another size
        try:
            while True:
                try:
                    state.sync()
                    return func(state, *args, **kwargs)
                except (HorovodInternalError, GroupLost):
                    self._mend()
                except HostsUpdatedInterrupt:
                    pass
                state.on_reset()
        finally:
            del state.save, state.check_host_updates

    def _save(self) -> None:
        self._original_save()
        self._session.save()

    def _check_host_updates(self) -> None:
        before = self._session.generation
        self._session.boundary()
        if self._session.generation != before:
            raise HostsUpdatedInterrupt(False)

    def _mend(self) -> None:
        try:
            self._session.recover_in_place()
        except GroupLost:
            if not self._session.leader:
                self._session.commit_as_heir()
            raise
        # Only now: a sampler asks for the size of the group.
        self._saved.restore()
