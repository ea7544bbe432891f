"""`fluidtune.shared`: a data set that is loaded once a node, and that all processes of a job there have in memory once.

The first process that asks loads it and writes it into a file in memory (memfd_create(2)), which the node's
`data_keeper` holds. The others map that file: copy on write, so that a process that changes the data changes its own.
The kernel frees it when the keeper has let go of it, at the end of the job, and no process maps it: nothing is left on
disk or in /dev/shm, whoever was killed.

The file holds the buffers of arrays, tensors and tables as they are in memory (pickle's protocol 5, PEP 574), then the
pickle that refers to them, then where they are. The process that has loaded them never has them twice: what of a large
buffer is written is mapped from the file at once, in the place of the memory that it was in. No allocator ever gets
such a mapping: one that returns pages to the kernel takes them for zeros afterwards, and here they would be the data.
So an array of numpy's has memory without a file there again before it is freed, and a storage of torch's is never
freed. What that keeps are addresses: its memory is the file's.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import io
import json
import logging
import mmap
import os
import pickle
import resource
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import CellType, CodeType, FunctionType
from typing import Any, TypeVar

import numpy as np
from ray import cloudpickle

from fluidtune.cluster.data.data_keeper import HEAD, NAME, VARIABLE, peer
from fluidtune.errors import FluidTuneError

log = logging.getLogger(__name__)

Data = TypeVar("Data")

#: Buffers begin at multiples of this, in bytes: what vector instructions (AVX-512) and torch's allocator ask for.
_ALIGNED = 64
#: How buffers and tables are found from the file's end: offset and number of the table's rows; a row is offset, size.
_END = struct.Struct("QQ")
#: Bytes that are written before they are mapped: so much of the data is there twice. Small beside data worth sharing.
_PIECE = 16 << 20
#: A buffer of fewer bytes is written and not mapped: up to two pages of it and a mapping would be for little.
_LARGE = 1 << 20
#: Buffers that are mapped at most: each takes up to three of the 65,530 mappings of a process (vm.max_map_count).
_MOST = 10_000
#: Seconds for which a process waits for the keeper of its node, which starts when the node's first worker does.
#: Judgement: the start of a plain process takes 5 s on two cores.
_WAIT_S = 15.0


def shared(load: Callable[[], Data]) -> Data:
    """Return what ``load()`` returns, in memory once for all trials of a node.

    One process of the job calls ``load`` on each node. The other processes, those of later trials included, map the
    arrays, tensors and tables of its result. They may change them: what a process changes is its own from then on.
    The data are freed when the job has ended.

    Outside the workers of FluidTune, and where the system is not Linux, it calls ``load()``.

    Args:
        load: a function without arguments, or a `functools.partial`. It gives the same data wherever it is called.
            Two functions of one module, name and code, with equal default and enclosed values, are one.

    Returns:
        numpy arrays, dense CPU tensors, pandas and Arrow tables in any nesting. Other objects in it are copies.

    Raises:
        FluidTuneError: what ``load`` returned, or a value that it encloses or is given, cannot be pickled.
    """
    name = os.environ.get(VARIABLE)
    if name is None or not hasattr(os, "memfd_create"):
        return load()
    key = _key(load)
    try:
        server = _connect(name)
    except OSError as error:
        return _by_itself(load, error)
    with server, _ended_for_all(server):
        try:
            _send(server, {"data": key}, [])
            answer, files = _answer(server)
        except (OSError, ValueError) as error:
            return _by_itself(load, error)
        if answer == {"load": True}:
            value = load()
            files = [_written(value, getattr(load, "__qualname__", repr(load)))]
            del value
            with suppress(OSError, ValueError):  # they are of use here in any case
                _send(server, {"loaded": True}, files)
                _answer(server)
    try:
        return _mapped(files[0])  # type: ignore[no-any-return]
    finally:
        os.close(files[0])


@contextmanager
def _ended_for_all(server: socket.socket) -> Iterator[None]:
    """At the end of the block the connection ends, also if processes that ``load`` has started still have it."""
    try:
        yield
    finally:
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)


def _by_itself(load: Callable[[], Data], error: Exception) -> Data:
    log.warning("fluidtune.shared: this process loads its own copy, because none is shared on this node: %s", error)
    return load()


def _connect(name: str) -> socket.socket:
    until = time.monotonic() + _WAIT_S
    while True:
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(f"\0{name}")
            if peer(server) != os.geteuid():
                raise PermissionError(f"the socket {name} is user {peer(server)}'s")
            return server
        except ConnectionRefusedError:
            server.close()
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        except BaseException:
            server.close()
            raise


def _send(server: socket.socket, message: dict[str, Any], files: list[int]) -> None:
    said = json.dumps(message).encode()
    socket.send_fds(server, [HEAD.pack(len(said))], files)
    server.sendall(said)


def _answer(server: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Wait for the server's answer. It comes when the data are there, or are to be loaded here."""
    said, files, _, _ = socket.recv_fds(server, 4096, 1)
    return json.loads(said or b"it ended"), files


