"""torch.distributed as a collective backend: gloo on CPUs, gloo and NCCL on GPUs.

A group is a bare ``ProcessGroupGloo``, with a ``ProcessGroupNCCL`` beside it on a GPU. It is not the process' default
group: the trial's code finds ``dist.is_initialized()`` false, as it does alone, and may make its own groups.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from salus_share.memory import is_out_of_memory

from ..errors import CannotDivide
from .base import PATIENCE, CollectiveBackend
from .forks import OPEN_FILES, open_files, sockets
from .lockstep import LOOK_S, Place
from .signing import SignedStore
from .stuck_collectives import GpuWork, StuckCollectives, connect

#: Read when a process group is made. torch, docs on ProcessGroupNCCL's environment variables: with 0, the watchdog
#: leaves errors and time-outs to us (`StuckCollectives`); it does not end the process when the trial's own kernel has
#: failed; the monitor does not end it when an abort takes long; no wait for a collective stops the loop's thread; and
#: after an error of NCCL's own the watchdog neither writes a report nor waits for others to write theirs, while it
#: holds the lock that the next collective takes (Watchdog::runLoop in torch's ProcessGroupNCCL.cpp).
NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}
#: Looks at the others, `LOOK_S` apart, that find a worker dead before a collective of gloo is given up: gloo itself
#: raises as soon as a connection is closed, and what a worker had sent before it died has come by then.
_MISSED = 2
#: Collectives whose objects live on: the present one and two before it. One of gloo's threads drops them a moment
#: after their end. If it is the last to do so, it takes Python's interpreter for that, and a process that is forked
#: just then, as a data loader's, waits for ever (CPython before 3.12: `PyOS_AfterFork_Child` takes a lock before it
#: makes it anew). Gloo has two threads (torch's default), and both have done something else by then.
_KEPT = 3
#: Bytes of a collective that is not kept: others follow it before a loader starts, whose indices are broadcast.
_LARGE = 2**20
#: In the messages of errors after which NCCL will not connect these GPUs whenever it is asked: ncclResult_t in its
#: documentation, and the words of its check for two ranks on one GPU (two instances of MIG are one GPU to it).
_REFUSALS = ("ncclInvalidUsage", "Duplicate GPU detected")
#: What torch's gloo reads to choose an interface when a group is made: docs on torch.distributed, "Common environment
#: variables". By default it takes the interface of the machine's name, which the other workers may not reach.
_INTERFACE = "GLOO_SOCKET_IFNAME"
#: Groups that were given up: the end of one would wait for its threads, and one of these waits for up to `PATIENCE`.
_kept_groups: list[Any] = []


def gloo_group(store: dist.Store, rank: int, world: int, seconds: float) -> Any:
    """A group on CPUs. ``seconds``: how long it may take until all have come, and each operation after that."""
    return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, world, timedelta(seconds=seconds))


def nccl_group(store: dist.Store, rank: int, world: int) -> Any:
    """A group on GPUs, by the environment's `NCCL_SETTINGS`."""
    return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, world, timedelta(seconds=PATIENCE))


