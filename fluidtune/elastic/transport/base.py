"""What a collective library must do for an elastic trial, and the rendezvous that all libraries share.

A backend forms one *generation* of a group at a time. It decides how members find each other and how bytes move, and
not which workers are members or when. The leader (rank 0) serves one TCP store for the life of the trial; each
generation meets under its own prefix in this store, so that a resize starts no server. A joiner *announces* itself and
waits until the leader *calls* its generation, so that the leader never waits for a worker that is not there yet.
`tests.contracts.collective_backends` is the contract as tests.

A stranger on the network can write into the store, and may send bytes to a collective library's ports. So the members
sign what they write for each other, and every object that is broadcast, with the trial's secret. Nothing else is
unpickled or acted upon (`signing`). What the libraries themselves keep in the store is not signed.
"""

from __future__ import annotations

import json
import pickle
import socket
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fluidtune.error_lines import first_line

from ..errors import CannotDivide, GroupLost
from .forks import KeptOut, open_files, sockets
from .liveness import FollowerConnections, LeaderConnection
from .lockstep import Lockstep
from .membership import Address
from .signing import SIGNATURE_SIZE, SignedStore, Signer

#: Seconds after which a collective fails. An iteration may take hours; only the death of a worker should end a wait.
PATIENCE = 86_400.0
#: Seconds between a joiner's looks at the leader's store: a resize loses at most this.
_POLL = 0.01
#: Bytes before a pickled object in its broadcast: its length, and its signature.
_HEAD = 8 + SIGNATURE_SIZE
#: Bytes of a pickled object that travel in the same broadcast; a longer object takes two.
_INLINE = 4096 - _HEAD
#: The most numbers in an exchange; so short a message costs as much as an empty one.
NOTE = 31