# --- which data


def _key(load: Callable[[], Any]) -> str:
    return hashlib.sha256(repr(_identity(load, [])).encode()).hexdigest()


def _identity(load: Any, met: list[Any]) -> Any:
    """What is equal for two functions that load the same. ``met``: those that were met before, in their order."""
    for place, function in enumerate(met):
        if function is load:
            return "again", place
    met.append(load)
    if isinstance(load, functools.partial):
        return (
            _identity(load.func, met),
            [_value(value, f"argument {place}", met) for place, value in enumerate(load.args)],
            [(name, _value(value, name, met)) for name, value in sorted(load.keywords.items())],
        )
    if isinstance(load, FunctionType):
        code = load.__code__
        cells = zip(code.co_freevars, load.__closure__ or (), strict=True)
        enclosed = [_cell(cell, name, met) for name, cell in cells]
        defaults = _value(load.__defaults__, "its defaults", met), _value(load.__kwdefaults__, "its defaults", met)
        return load.__module__, load.__qualname__, _code(code), defaults, enclosed
    return _value(load, "it", met)


def _code(code: CodeType) -> Any:
    return code.co_code, code.co_names, [_constant(each) for each in code.co_consts]


def _constant(constant: Any) -> Any:
    if isinstance(constant, CodeType):
        return _code(constant)
    # Sets have another order in each process.
    return sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant)


def _cell(cell: CellType, name: str, met: list[Any]) -> Any:
    try:
        value = cell.cell_contents
    except ValueError:
        return "empty"
    return _value(value, name, met)


def _value(value: Any, name: str, met: list[Any]) -> Any:
    if isinstance(value, FunctionType | functools.partial):
        return _identity(value, met)
    if isinstance(value, set | frozenset):
        return sorted(repr(_value(each, name, met)) for each in value)
    try:
        return cloudpickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        load = met[0]
        raise FluidTuneError(
            f"fluidtune.shared({getattr(load, '__qualname__', repr(load))}): by {name}, a {type(value).__name__}, "
            f"processes cannot tell whether they load the same data: {error}. "
            "Enclose plain values only, or make it a function of a module."
        ) from error


# --- the file


