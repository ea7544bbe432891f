"""What a collective library must do for an elastic trial, and the rendezvous that all of them share.

A backend forms one *generation* of a group at a time: it decides how members find each other and how bytes
move, not who is a member or when. The leader (rank 0) serves one TCP store for the life of the trial;
each generation meets under its own prefix of it, so that a resize starts no server. A joiner *announces*
itself and waits until the leader *calls* its generation: the leader never waits for a worker that is not
there yet. fluidtune/testing/collective_backends.py is the contract as tests: a new backend is a fixture and an
import.
"""

from __future__ import annotations

import pickle
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import GroupLost
from ..membership import Address
from .liveness import FollowerConnections, LeaderConnection

#: Seconds. Nobody but a dead peer ends a wait at a boundary: an iteration may take hours.
PATIENCE = 86_400.0

#: Seconds between a joiner's looks at the leader's store: what a resize may lose, and one small message.
_POLL = 0.01

#: A pickled object up to this many bytes travels in one broadcast, longer ones in two.
_INLINE = 4096 - 8


class CollectiveBackend(ABC):
    """One contract for torch.distributed and Horovod. Used by one thread at a time.

    ``host``: the IP address that peers reach this process at (127.0.0.1 when all are on this machine).
    ``device``: where the trial's tensors are ("cpu", "cuda", "cuda:0").
    ``form_timeout``: seconds that members that are all there may take to form a group.
    """

    def __init__(self, host: str = "127.0.0.1", device: str = "cpu", form_timeout: float = 30.0) -> None:
        self.host = host
        self.device = torch.device(device)
        self.form_timeout = form_timeout
        #: This process' place in the group; 0 of 1 when there is none.
        self.rank = 0
        self.world = 1
        self.generation: float = -1
        self._lost: str | None = None
        self._served: dist.TCPStore | None = None
        self._joined: tuple[Address, dist.TCPStore] | None = None
        self._followers: FollowerConnections | None = None  # the leader's
        self._to_leader: LeaderConnection | None = None  # a follower's

    # -- rendezvous, the same for every library --

    def serve(self) -> Address:
        """Leader: start the store on a free port of ``host`` (once; later calls give the same address)."""
        if self._served is None:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            with socket.socket(family, socket.SOCK_STREAM) as listener:
                listener.bind((self.host, 0))
                listener.listen(1024)
                port = listener.getsockname()[1]
                self._served = dist.TCPStore(
                    self.host,
                    port,
                    is_master=True,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=self.form_timeout),
                    master_listen_fd=listener.detach(),
                )
            self._followers = FollowerConnections(self.host)
            self._served.set("liveness_port", str(self._followers.port))
        return self.host, self._served.port

    def announce_joiner(self, address: Address, generation: float, rank: int) -> None:
        """Joiner: say that it stands ready for this generation. Raises GroupLost if the leader is not
        there.
        """
        with self._guard("announcing a joiner"):
            self._show(address, generation, rank)
            self._store(address).set(f"{generation}/ready/{rank}", b"1")

    def joiners_announced(self, generation: float, ranks: list[int]) -> bool:
        """Leader: do all these ranks stand ready for this generation, and live? At once."""
        if not ranks:
            return True
        with self._guard("looking for joiners"):
            ready = self._store(self.serve()).check([f"{generation}/ready/{rank}" for rank in ranks])
        return ready and all(self.alive(generation, rank) for rank in ranks)

    def alive(self, generation: float, rank: int) -> bool | None:
        """Leader: does this follower's process live? None when it was not seen in this generation."""
        assert self._followers is not None, "only the leader knows"
        return self._followers.alive((generation, rank))

    def announce_survivor(self, address: Address, generation: float, rank: int) -> None:
        """Follower ``rank`` of a group that broke: say that it is there to go on as this generation."""
        with self._guard("staying with the leader"):
            self._store(address).set(f"{generation}/stays/{rank}", b"1")

    def survivor_announced(self, generation: float, rank: int) -> bool | None:
        """Leader of a group that broke: does this follower go on? None while it has not said so; False: it is dead."""
        if self.alive(self.generation, rank) is False:
            return False
        with self._guard("looking who stays"):
            return self._store(self.serve()).check([f"{generation}/stays/{rank}"]) or None

    def call_generation(self, generation: float, members: tuple[str, ...] = ()) -> None:
        """Leader: the generation forms now, of these workers (where they cannot know that otherwise)."""
        with self._guard("calling joiners"):
            self._store(self.serve()).set(f"{generation}/call", pickle.dumps(members))

    def keep_places(self, generation: float, ranks: list[int]) -> None:
        """Leader: these followers of a group that broke are 1, 2 .. of this generation: it is seen if they die before
        they come to it.
        """
        assert self._followers is not None, "only the leader knows"
        self._followers.move({(self.generation, rank): (generation, new) for new, rank in enumerate(ranks, start=1)})

    def called_members(self, address: Address, generation: float) -> tuple[str, ...]:
        """Whom the leader has called."""
        with self._guard("asking who was called"):
            return pickle.loads(self._store(address).get(f"{generation}/call"))

    def wait_for_call(self, address: Address, generation: float, patience: float) -> bool:
        """Joiner: has the leader called? Waits up to ``patience`` seconds. Raises GroupLost if it is gone."""
        store, key = self._store(address), f"{generation}/call"
        deadline = time.monotonic() + patience
        with self._guard("waiting for the leader"):
            while not store.check([key]):  # its wait() would print a warning for every time-out
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_POLL)
        return True

    def form(self, address: Address, generation: float, rank: int, world: int) -> None:
        """Become ``rank`` of ``world`` in this generation. All members call it; returns when all are
        connected.

        A world of 1 needs no peer, and its collectives cost nothing. Raises GroupLost after
        ``form_timeout`` s. Generations are whole numbers but for a group that was mended (`ElasticSession.mend`).
        """
        if self.world != 1:
            raise ValueError(f"generation {self.generation} must be dissolved before {generation} is formed")
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not within a world of {world}")
        self._lost = None
        self.generation = generation
        if world > 1:
            store = dist.PrefixStore(str(generation), self._store(address))
            with self._guard(f"forming generation {generation}"):
                # First see that all are there: a library's own patience is not always ours to set
                if rank > 0:
                    self._show(address, generation, rank)
                self._meet(store, rank, world)
                self._form(dist.PrefixStore("group", store), rank, world)
                if self._followers is not None:
                    self._followers.forget(generation)
        self.rank, self.world = rank, world

    def dissolve(self, *, orderly: bool = False) -> None:
        """Leave the group, whatever its state. Never raises GroupLost; peers that need it get GroupLost.

        ``orderly``: all members dissolve it now, and wait for each other. Without that, one that is quick
        could cut the connection before a slow one has noticed that the last collective is done.
        """
        if self.world == 1:
            self._lost = None
            return
        if orderly:
            # Whoever gets out of this barrier proves that all got into it, so then nobody needs the group
            with suppress(GroupLost):
                self.barrier()
        self.rank, self.world = 0, 1
        try:
            self._dissolve()
        except RuntimeError:
            if self._lost is None:
                raise
        self._lost = None

    def close(self) -> None:
        """Dissolve, and let go of the store: a leader's address is dead from here on."""
        self.dissolve()
        if self._followers is not None:
            self._followers.close()
        if self._to_leader is not None:
            self._to_leader.close()
        self._served = self._joined = self._followers = self._to_leader = None

    # -- collectives: in place, blocking, GroupLost when a peer is gone --

    def allreduce_(self, tensor: torch.Tensor) -> None:
        """Sum a contiguous tensor over all ranks, in place."""
        if self.world > 1:
            with self._guard("allreduce"):
                self._allreduce_(tensor)

    def broadcast_(self, tensor: torch.Tensor) -> None:
        """Overwrite a contiguous tensor with rank 0's, of the same shape and dtype."""
        if self.world > 1:
            with self._guard("broadcast"):
                self._broadcast_(tensor)

    def broadcast_object(self, value: Any = None) -> Any:
        """Rank 0's ``value`` (anything that pickles), on every rank."""
        if self.world == 1:
            return value
        frame = torch.zeros(8 + _INLINE, dtype=torch.uint8)
        data = b""
        if self.rank == 0:
            data = pickle.dumps(value)
            head = len(data).to_bytes(8, "little") + data[:_INLINE]
            frame[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self.broadcast_(frame)
        size = int.from_bytes(bytes(frame[:8].tolist()), "little")
        if size > _INLINE:
            body = torch.empty(size, dtype=torch.uint8)
            if self.rank == 0:
                body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            self.broadcast_(body)
        else:
            body = frame[8 : 8 + size]
        return value if self.rank == 0 else pickle.loads(body.numpy().tobytes())

    def barrier(self) -> None:
        """Return when all ranks are here."""
        self.allreduce_(torch.zeros(1))

    # -- what a library must bring --

    @abstractmethod
    def _form(self, store: dist.Store, rank: int, world: int) -> None:
        """Connect to the others through ``store``, within ``form_timeout``; afterwards wait up to
        PATIENCE.
        """

    @abstractmethod
    def _dissolve(self) -> None:
        """Undo `_form`, also after a peer died, without waiting for anyone."""

    @abstractmethod
    def _allreduce_(self, tensor: torch.Tensor) -> None: ...

    @abstractmethod
    def _broadcast_(self, tensor: torch.Tensor) -> None: ...

    # -- inside --

    def _show(self, address: Address, generation: float, rank: int) -> None:
        """Follower: let the leader see that this process, which has this place, lives."""
        store = self._store(address)
        if self._to_leader is None:
            self._to_leader = LeaderConnection((address[0], int(store.get("liveness_port"))), self.form_timeout)
        self._to_leader.say_place((generation, rank))

    def _meet(self, store: dist.Store, rank: int, world: int) -> None:
        """Return when all members are here. RuntimeError when one is not in time, or died on the way."""
        store.set(f"here/{rank}", b"1")
        everyone = [f"here/{r}" for r in range(world)]
        deadline = time.monotonic() + self.form_timeout
        while not store.check(everyone):
            dead = self._dead(world) if rank == 0 else None
            if dead is not None:
                store.set("off", f"rank {dead} died while the group was formed")
            if store.check(["off"]):
                raise RuntimeError(store.get("off").decode())
            if time.monotonic() > deadline:
                raise RuntimeError(f"not all of {world} members came within {self.form_timeout:g} s")
            time.sleep(0.002)

    def _dead(self, world: int) -> int | None:
        """Leader: a member of the group that is being formed, and that has died."""
        return next((r for r in range(1, world) if self.alive(self.generation, r) is False), None)

    def _store(self, address: Address) -> dist.TCPStore:
        if self._served is not None and address == (self.host, self._served.port):
            return self._served
        if self._joined is None or self._joined[0] != address:
            with self._guard(f"connecting to the leader at {address[0]}:{address[1]}"):
                # The store's client would knock at a closed door for its whole timeout
                socket.create_connection(address, timeout=self.form_timeout).close()
                store = dist.TCPStore(
                    address[0],
                    address[1],
                    is_master=False,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=self.form_timeout),
                )
            self._joined = (address, store)
            if self._to_leader is not None:  # another leader's
                self._to_leader.close()
                self._to_leader = None
        return self._joined[1]

    @contextmanager
    def _guard(self, doing: str) -> Iterator[None]:
        """Any failure of the library is a lost group: after one, no collective can be trusted again."""
        if self._lost is not None:
            raise GroupLost(self._lost)
        try:
            yield
        except (RuntimeError, OSError) as error:  # torch's DistError is a RuntimeError
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            self._lost = f"{doing} failed in generation {self.generation}: {reason}"
            raise GroupLost(self._lost) from error
