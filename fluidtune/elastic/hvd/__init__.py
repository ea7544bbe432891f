"""Horovod's names for scripts that use it: write ``from fluidtune.elastic import hvd`` for ``import horovod.torch``.

In a FluidTune worker the trial grows and shrinks while the script runs, and Horovod's promises hold (`elastic`).
Elsewhere, for example under ``horovodrun``, each name is Horovod's own. The import raises FluidTuneError if Horovod is
not installed.
"""

from __future__ import annotations

import os
from typing import Any

from fluidtune.errors import FluidTuneError

from ..group.current_session import current
from ..group.session import ElasticSession
from ..transport import HorovodBackend
from ..transport.horovod_there import require_horovod

require_horovod()

import horovod.torch as _horovod  # noqa: E402  (its own error has many lines)

from . import elastic  # noqa: E402


def __getattr__(name: str) -> Any:
    return getattr(_horovod, name)


def _backend(session: ElasticSession) -> HorovodBackend:
    if not isinstance(session.backend, HorovodBackend):
        raise FluidTuneError(
            'this trial trains with Horovod: give FluidExecutor(backend="horovod"), or fluidtune run --backend horovod'
        )
    return session.backend


def init(*args: Any, **kwargs: Any) -> None:
    """``hvd.init``. In a FluidTune worker the world is this worker alone until `elastic.run`."""
    session = current()
    if session is None:
        _horovod.init(*args, **kwargs)
    else:
        _backend(session).alone()


def shutdown() -> None:
    """``hvd.shutdown``. In a FluidTune worker it does nothing: the group is FluidTune's, and ends with the trial."""
    if current() is None:
        _horovod.shutdown()


def rank() -> int:
    """``hvd.rank()``: this worker's rank in the group; 1 in a worker that will join a group, as it is never rank 0."""
    return 1 if _joins_later() else _horovod.rank()


def size() -> int:
    """``hvd.size()``: workers in the group; 2 in a worker that will join a group, as it will not be alone."""
    return 2 if _joins_later() else _horovod.size()


def _joins_later() -> bool:
    session = current()
    return session is not None and not session.entered


def DistributedOptimizer(*args: Any, **kwargs: Any) -> Any:
    """``hvd.DistributedOptimizer``; it reduces gradients even if a single worker has built it."""
    if current() is None:
        return _horovod.DistributedOptimizer(*args, **kwargs)
    before = os.environ.get("HOROVOD_ELASTIC")
    os.environ["HOROVOD_ELASTIC"] = "1"
    try:
        return _horovod.DistributedOptimizer(*args, **kwargs)
    finally:
        if before is None:
            del os.environ["HOROVOD_ELASTIC"]
        else:
            os.environ["HOROVOD_ELASTIC"] = before


__all__ = ["DistributedOptimizer", "elastic", "init", "rank", "shutdown", "size"]