class _Pickler(cloudpickle.Pickler):
    """Gives the memory of tensors out of band, too, and that of several views of one storage once."""

    def __init__(self, stream: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(stream, protocol=5, buffer_callback=buffers.append)
        self._storages: dict[int, Any] = {}
        #: Arrays over memory of torch's own.
        self.of_torch: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor and obj.layout in _sparse_layouts(torch):
            return _sparse, (obj.layout, _parts(obj, torch), tuple(obj.shape))
        if torch is not None and type(obj) is torch.Tensor and self._is_plain(obj, torch):
            found = obj.untyped_storage()
            storage = self._storages.setdefault(found.data_ptr() or id(found), found)
            return _tensor, (storage, obj.dtype, obj.storage_offset(), tuple(obj.shape), obj.stride())
        if torch is not None and type(obj) is torch.UntypedStorage and obj.device.type == "cpu":
            array = torch.empty(0, dtype=torch.uint8).set_(obj).numpy()
            if not (obj.is_shared() or obj.is_pinned() or obj.filename):
                self.of_torch.append(array)
            return _storage, (pickle.PickleBuffer(array),)
        return super().reducer_override(obj)

    @staticmethod
    def _is_plain(tensor: Any, torch: Any) -> bool:
        """Whether it is its memory and how that is laid out, and nothing else."""
        dense = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
        return dense and not (tensor.is_conj() or tensor.is_neg() or tensor.requires_grad or tensor.__dict__)


def _storage(memory: Any) -> Any:
    import torch

    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage() if len(memory) else torch.UntypedStorage(0)


def _tensor(storage: Any, dtype: Any, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    import torch

    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


def _sparse_layouts(torch: Any) -> tuple[Any, ...]:
    return torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc


def _parts(tensor: Any, torch: Any) -> tuple[Any, ...]:
    """The tensors that a sparse one consists of. torch's own pickle of it would be held for ever where it is read."""
    if tensor.layout is torch.sparse_coo:
        whole = tensor.detach().coalesce()
        return whole.indices(), whole.values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.detach().values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.detach().values()


def _sparse(layout: Any, parts: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
    import torch

    if layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(*parts, shape, is_coalesced=True, check_invariants=False)
    return torch.sparse_compressed_tensor(*parts, shape, layout=layout, check_invariants=False)


def _written(value: Any, name: str) -> int:
    """A file in memory with the value, which nobody can change any more."""
    stream, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    pickler = _Pickler(stream, buffers)
    try:
        pickler.dump(value)
        pieces = [each.raw() for each in buffers]
    except (pickle.PicklingError, TypeError, AttributeError, BufferError) as error:
        raise FluidTuneError(
            f"fluidtune.shared({name}): what it returned, a {type(value).__name__}, cannot be shared: {error}. "
            "Return arrays, tensors or tables, or call the function itself in each trial."
        ) from error
    own = {id(array): array for array in pickler.of_torch}
    file = os.memfd_create(NAME.removeprefix("memfd:"), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        rows, at, exchanged = [], 0, 0
        for piece in pieces:
            array = own.get(id(piece.obj))
            owner = _owner(piece.obj) if array is None else array
            exchange = owner is not None and piece.nbytes >= _LARGE and exchanged < _MOST
            if exchange:
                exchanged += 1
                # A page can be mapped only from a page of the file.
                at = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE + _address(piece) % mmap.PAGESIZE
                if array is None:
                    weakref.finalize(owner, _empty, _address(piece), piece.nbytes).atexit = False
                else:
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(array))
            rows.append((at, piece.nbytes))
            _write(file, piece, at, exchange)
            at += -(-piece.nbytes // _ALIGNED) * _ALIGNED
        rows.append((at, stream.getbuffer().nbytes))
        _write(file, stream.getbuffer(), at)
        at += stream.getbuffer().nbytes
        table = b"".join(struct.pack("QQ", *row) for row in rows)
        _write(file, memoryview(table + _END.pack(at, len(rows))), at)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(file)
        raise
    return file


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _owner(array: Any) -> Any:
    """The array whose memory it is; None: the memory is not numpy's own, but a file's or another library's."""
    while isinstance(array, np.ndarray) and array.base is not None:
        array = array.base
    return array if isinstance(array, np.ndarray) and array.flags.owndata else None


def _write(file: int, memory: memoryview, at: int, exchange: bool = False) -> None:
    """Write ``memory`` to the file's byte ``at``. ``exchange``: map what is written in the place of the memory."""
    done = 0
    while done < memory.nbytes:
        wrote = os.pwrite(file, memory[done : done + _PIECE], at + done)
        if exchange:
            _exchange(_address(memory[done:]), wrote, file, at + done)
        done += wrote


def _exchange(address: int, size: int, file: int, at: int) -> None:
    """Map the file's bytes from ``at`` where equal bytes are in memory: whole pages of them. Their memory is freed."""
    _map(address, size, mmap.MAP_PRIVATE, file, at)


def _empty(address: int, size: int) -> None:
    """Have zeros of no file in these pages. numpy's arrays call it when they end, before their memory is freed."""
    _map(address, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)


def _map(address: int, size: int, flags: int, file: int, at: int) -> None:
    skipped = -address % mmap.PAGESIZE
    whole = (size - skipped) // mmap.PAGESIZE * mmap.PAGESIZE
    if whole > 0:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        _libc().mmap(address + skipped, whole, protection, flags | _MAP_FIXED, file, at + skipped if file >= 0 else 0)


#: Linux' mmap(2): at this address. The same on every architecture that Ray runs on (x86-64, aarch64).
_MAP_FIXED = 0x10


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    return libc


def _mapped(file: int) -> Any:
    """The value in such a file, mapped.

    The limit of this process' data grows by the mapping: a trial's share of memory is for what it has alone.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        room = soft + os.fstat(file).st_size + mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_DATA, (room if hard == resource.RLIM_INFINITY else min(room, hard), hard))
    memory = memoryview(mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    at, number = _END.unpack(memory[-_END.size :])
    rows = [struct.unpack_from("QQ", memory, at + 16 * row) for row in range(number)]
    *buffers, stream = [memory[begin : begin + size] for begin, size in rows]
    return pickle.loads(stream, buffers=buffers)
