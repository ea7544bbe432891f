"""Horovod keeps the contract of a collective backend."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
import urllib.request
from typing import Any

import pytest

from fluidtune.elastic.transport import HorovodBackend
from fluidtune.elastic.transport.rendezvous import Rendezvous
from fluidtune.elastic.transport.signing import SignedStore
from fluidtune.errors import FluidTuneError
from tests.contracts.collective_backends import (
    HERE,
    CollectiveBackendContract,
    ask,
    build,
    everyone,
    form,
    lost_after,
    summed,
)
from tests.contracts.processes import peer_processes

pytestmark = pytest.mark.horovod


def make(host: str = "127.0.0.1", form_timeout: float = 30.0) -> HorovodBackend:
    return HorovodBackend(host, form_timeout=form_timeout)


class TestHorovodBackend(CollectiveBackendContract):
    make = staticmethod(make)


def test_gpus_need_a_horovod_that_was_built_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import horovod.torch as hvd

    monkeypatch.setattr(hvd, "nccl_built", lambda: 0)
    with pytest.raises(FluidTuneError, match="nvcc"):
        HorovodBackend(device="cuda")
    monkeypatch.setattr(hvd, "nccl_built", lambda: 21000)
    assert HorovodBackend(device="cuda:0").device.type == "cuda"


def die_before_connecting(address: Any, rank: int, world: int) -> None:
    """The others have this member's address, at which it waits for nobody, and wait for it to connect to theirs."""
    backend = HERE["backend"]

    def forming(store: Any, rank: int, world: int) -> None:
        signed = SignedStore(store, backend.signer, "1/group/")
        if rank == 0:
            server = Rendezvous("127.0.0.1", {})
            signed.write("rendezvous", f"127.0.0.1 {server.port}".encode())
        store.wait(["rendezvous"])
        host, port = signed.read("rendezvous").decode().split()
        # gloo's address; of two members the one with the higher port connects
        there = struct.pack("=H", socket.AF_INET) + struct.pack(">H", 65535) + socket.inet_aton("127.0.0.1")
        mine = (there.ljust(128, b"\0") + struct.pack("=q", -1)) * (world - 1)
        for key, value in {f"rank_{rank}": b"here", str(rank): mine}.items():
            request = urllib.request.Request(f"http://{host}:{port}/global/{key}", data=value, method="PUT")
            urllib.request.urlopen(request, timeout=60)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    backend._form = forming
    backend.form(address, 1, rank, world)


@pytest.mark.parametrize("dying", [0, 2])
def test_a_member_killed_before_it_has_connected(dying):
    with peer_processes(3) as pool:
        everyone(pool, build, make)
        address = pool[0].call(ask, "serve")
        pool[dying].send(die_before_connecting, address, dying, 3)
        others = [rank for rank in range(3) if rank != dying]
        for rank in others:
            pool[rank].send(lost_after, "form", address, 1, rank, 3)
        for rank in others:
            seconds, _ = pool[rank].result()
            assert seconds < 60  # Horovod's own patience is 150 s
        again = [pool[rank] for rank in others]
        everyone(again, build, make)
        form(again, 2)
        assert everyone(again, summed, 1.0, 4) == [[2.0], [2.0]]