class CollectiveBackend(ABC):
    """One contract for torch.distributed and Horovod. Used by one thread at a time.

    One thing: what the two libraries share, from the rendezvous to the collectives, is read as one contract.

    Args:
        host: the IP address at which the other workers reach this process (127.0.0.1 if all are on this machine).
        device: where the trial's tensors are ("cpu", "cuda", "cuda:0").
        form_timeout: seconds in which a group must form once its members have been called.
        secret: the trial's, the same in all of its workers; see `Signer`.
    """

    def __init__(
        self, host: str = "127.0.0.1", device: str = "cpu", form_timeout: float = 30.0, secret: bytes = b""
    ) -> None:
        self.host = host
        self.signer = Signer(secret)
        self.device = torch.device(device)
        self.form_timeout = form_timeout
        #: This process' rank in the group and the number of workers; 0 and 1 when there is no group.
        self.rank = 0
        self.world = 1
        self.generation: float = -1
        self._lost: str | None = None
        self._apart = False  # the group is lost because its workers were in different collectives
        self._lockstep: Lockstep | None = None  # while there is a group
        self._meeting: SignedStore | None = None  # the leader's store, while there is a group
        self._served: dist.TCPStore | None = None
        self._joined: tuple[Address, dist.TCPStore] | None = None
        self._followers: FollowerConnections | None = None  # the leader's
        self._to_leader: LeaderConnection | None = None  # a follower's
        self._kept_out = KeptOut()
        self._broadcasts = 0  # of objects, in this generation

    # -- rendezvous, the same for every library --

    def serve(self) -> Address:
        """Leader: start the store on a free port of ``host`` (once; later calls give the same address)."""
        if self._served is None:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            with socket.socket(family, socket.SOCK_STREAM) as listener:
                listener.bind((self.host, 0))
                listener.listen(1024)
                port = listener.getsockname()[1]
                how = self._how_to_wait()
                self._served = dist.TCPStore(self.host, port, is_master=True, master_listen_fd=listener.detach(), **how)
            self._followers = FollowerConnections(self.host, self.signer)
            self._kept_out.servers |= {(self.host, port), (self.host, self._followers.port)}
            SignedStore(self._served, self.signer).write("liveness", self._followers.invitation)
        return self.host, self._served.port

    def announce_joiner(self, address: Address, generation: float, rank: int) -> None:
        """Joiner: say that it is ready for this generation. GroupLost if the leader is gone."""
        with self._guard("announcing a joiner"):
            self._show(address, generation, rank)
            self._store(address).write(f"{generation}/ready/{rank}")

    def joiners_announced(self, generation: float, ranks: list[int]) -> bool:
        """Leader: whether all these ranks are ready for this generation, and live. Returns at once."""
        if not ranks:
            return True
        with self._guard("looking for joiners"):
            ready = self._store(self.serve()).all_written([f"{generation}/ready/{rank}" for rank in ranks])
        return ready and all(self.alive(generation, rank) for rank in ranks)

    def alive(self, generation: float, rank: int) -> bool | None:
        """Leader: whether this follower's process lives; None: it has not come to this generation."""
        assert self._followers is not None, "only the leader knows"
        return self._followers.alive((generation, rank))

    def announce_survivor(self, address: Address, generation: float, rank: int) -> None:
        """Follower ``rank`` of a group that broke: say that it is there to go on as this generation."""
        with self._guard("staying with the leader"):
            self._store(address).write(f"{generation}/stays/{rank}")

    def survivor_announced(self, generation: float, rank: int) -> bool | None:
        """Leader of a group that broke: True if this follower goes on, False if it is dead, None: not known yet."""
        if self.alive(self.generation, rank) is False:
            return False
        with self._guard("looking who stays"):
            return self._store(self.serve()).all_written([f"{generation}/stays/{rank}"]) or None

    def call_generation(self, generation: float, members: tuple[str, ...] = ()) -> None:
        """Leader: the generation forms now. ``members``: its workers, for followers that cannot know them otherwise."""
        with self._guard("calling joiners"):
            self._store(self.serve()).write(f"{generation}/call", json.dumps(members).encode())

    def keep_places(self, generation: float, ranks: list[int]) -> None:
        """Leader: these followers of a group that broke have the ranks 1, 2 .. in this generation.

        So the leader sees it if one of them dies before it has come to the new generation.
        """
        assert self._followers is not None, "only the leader knows"
        self._followers.move({(self.generation, rank): (generation, new) for new, rank in enumerate(ranks, start=1)})

    def wait_for_call(self, address: Address, generation: float, patience: float) -> tuple[str, ...] | None:
        """Follower: the workers that the leader calls, None if it does not within ``patience`` seconds.

        Raises:
            GroupLost: the leader is gone.
        """
        store, key = self._store(address), f"{generation}/call"
        deadline = time.monotonic() + patience
        with self._guard("waiting for the leader"):
            while (called := store.read(key)) is None:  # the store's wait() would print a warning for every time-out
                if time.monotonic() >= deadline:
                    return None
                time.sleep(_POLL)
            return tuple(json.loads(called))

    def form(self, address: Address, generation: float, rank: int, world: int) -> None:
        """Become ``rank`` of ``world`` in this generation. All members call it; it returns when all are connected.

        A world of 1 needs no other worker, and its collectives cost nothing. Generations are whole numbers, except
        after a recovery (`ElasticSession.recover_in_place`).

        Raises:
            GroupLost: a member died, or the group has not formed within ``form_timeout`` seconds.
            ValueError: the rank is not within the world, or the former generation is not dissolved.
        """
        if self.world != 1:
            raise ValueError(f"generation {self.generation} must be dissolved before {generation} is formed")
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not within a world of {world}")
        self._lost, self._apart = None, False
        self.generation = generation
        self._broadcasts = 0
        if world > 1:
            store = self._store(address)
            self._meeting = store
            self._lockstep = Lockstep(store, generation, rank, world)
            with self._guard(f"forming generation {generation}"):
                # First make sure that all are there: not every library lets us set how long it waits for that.
                if rank > 0:
                    self._show(address, generation, rank)
                self._meet(store, rank, world)
                before = open_files()
                self._form(dist.PrefixStore(f"{generation}/group", store.unsigned), rank, world)
                self._kept_out.inodes = set(sockets(open_files() - before).values())
                if self._followers is not None:
                    self._followers.forget(generation)
        self.rank, self.world = rank, world

    def dissolve(self, *, orderly: bool = False) -> None:
        """Leave the group, whatever its state. Never raises GroupLost; members that still need the group get GroupLost.

        ``orderly``: all members dissolve the group now, and wait for each other. Otherwise a quick member could close
        its connections before a slow one has noticed that the last collective is done.
        """
        if self.world == 1:
            self._lost = None
            return
        in_order = False
        if orderly:
            # All are in the barrier when the first leaves it: from then on the group is not needed.
            with suppress(GroupLost):
                self.barrier()
                in_order = True
        self.rank, self.world = 0, 1
        self._lockstep = self._meeting = None
        self._kept_out.inodes = set()
        try:
            self._dissolve(in_order)
        except RuntimeError:
            if self._lost is None:
                raise
        self._lost = None

    def close(self) -> None:
        """Dissolve the group and close the store; a leader cannot be found any more.

        The store has threads, so it must end here, and not as garbage in a process that is forked from this one later.
        """
        self.dissolve()
        if self._followers is not None:
            self._followers.close()
        if self._to_leader is not None:
            self._to_leader.close()
        self._served = self._joined = self._followers = self._to_leader = None
        self._kept_out.servers = set()

    @property
    def lost(self) -> str | None:
        """Why the group is lost, in a line. A dissolved group is not lost."""
        return self._lost

    # -- collectives: in place, blocking; GroupLost when another worker is gone --

    # A rank that calls one collective while another rank calls another one gets CannotDivide within seconds. ``what``
    # names the collective for that error; equal names mean that ranks are at the same place of the loop.

    def allreduce_(self, tensor: torch.Tensor, what: str = "the sum of gradients") -> None:
        """Sum a contiguous tensor over all ranks, in place."""
        if self.world > 1:
            with self._collective("allreduce", what):
                self._allreduce_(tensor)

    def gather(self, row: torch.Tensor, what: str) -> torch.Tensor:
        """All ranks' rows, of shape (world, len(row)); they have the same shape and dtype. Rows are not changed."""
        if self.world == 1:
            return row.unsqueeze(0)
        with self._collective("gathering", what):
            return self._gather(row)

    def exchange(self, row: torch.Tensor, what: str) -> torch.Tensor:
        """All ranks' short rows of float64 on the CPU, at most `NOTE` numbers, of shape (world, len(row)).

        CannotDivide on all ranks if another one exchanges something else.
        """
        if self.world == 1:
            return row.unsqueeze(0)
        note = torch.zeros(1 + NOTE, dtype=torch.float64)
        note[0] = zlib.crc32(what.encode())
        note[1 : 1 + len(row)] = row
        with self._collective("exchange", what):
            notes = self._exchange(note)
            other = next((rank for rank in range(self.world) if notes[rank, 0] != note[0]), None)
            if other is not None:
                why = f"worker {self.rank} stands at {what}, and worker {other} does not"
                self._break_up(self._lockstep.report(other, "another exchange") if self._lockstep else why)
        return notes[:, 1 : 1 + len(row)]

    def broadcast_(self, tensor: torch.Tensor, what: str = "the leader's state") -> None:
        """Overwrite a contiguous tensor with that of rank 0, which has the same shape and dtype."""
        if self.world > 1:
            with self._collective("broadcast", what):
                self._broadcast_(tensor)

    def broadcast_object(self, value: Any = None, what: str = "the leader's state") -> Any:
        """The ``value`` of rank 0 (anything that can be pickled), on every rank. GroupLost if it is not signed."""
        if self.world == 1:
            return value
        self._broadcasts += 1
        about = f"{self.generation}/object/{self._broadcasts}/{what}"
        frame = torch.zeros(_HEAD + _INLINE, dtype=torch.uint8)
        data = b""
        if self.rank == 0:
            data = pickle.dumps(value)
            head = len(data).to_bytes(8, "little") + self.signer.signature(about, data) + data[:_INLINE]
            frame[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self.broadcast_(frame, what)
        size = int.from_bytes(frame[:8].numpy().tobytes(), "little")
        if size > _INLINE:
            body = torch.empty(size, dtype=torch.uint8)
            if self.rank == 0:
                body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            self.broadcast_(body, what)
        else:
            body = frame[_HEAD : _HEAD + size]
        if self.rank == 0:
            return value
        with self._guard("broadcast of an object"):
            sent = self.signer.value_of(about, frame[8:_HEAD].numpy().tobytes() + body.numpy().tobytes())
            if sent is None:
                raise RuntimeError(f"what was received is not {what}, or does not have this trial's signature")
        return pickle.loads(sent)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self.exchange(torch.zeros(1), "the end of a group")

    # -- what a library must bring --

    @abstractmethod
    def _form(self, store: dist.Store, rank: int, world: int) -> None:
        """Connect to the others through ``store`` within ``form_timeout``; later collectives wait up to `PATIENCE`."""

    @abstractmethod
    def _dissolve(self, in_order: bool) -> None:
        """Undo `_form`, also after another worker died, without waiting for the others.

        ``in_order``: all workers do so now, and no collective is on its way.
        """

    @abstractmethod
    def _allreduce_(self, tensor: torch.Tensor) -> None:
        """See `allreduce_`; any RuntimeError or OSError means that the group is lost."""

    @abstractmethod
    def _broadcast_(self, tensor: torch.Tensor) -> None:
        """See `broadcast_`; any RuntimeError or OSError means that the group is lost."""

    def _gather(self, row: torch.Tensor) -> torch.Tensor:
        """See `gather`; a library may have something better than a sum of rows."""
        rows = row.new_zeros(self.world, *row.shape)
        rows[self.rank] = row
        self._allreduce_(rows)
        return rows

    def _exchange(self, note: torch.Tensor) -> torch.Tensor:
        """See `exchange`. Another kind of collective than `gather` in a library that mixes up different kinds."""
        return self._gather(note)

    @abstractmethod
    def _give_up(self) -> None:
        """End what waits in the library at this worker and its peers, although all live."""

    def _is_own(self, error: Exception) -> bool:
        """Whether an error that a collective raised is of this process alone, as the trial's code would meet it."""
        return False

    # -- inside --

    def _look(self) -> None:
        """Called by a library about once in `LOOK_S` while a collective waits. CannotDivide if it will not end."""
        assert self._lockstep is not None
        why = self._lockstep.look()
        if why is not None:
            self._break_up(why)

    def _death(self, world: int | None = None) -> str | None:
        """Which worker of the group is dead, in a line, as far as the leader has seen.

        Called in any thread while there is a group, or while one of ``world`` workers forms. The leader tells the
        others through its store, as they have no connections to each other.
        """
        meeting = self._meeting
        if meeting is None:  # the group was dissolved meanwhile
            return None
        key = f"{self.generation}/dead"
        try:
            if self._followers is None:
                said = meeting.read(key)
                return None if said is None else said.decode()
            dead = self._dead(world or self.world)
            if dead is None:
                return None
            why = f"worker {dead} of generation {self.generation} has died"
            meeting.write(key, why.encode())
        except (RuntimeError, OSError):
            return f"the leader of generation {self.generation} is gone"
        return why

    def _break_up(self, why: str) -> NoReturn:
        self._lost, self._apart = why, True
        self._give_up()
        raise CannotDivide(why)

    @contextmanager
    def _collective(self, doing: str, what: str) -> Iterator[None]:
        if self._lockstep is not None:
            self._lockstep.begin(what)
        try:
            with self._guard(doing):
                yield
        except CannotDivide:
            raise
        except GroupLost as error:
            why = self._lockstep.found() if self._lockstep is not None else None
            if why is None:
                raise
            self._lost, self._apart = why, True
            raise CannotDivide(why) from error

    def _show(self, address: Address, generation: float, rank: int) -> None:
        """Follower: let the leader see that this process lives, and which place it has."""
        store = self._store(address)
        if self._to_leader is None:
            invitation = store.read("liveness")
            if invitation is None:
                raise RuntimeError("the store there does not have this trial's signature")
            self._to_leader = LeaderConnection(address[0], invitation, self.signer, self.form_timeout)
            self._kept_out.servers.add(self._to_leader.leader)
        self._to_leader.say_place((generation, rank))

    def _meet(self, store: SignedStore, rank: int, world: int) -> None:
        """Return when all members are here. RuntimeError if one is late, or has died on its way."""
        off = f"{self.generation}/off"
        store.write(f"{self.generation}/here/{rank}")
        everyone = [f"{self.generation}/here/{r}" for r in range(world)]
        deadline = time.monotonic() + self.form_timeout
        while not store.all_written(everyone):
            dead = self._dead(world) if rank == 0 else None
            if dead is not None:
                store.write(off, f"rank {dead} died while the group was formed".encode())
            why = store.read(off)
            if why is not None:
                raise RuntimeError(why.decode())
            if time.monotonic() > deadline:
                raise RuntimeError(f"not all of {world} members came within {self.form_timeout:g} s")
            time.sleep(0.002)

    def _dead(self, world: int) -> int | None:
        """Leader: the rank of a member that died."""
        return next((r for r in range(1, world) if self.alive(self.generation, r) is False), None)

    def _store(self, address: Address) -> SignedStore:
        if self._served is not None and address == (self.host, self._served.port):
            return SignedStore(self._served, self.signer)
        if self._joined is None or self._joined[0] != address:
            with self._guard(f"connecting to the leader at {address[0]}:{address[1]}"):
                # The store's client would try a closed port again and again, for its whole time-out.
                socket.create_connection(address, timeout=self.form_timeout).close()
                store = dist.TCPStore(*address, is_master=False, **self._how_to_wait())
            self._joined = (address, store)
            self._kept_out.servers.add(address)
            if self._to_leader is not None:  # it leads to another leader
                self._to_leader.close()
                self._to_leader = None
        return SignedStore(self._joined[1], self.signer)

    def _how_to_wait(self) -> dict[str, Any]:
        return {"wait_for_workers": False, "timeout": timedelta(seconds=self.form_timeout)}

    @contextmanager
    def _guard(self, doing: str) -> Iterator[None]:
        """Turns any failure of the library into GroupLost: after one, no collective of the group can be trusted."""
        if self._lost is not None:
            raise CannotDivide(self._lost) if self._apart else GroupLost(self._lost)
        try:
            yield
        except (RuntimeError, OSError) as error:  # torch's DistError is a RuntimeError
            if self._is_own(error):
                raise
            self._lost = f"{doing} failed in generation {self.generation}: {first_line(error)}"
            raise GroupLost(self._lost) from error