class TorchBackend(CollectiveBackend):
    """Tensors on the CPU go through gloo, those on a GPU through NCCL."""

    def __init__(
        self, host: str = "127.0.0.1", device: str = "cpu", form_timeout: float = 30.0, secret: bytes = b""
    ) -> None:
        super().__init__(host, device, form_timeout, secret)
        #: The group's halves, for tensors on the CPU and on the GPU.
        self._gloo: Any = None
        self._nccl: Any = None
        self._stuck: StuckCollectives | None = None
        self._waits_on_cpu = False
        #: A collective of gloo in this group has been given up and may never end.
        self._given_up = False
        #: The latest collectives of gloo with their tensors, see `_KEPT`.
        self._kept: deque[tuple[Any, ...]] = deque(maxlen=_KEPT)
        self._cuda_failed = False  # in this process, whose CUDA cannot be used any more
        self._next_look = 0.0  # when the GPU's collective is compared with the others', by time.monotonic()

    def _form(self, store: dist.Store, rank: int, world: int) -> None:
        before = open_files()
        try:
            self._gloo = self._make_gloo(store, rank, world)
            if self._is_on_gpu():
                os.environ.update(NCCL_SETTINGS)
                self._nccl = self._make_nccl(store, rank, world)
            self._sockets = _connections(open_files() - before)
            if self._is_on_gpu():
                self._refuse_shared_gpus(store, self._gpu(), rank, world)
                self._connect_gpus(world)
                self._stuck = StuckCollectives(self._hopeless, self._abandon)
        except BaseException:
            if self._nccl is not None:
                self._end_on_gpu()
            self._gloo = self._nccl = None
            raise

    def _make_gloo(self, store: dist.Store, rank: int, world: int) -> Any:
        before = os.environ.get(_INTERFACE)
        os.environ[_INTERFACE] = interface_of(self.host)
        try:
            made = gloo_group(store, rank, world, self.form_timeout)
        finally:
            del os.environ[_INTERFACE]
            if before is not None:
                os.environ[_INTERFACE] = before
        made.set_timeout(timedelta(seconds=PATIENCE))  # short for connecting, long for the end of an iteration
        return made

    def _make_nccl(self, store: dist.Store, rank: int, world: int) -> Any:
        return nccl_group(store, rank, world)

    def _is_on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _gpu(self) -> str:
        """The UUID of this worker's GPU."""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def _refuse_shared_gpus(self, store: dist.Store, gpu: str, rank: int, world: int) -> None:
        """CannotDivide on all workers if two of them are on one GPU, which NCCL does not allow."""
        signed = SignedStore(store, self.signer, f"{self.generation}/group/")
        signed.write(f"gpu/{rank}", gpu.encode())
        store.wait([f"gpu/{other}" for other in range(world)])
        said = [signed.read(f"gpu/{other}") for other in range(world)]
        if None in said:
            raise RuntimeError(f"the GPU of worker {said.index(None)} does not have this trial's signature")
        gpus = [each.decode() for each in said if each is not None]
        for later, name in enumerate(gpus):
            first = gpus.index(name)
            if first < later:
                self._lost, self._apart = f"workers {first} and {later} of the trial have one GPU, {name}", True
                raise CannotDivide(f"{self._lost}: give each worker another GPU, as NCCL needs one for each")

    def _connect_gpus(self, world: int) -> None:
        """Make NCCL's communicator, while all workers are looked at.

        torch would make it in the first collective, and nothing ends that wait when a worker has died before it came:
        `abort` ends communicators that were made. CannotDivide on all workers if NCCL will never make this one.
        """
        lockstep = self._lockstep
        assert lockstep is not None
        try:
            connect(self._first_collective(), lambda: lockstep.found() or self._death(world), self.form_timeout)
        except RuntimeError as error:
            said = _last_line(error)
            why = lockstep.found()
            if why is None and any(words in str(error) for words in _REFUSALS):
                why = f"NCCL does not connect the GPUs of the trial's workers: {said}"
            if why is None and is_out_of_memory(error):
                why = f"a worker's GPU has no memory left for NCCL: {said}"
            if why is None:
                raise RuntimeError(said) from error
            lockstep.tell(why)
            self._lost, self._apart = why, True
            raise CannotDivide(why) from error

    def _first_collective(self) -> Callable[[], None]:
        """What makes torch make NCCL's communicator; any thread may call it."""
        tensor = torch.zeros(1, device=self.device)

        def run() -> None:
            self._nccl.allreduce([tensor]).wait()
            torch.cuda.synchronize(tensor.device)

        return run

    def _dissolve(self, in_order: bool) -> None:
        if self._given_up:
            self._given_up = False
            _kept_groups.append(self._gloo)
        if self._stuck is not None:
            self._stuck.close()
            self._stuck = None
            if not in_order:
                self._end_on_gpu()
        try:
            if self._nccl is not None:
                self._nccl.shutdown()
        except RuntimeError:
            if not self._cuda_failed:
                raise
        finally:
            self._kept.clear()
            self._gloo = self._nccl = None

    def _of(self, tensor: torch.Tensor) -> Any:
        return self._nccl if tensor.is_cuda else self._gloo

    # Gloo pairs up the collectives of one kind by their order, and ends the process if their sizes differ. So what can
    # meet in a loop that leaves a step out is of different kinds: gradients, batch statistics, exchanges, broadcasts.

    def _allreduce_(self, tensor: torch.Tensor) -> None:
        self._wait(self._of(tensor).allreduce([_real(tensor)]), tensor)

    def _broadcast_(self, tensor: torch.Tensor) -> None:
        self._wait(self._of(tensor).broadcast(tensor, root=0), tensor)

    def _gather(self, row: torch.Tensor) -> torch.Tensor:
        rows, own = row.new_empty(self.world, *row.shape), row.contiguous()
        parts = [_real(part) for part in rows.unbind()]
        self._wait(self._of(own).allgather([parts], [_real(own)]), own, parts)
        return rows

    def _exchange(self, note: torch.Tensor) -> torch.Tensor:
        notes = note.new_empty(self.world, *note.shape)
        own = note.expand_as(notes).contiguous()
        self._wait(self._of(own).alltoall_base(notes, own, [], []), own, notes)
        return notes

    def _wait(self, work: Any, tensor: torch.Tensor, *others: Any) -> None:
        """Wait for a collective of these tensors. On a GPU, only the GPU waits."""
        if tensor.is_cuda:
            self._let_gpu_wait(work)
            return
        if tensor.nbytes <= _LARGE:
            self._kept.append((work, tensor, others))
        self._waits_on_cpu = True
        missed = 0
        try:
            while True:
                try:
                    work.wait(timedelta(seconds=LOOK_S))
                    return
                except RuntimeError:
                    if work.is_completed():
                        raise
                self._look()
                # Gloo misses a death between two collectives if the next one begins just as the connection is closed.
                why = self._death()
                missed = 0 if why is None else missed + 1
                if missed == _MISSED:
                    self._given_up = True
                    raise RuntimeError(why)
        finally:
            self._waits_on_cpu = False

    # -- on a GPU --

    def _let_gpu_wait(self, work: Any) -> None:
        assert self._stuck is not None and self._lockstep is not None
        work.wait()
        self._stuck.watch(self._watched(work), self._lockstep.place)

    def _watched(self, work: Any) -> GpuWork:
        """A collective whose result the current stream waits for."""
        return _StartedWork(work)

    def _is_own(self, error: Exception) -> bool:
        """CUDA errors stay for the rest of a process. A collective raises those of kernels that ran before it, too."""
        if not self._is_on_gpu() or "cuda" not in str(error).lower():
            return False
        self._end_on_gpu()  # so that no kernel of the group is waited for
        self._cuda_failed = self._cuda_failed or self._has_cuda_failed()
        return self._cuda_failed

    def _has_cuda_failed(self) -> bool:
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return True
        return False

    def _hopeless(self, place: Place) -> str | None:
        """See `StuckCollectives`. A collective on the CPU that waits compares itself with the others'."""
        why = self._death()
        now = time.monotonic()
        lockstep = self._lockstep  # None: the group was dissolved meanwhile
        if why is None and lockstep is not None and not self._waits_on_cpu and now >= self._next_look:
            self._next_look = now + LOOK_S
            with suppress(RuntimeError, OSError):  # the leader is gone: the next look sees it
                why = lockstep.look_from_gpu(place)
                self._apart = why is not None
        return why

    def _abandon(self, why: str) -> None:
        self._lost = why
        self._give_up()

    def _end_on_gpu(self) -> None:
        """`_abort_on_gpu`, also where CUDA has failed and nothing is left to abort."""
        with suppress(RuntimeError):
            self._abort_on_gpu()

    def _abort_on_gpu(self) -> None:
        """End the kernels of collectives that are on their way; none of this group begins any more. Any thread."""
        self._nccl.abort()

    def _give_up(self) -> None:
        if self._stuck is not None:
            self._end_on_gpu()
        for place, inode in self._sockets.items():
            with suppress(OSError):
                if os.stat(f"{OPEN_FILES}/{place}").st_ino == inode:
                    connection = socket.socket(fileno=os.dup(place))
                    connection.shutdown(socket.SHUT_RDWR)
                    connection.close()


class _StartedWork:
    """A collective of torch.distributed that the current stream waits for."""

    def __init__(self, work: Any) -> None:
        self.is_completed = work.is_completed
        passed = torch.cuda.Event()
        passed.record()
        self.is_done = passed.query


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with a complex number as two: neither library adds others."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _last_line(error: Exception) -> str:
    """What an error says in a line. NCCL's errors end with what NCCL said last: "Last error:", then a line of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if "NCCL" in lines[0] else lines[0]


def _connections(files: set[str]) -> dict[int, int]:
    """Of these open files, those that are connections: number and inode. The others may be closed by now."""
    found = {}
    for place, inode in sockets(files).items():
        with suppress(OSError), socket.socket(fileno=os.dup(place)) as connection:
            connection.getpeername()
            found[place] = inode
    return found


def interface_of(host: str) -> str:
    """The network interface that has this IP address, as "lo" or "eth0".

    ValueError, which names the addresses of this machine, if no interface has it.
    """
    families = (socket.AF_INET, socket.AF_INET6)
    have: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family in families:
                have.setdefault(address.address.split("%")[0], name)
    if host not in have:
        raise ValueError(f"no interface of this machine has the address {host}, only {sorted(have)}")
    return have[host]
