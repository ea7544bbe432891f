"""torch.distributed keeps the contract of a collective backend."""

from __future__ import annotations

import multiprocessing
import signal

import psutil
import pytest
import torch

from fluidtune.elastic.backends import TorchBackend
from fluidtune.elastic.backends.torch_backend import interface_of
from fluidtune.testing.collective_backends import CollectiveBackendContract, everyone, form, lost_after, summed

pytestmark = pytest.mark.slow


def make(host: str = "127.0.0.1", form_timeout: float = 30.0) -> TorchBackend:
    return TorchBackend(host, form_timeout=form_timeout)


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

    def test_a_forked_process_leaves_its_parents_group_alone(self, pool) -> None:
        form(pool, 1)
        assert [sockets for _, sockets in everyone(pool, fork_one)] == [0, 0, 0]
        assert everyone(pool, summed, 1.0, 4) == [[3.0]] * 3


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


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(ValueError, match=r"203\.0\.113\.9"):
        interface_of("203.0.113.9")
