"""The contract of a collective backend, as tests. A backend's test file is a fixture and an import:

from tests.contracts.collective_backends import CollectiveBackendContract

def make(host="127.0.0.1", form_timeout=30.0):      # of a module, so that it can be sent to the worker processes
    return MyBackend(host, form_timeout=form_timeout)

class TestMyBackend(CollectiveBackendContract):
    make = staticmethod(make)
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from fluidtune.elastic import GroupLost
from fluidtune.elastic.transport import CollectiveBackend
from fluidtune.elastic.transport.signing import Signer

from .processes import PeerProcess, peer_processes

HERE: dict[str, Any] = {}
#: The secret of the trial whose workers the processes are, if it is not said otherwise.
SECRET = b"of the trial in the contract suite"


def build(make: Callable[..., CollectiveBackend], *args: Any) -> None:
    HERE["backend"] = make(*args)
    use_secret(SECRET)


def use_secret(secret: bytes) -> None:
    HERE["backend"].signer = Signer(secret)


def listens_on() -> set[str]:
    """The addresses on which this process listens. A fork server's sockets are not on the network."""
    found = psutil.Process().net_connections("inet")
    return {connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN}


def refused() -> int:
    return HERE["backend"].signer.refused


class CreatesFile:
    """Creates a file when it is unpickled: what a stranger may send to run code in a worker."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return open, (self._path, "w")


def send_file_maker(size: int, path: str) -> None:
    HERE["backend"].broadcast_object(["x" * size, CreatesFile(path)])


def write_into_store(address: Any, key: str, path: str) -> None:
    """What a stranger can do who reaches the store: write a pickle that creates a file, unsigned and badly signed."""
    store = dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
    data = pickle.dumps(CreatesFile(path))
    for value in (data, Signer(b"another secret").sign(key, data)):
        store.set(key, value)


def ask(name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(HERE["backend"], name)(*args, **kwargs)


def place() -> tuple[int, int]:
    return HERE["backend"].rank, HERE["backend"].world


def summed(value: float, size: int) -> list[float]:
    tensor = torch.full((size,), value)
    HERE["backend"].allreduce_(tensor)
    return tensor.unique().tolist()


def spread(value: Any) -> Any:
    tensor = torch.tensor(value)
    HERE["backend"].broadcast_(tensor)
    return tensor.tolist()


def share(tensors: list[torch.Tensor], backend: CollectiveBackend) -> None:
    """An object, and then tensors."""
    backend.broadcast_object(len(tensors))
    for tensor in tensors:
        backend.broadcast_(tensor)


def die_in_tree() -> None:
    """Take part in a broadcast of tensors, and die after its first piece."""
    backend = HERE["backend"]
    real, seen = backend._broadcast_, []

    def dying(tensor: torch.Tensor) -> None:
        real(tensor)
        seen.append(tensor)
        if len(seen) == 2:  # the object, then the first piece
            os.kill(os.getpid(), signal.SIGKILL)

    backend._broadcast_ = dying
    share([torch.zeros(2**22) for _ in range(6)], backend)


def die_while_forming(*place: Any) -> None:
    """Die when all members have come and this one has not connected."""
    backend = HERE["backend"]
    backend._form = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    backend.form(*place)


def lost_after(name: str, *args: Any) -> tuple[float, str]:
    """Seconds until the call raised GroupLost, and what it said."""
    started = time.monotonic()
    try:
        if name == "tree":
            share([torch.zeros(2**22) for _ in range(6)], HERE["backend"])
        else:
            ask(name, *args)
    except GroupLost as error:
        return time.monotonic() - started, str(error)
    raise AssertionError(f"{name} did not raise GroupLost")


def quick_resizes(count: int, address: Any, rank: int) -> float:
    """Form, use and dissolve a group of two ``count`` times; the seconds for one round."""
    started = time.monotonic()
    for generation in range(100, 100 + count):
        ask("form", address, generation, rank, 2)
        assert summed(1.0, 10) == [2.0]
        ask("dissolve", orderly=True)
    return (time.monotonic() - started) / count


def together(pool: list[PeerProcess], call: Callable[[int], tuple[Any, ...]], timeout: float = 60.0) -> list[Any]:
    """Each process calls at the same time what ``call`` returns for its rank: a function and its arguments."""
    for rank, worker in enumerate(pool):
        worker.send(*call(rank))
    return [worker.result(timeout) for worker in pool]


def everyone(pool: list[PeerProcess], fn: Callable[..., Any], *args: Any) -> list[Any]:
    return together(pool, lambda rank: (fn, *args))


def form(pool: list[PeerProcess], generation: int) -> None:
    address = pool[0].call(ask, "serve")
    together(pool, lambda rank: (ask, "form", address, generation, rank, len(pool)))


class CollectiveBackendContract:
    """Inherit it, and set ``make``: make(host, form_timeout) returns a new backend."""

    make: Callable[..., CollectiveBackend]

    @pytest.fixture
    def pool(self) -> Iterator[list[PeerProcess]]:
        with peer_processes(3) as started:
            everyone(started, build, type(self).make)
            yield started

    def test_a_world_of_one_waits_for_no_other(self):
        backend = type(self).make()
        backend.form(("127.0.0.1", 1), 0, 0, 1)
        tensor = torch.ones(3)
        backend.allreduce_(tensor)
        backend.broadcast_(tensor)
        backend.barrier()
        assert tensor.tolist() == [1, 1, 1]
        assert backend.broadcast_object("me") == "me"
        assert (backend.rank, backend.world) == (0, 1)
        backend.dissolve()

    def test_collectives(self, pool):
        form(pool, 1)
        assert everyone(pool, place) == [(0, 3), (1, 3), (2, 3)]
        for size in (1, 1000, 3_000_000):
            assert together(pool, lambda rank: (summed, 10.0**rank, size)) == [[111.0]] * 3  # noqa: B023
        assert together(pool, lambda rank: (spread, [[rank, rank + 5]])) == [[[0, 5]]] * 3
        everyone(pool, ask, "barrier")

    @pytest.mark.parametrize("size", [0, 4000, 4088, 100_000])
    def test_objects_of_every_size(self, pool, size):
        form(pool, 1)
        value = {"text": "x" * size, "where": (1, None)}
        assert together(pool, lambda rank: (ask, "broadcast_object", None if rank else value)) == [value] * 3

    def test_generations_of_different_sizes_follow_each_other(self, pool):
        for generation, width in enumerate([2, 3, 1, 2, 3, 2], start=1):
            form(pool[:width], generation)
            assert everyone(pool[:width], summed, 1.0, 4) == [[float(width)]] * width
            everyone_dissolves(pool[:width])
        assert everyone(pool, place) == [(0, 1)] * 3

    def test_dissolving_in_order_never_breaks_a_slower_peer(self, pool):
        address = pool[0].call(ask, "serve")
        seconds = together(pool[:2], lambda rank: (quick_resizes, 25, address, rank))
        print(f"form, one allreduce, dissolve: {max(seconds) * 1000:.0f} ms")

    def test_dissolving_in_order_waits_for_a_slower_peer(self, pool):
        form(pool, 1)
        quick, slow, other = together(pool, lambda rank: (timed_dissolve, 0.5 if rank == 1 else 0.0))
        assert quick > 0.4 and other > 0.4
        assert slow < 0.4

    def test_a_joiner_waits_until_it_is_called(self, pool):
        leader, joiner, _ = pool
        address = leader.call(ask, "serve")
        assert leader.call(ask, "serve") == address
        assert not leader.call(ask, "joiners_announced", 4, [1])
        joiner.call(ask, "announce_joiner", address, 4, 1)
        assert leader.call(ask, "joiners_announced", 4, [1])
        assert leader.call(ask, "joiners_announced", 4, [])
        assert not leader.call(ask, "joiners_announced", 4, [1, 2])
        assert not leader.call(ask, "joiners_announced", 5, [1])
        assert joiner.call(ask, "wait_for_call", address, 4, 0.05) is None
        joiner.send(ask, "wait_for_call", address, 4, 20.0)
        time.sleep(0.1)
        leader.call(ask, "call_generation", 4)
        assert joiner.result() == ()

    def test_a_killed_peer_raises_in_all_collectives(self, pool):
        form(pool, 1)
        for worker in pool[:2]:
            worker.send(lost_after, "allreduce_", torch.ones(4))
        time.sleep(0.3)
        pool[2].kill()
        for worker in pool[:2]:
            seconds, _ = worker.result(10)
            assert seconds < 5
            for name, *args in [("barrier",), ("broadcast_", torch.ones(4)), ("allreduce_", torch.ones(4))]:
                assert worker.call(lost_after, name, *args)[0] < 1
        assert everyone_dissolves(pool[:2], orderly=False) == [None, None]
        form(pool[:2], 2)
        assert everyone(pool[:2], summed, 1.0, 4) == [[2.0], [2.0]]

    @pytest.mark.parametrize("dying", [0, 1])
    def test_a_peer_killed_while_state_is_sent(self, pool, dying):
        form(pool[:2], 1)
        pool[dying].send(die_in_tree)
        seconds, _ = pool[1 - dying].call(lost_after, "tree", timeout=15)
        assert seconds < 10

    def test_a_leader_killed_while_a_joiner_waits(self, pool):
        address = pool[0].call(ask, "serve")
        pool[1].call(ask, "announce_joiner", address, 1, 1)
        pool[1].send(lost_after, "wait_for_call", address, 1, 60.0)
        time.sleep(0.2)
        pool[0].kill()
        assert pool[1].result(10)[0] < 5
        assert pool[2].call(lost_after, "announce_joiner", address, 1, 2, timeout=60)

    def test_a_member_that_never_comes(self, pool):
        pool[0].call(build, type(self).make, "127.0.0.1", 1.5)
        address = pool[0].call(ask, "serve")
        seconds, message = pool[0].call(lost_after, "form", address, 1, 0, 2)
        assert 1 < seconds < 10
        assert "generation 1" in message
        pool[0].call(build, type(self).make)
        form(pool[:2], 2)
        assert everyone(pool[:2], summed, 1.0, 4) == [[2.0], [2.0]]

    def test_a_member_killed_while_the_group_forms(self, pool):
        everyone(pool, build, type(self).make, "127.0.0.1", 1.5)
        address = pool[0].call(ask, "serve")
        pool[2].send(die_while_forming, address, 1, 2, 3)
        for seconds, _ in together(pool[:2], lambda rank: (lost_after, "form", address, 1, rank, 3), timeout=20):
            assert seconds < 10
        form(pool[:2], 2)
        assert everyone(pool[:2], summed, 1.0, 4) == [[2.0], [2.0]]

    def test_an_address_other_than_loopback(self, pool):
        host = outer_address()
        if host is None:
            pytest.skip("this machine has no other address")
        everyone(pool[:2], build, type(self).make, host)
        form(pool[:2], 1)
        assert pool[0].call(ask, "serve")[0] == host
        assert everyone(pool[:2], summed, 1.0, 4) == [[2.0], [2.0]]

    def test_a_group_listens_on_the_address_that_it_was_given_and_on_no_other(self, pool):
        assert everyone(pool[:2], listens_on) == [set(), set()]
        form(pool[:2], 1)
        leader, follower = everyone(pool[:2], listens_on)
        assert leader == {"127.0.0.1"}
        assert follower <= {"127.0.0.1"}  # a library may listen only while the group forms
        everyone_dissolves(pool[:2])
        assert everyone(pool[:2], listens_on) == [{"127.0.0.1"}, set()]

    def test_what_a_stranger_writes_into_the_store_is_not_unpickled(self, pool, tmp_path):
        leader, follower, stranger = pool
        path = tmp_path / "created"
        address = leader.call(ask, "serve")
        stranger.call(write_into_store, address, "4/call", str(path))
        assert follower.call(ask, "wait_for_call", address, 4, 0.05) is None
        assert follower.call(refused) > 0
        follower.call(build, type(self).make)
        follower.call(ask, "announce_joiner", address, 4, 1)
        stranger.call(write_into_store, address, "4/ready/2", str(path))
        assert not leader.call(ask, "joiners_announced", 4, [1, 2])
        assert leader.call(refused) == 1
        assert leader.call(ask, "joiners_announced", 4, [1])
        leader.call(ask, "call_generation", 4, ("one", "other"))
        assert follower.call(ask, "wait_for_call", address, 4, 20.0) == ("one", "other")
        form(pool[:2], 4)
        assert everyone(pool[:2], summed, 1.0, 4) == [[2.0], [2.0]]
        assert not path.exists()

    @pytest.mark.parametrize("size", [0, 100_000])
    def test_an_object_that_is_not_signed_is_not_unpickled(self, pool, tmp_path: Path, size):
        form(pool[:2], 1)
        path = tmp_path / "created"
        pool[0].call(use_secret, b"another secret")
        pool[0].send(send_file_maker, size, str(path))
        _, why = pool[1].call(lost_after, "broadcast_object")
        assert "signature" in why and pool[1].call(refused) == 1
        assert not path.exists()

    def test_a_worker_of_another_trial_cannot_join(self, pool):
        leader, _, stranger = pool
        address = leader.call(ask, "serve")
        stranger.call(use_secret, b"another secret")
        assert "signature" in stranger.call(lost_after, "announce_joiner", address, 4, 1)[1]
        assert not leader.call(ask, "joiners_announced", 4, [1])
        assert leader.call(ask, "alive", 4, 1) is None

    def test_wrong_places_are_refused(self):
        backend = type(self).make()
        with pytest.raises(ValueError, match="rank 2"):
            backend.form(("127.0.0.1", 1), 0, 2, 2)


def everyone_dissolves(pool: list[PeerProcess], orderly: bool = True) -> list[Any]:
    return everyone(pool, dissolve, orderly)


def dissolve(orderly: bool) -> None:
    HERE["backend"].dissolve(orderly=orderly)


def timed_dissolve(late: float) -> float:
    """The seconds that an orderly dissolve took; it begins after ``late`` seconds."""
    time.sleep(late)
    started = time.monotonic()
    dissolve(True)
    return time.monotonic() - started


def outer_address() -> str | None:
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return address.address
    return None
