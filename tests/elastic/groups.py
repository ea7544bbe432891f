"""Runs one function on every rank of a group, without a trial around it: for tests of what happens in an iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fluidtune import elastic
from fluidtune.elastic import ElasticSession
from fluidtune.elastic.transport import TorchBackend
from tests.contracts.collective_backends import SECRET
from tests.contracts.processes import PeerProcess

_backend: list[TorchBackend] = []


def lone_session(**more: Any) -> ElasticSession:
    """The session of a leader that is alone."""
    return ElasticSession(**{"trial": "t", "worker": "w", "leader": True, "backend": TorchBackend(), **more})


@contextmanager
def in_session(**more: Any) -> Iterator[ElasticSession]:
    """`lone_session`, in use by this process."""
    session = lone_session(**more)
    elastic.use(session)
    try:
        yield session
    finally:
        session.close()
        elastic.use(None)


def open_backend() -> None:
    for old in _backend:
        old.close()
    _backend[:] = [TorchBackend(secret=SECRET)]


def serve() -> Any:
    return _backend[0].serve()


def run_rank(address: Any, rank: int, world: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with in_session(worker=f"w{rank}", leader=rank == 0, backend=_backend[0]) as session:
        _backend[0].form(address, 1, rank, world)
        session._member.state.set_width(world)
        torch.manual_seed(100)
        value = fn(*args)
        _backend[0].dissolve(orderly=True)
        return value


def on_all(pool: list[PeerProcess], fn: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``fn(*args)`` gives on each rank of a group of the whole pool; random streams start alike."""
    for worker in pool:
        worker.call(open_backend)
    address = pool[0].call(serve)
    for rank, worker in enumerate(pool):
        worker.send(run_rank, address, rank, len(pool), fn, args)
    return [worker.result() for worker in pool]


def alone(fn: Callable[..., Any], *args: Any) -> Any:
    """What it gives outside any session."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(100)
    try:
        return fn(*args)
    finally:
        torch.set_num_threads(threads)
