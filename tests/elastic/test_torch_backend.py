"""torch.distributed keeps the contract of a collective backend."""

from __future__ import annotations

import multiprocessing
import signal
import time
import weakref
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from fluidtune.elastic.transport import TorchBackend
from fluidtune.elastic.transport.torch_backend import interface_of
from tests.contracts.collective_backends import (
    HERE,
    CollectiveBackendContract,
    everyone,
    form,
    lost_after,
    summed,
)
from tests.contracts.processes import until

pytestmark = [pytest.mark.slow, pytest.mark.core]


def make(host: str = "127.0.0.1", form_timeout: float = 30.0) -> TorchBackend:
    return TorchBackend(host, form_timeout=form_timeout)


def test_what_a_stranger_says_of_a_workers_gpu_is_not_acted_upon():
    store = dist.HashStore()
    store.set("gpu/1", "the GPU of worker 0")
    with pytest.raises(RuntimeError, match="the GPU of worker 1 does not have this trial's signature"):
        make()._refuse_shared_gpus(store, "the GPU of worker 0", rank=0, world=2)


class TestTorchBackend(CollectiveBackendContract):
    make = staticmethod(make)

    @pytest.mark.parametrize("dies", [2, 0], ids=["follower", "leader"])
    def test_a_killed_peer_is_noticed_although_its_data_loaders_live(self, pool, dies: int) -> None:
        form(pool, 1)
        child, _ = pool[dies].call(fork_one)
        others = [worker for worker in pool if worker is not pool[dies]]
        for worker in others:
            worker.send(lost_after, "allreduce_", torch.ones(4))
        pool[dies].kill()
        for worker in others:
            worker.result()
        assert psutil.pid_exists(child), "they were waited for"

    @pytest.mark.parametrize("dies", [2, 0], ids=["follower", "leader"])
    def test_a_death_that_gloo_misses_is_noticed(self, pool, dies: int) -> None:
        """Gloo's collective never ends, as was seen once in ten deaths at the begin of one, on a busy machine."""
        form(pool, 1)
        others = [worker for worker in pool if worker is not pool[dies]]
        for worker in others:
            worker.send(lost_in_silence)
        pool[dies].kill()
        for worker in others:
            worker.result()

    def test_gloos_threads_are_not_the_last_to_drop_what_python_has_made(self, pool) -> None:
        # docs/bugs.md, 330
        form(pool, 1)
        assert everyone(pool, living_tensors) == [[True, True, True, False]] * 3
        pool[0].call(dissolve)
        assert pool[0].call(kept_tensors) == 0

    def test_the_process_has_no_group_of_torchs_own_and_may_make_one(self, pool) -> None:
        # docs/bugs.md, 411
        form(pool, 1)
        assert everyone(pool, group_of_ones_own) == [(False, 1.0)] * 3
        assert everyone(pool, summed, 1.0, 4) == [[3.0]] * 3

    def test_a_forked_process_leaves_its_parents_group_alone(self, pool) -> None:
        form(pool, 1)
        assert [sockets for _, sockets in everyone(pool, fork_one)] == [0, 0, 0]
        assert everyone(pool, summed, 1.0, 4) == [[3.0]] * 3


def group_of_ones_own() -> tuple[bool, float]:
    """Whether torch says that it is distributed; and a sum over a group of this process alone."""
    there = dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    one = torch.ones(1)
    dist.all_reduce(one)
    dist.destroy_process_group()
    return there, one.item()


def living_tensors() -> list[bool]:
    """Of the tensors of four small collectives, the last one first, whether they are there after their end.

    A large one in between is not kept.
    """
    backend = HERE["backend"]
    seen = []
    for number in range(4):
        tensor = torch.ones(8)
        backend.broadcast_(tensor)
        seen.append(weakref.ref(tensor))
        del tensor
        if number == 2:
            large = torch.ones(2**19)
            backend.broadcast_(large)
            gone = weakref.ref(large)
            del large
    until(lambda: gone() is None)
    return [each() is not None for each in reversed(seen)]


def dissolve() -> None:
    HERE["backend"].dissolve()


def kept_tensors() -> int:
    return len(HERE["backend"]._kept)


def fork_one() -> tuple[int, int]:
    """Start a process as a data loader does, which lives until it is killed: its pid, and how many sockets it has."""

    def stay() -> None:
        told.send(len(psutil.Process().net_connections("inet")))
        signal.pause()

    heard, told = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=stay)
    child.start()
    assert child.pid is not None
    return child.pid, heard.recv()


class NeverEnds:
    """A collective of torch.distributed whose end gloo has missed."""

    def wait(self, timeout: timedelta) -> None:
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False


def lost_in_silence() -> None:
    """A collective that never ends is a lost group all the same; afterwards the process can form another group."""
    gloo = HERE["backend"]._gloo
    HERE["backend"]._gloo = SimpleNamespace(allreduce=lambda tensors: NeverEnds(), real=gloo)
    lost_after("allreduce_", torch.ones(4))
    HERE["backend"].dissolve()
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(ValueError, match=r"203\.0\.113\.9"):
        interface_of("203.0.113.9")
