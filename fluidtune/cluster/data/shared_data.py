"""`fluidtune.shared`: a data set that is loaded once a node, and that all processes of a job there have in memory once.

The first process that asks loads it and writes it into the node's memory (`node_files`). The others wait, and map it:
copy on write, so that a process that changes the data changes its own. If the first one dies or its function raises,
the next one loads. Written are the buffers of arrays, tensors and tables as they are in memory (pickle's protocol 5,
PEP 574), then the pickle that refers to them, then where they are, and at last the head, which says that all is there.

The process that has loaded the data never has them twice: what of a large buffer is written is mapped from the file at
once, in the place of the memory that it was in. Such a buffer is never freed. An allocator that got it back and took
pages for zeros would find the data there (jemalloc). What it keeps are addresses: its memory is the file's.

Ray's object store would do with fewer lines, but its peak is twice the data: a process that puts them there has them
beside. Four actors with an array of 500 MB took 1.83 to 2.04 times its size so, and 1.01 to 1.02 times by this module.
The array was there as fast, and for a later process at once, by both.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import logging
import mmap
import os
import pickle
import resource
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
from ray import cloudpickle

from fluidtune.cluster.data import node_files
from fluidtune.cluster.data.load_identity import identity

log = logging.getLogger(__name__)

Data = TypeVar("Data")

#: The head of a data set: its key, where the table of its buffers begins, and where that ends.
_HEAD = struct.Struct("32sQQ")
#: A row of the table: where a buffer begins, and its bytes. The last one is the pickle's.
_ROW = struct.Struct("QQ")
#: Buffers begin at multiples of this, in bytes: what vector instructions (AVX-512) and torch's allocator ask for.
_ALIGNED = 64
#: Bytes that are written before they are mapped: so much of the data is there twice. Small beside data worth sharing.
_PIECE = 8 << 20
#: A buffer of fewer bytes is written and not mapped: up to two pages of it and a mapping would be for little.
_LARGE = 1 << 20
#: Buffers that are mapped at most: each takes up to three of the 65,530 mappings of a process (vm.max_map_count).
_MOST = 10_000
#: Linux' mmap(2): at this address. The same on every architecture that Ray runs on (x86-64, aarch64).
_MAP_FIXED = 0x10
#: The keys of a place that nobody has written to, and of one whose data could not be written.
_NOTHING, _GIVEN_UP = b"\0" * 32, b"\xff" * 32

#: The buffers that are mapped from a file of shared data now.
_never_freed: list[memoryview] = []


def shared(load: Callable[[], Data]) -> Data:
    """Return what ``load()`` returns, in memory once for all trials of a node.

    One process of the job calls ``load`` on each node. The other processes, those of later trials included, map the
    arrays, tensors and tables of its result. They may change them: what a process changes is its own from then on.
    The data are freed when the job has ended.

    Outside the workers of FluidTune, and where the system is not Linux, it calls ``load()``. So it does, and logs a
    line, if what ``load`` returns, encloses or is given cannot be pickled.

    Args:
        load: a function without arguments, or a `functools.partial`. It gives the same data wherever it is called.
            Two functions of one module, name and code, with equal default and enclosed values, are one.

    Returns:
        numpy arrays, CPU tensors, pandas and Arrow tables in any nesting. Other objects in it are copies.
    """
    if node_files.VARIABLE not in os.environ:
        return load()
    try:
        key = identity(load)
    except Exception as error:
        _own_copy(f"{_name(load)} encloses or is given a value that cannot be pickled: {error}")
        return load()
    return once_a_node(key, load)


def once_a_node(key: bytes, load: Callable[[], Data]) -> Data:
    """Return the data set with this key (32 bytes). ``load``: as `shared` has it."""
    with contextlib.ExitStack() as turn:
        try:
            file, at = turn.enter_context(node_files.locked(key))
        except (OSError, ValueError, ray.exceptions.RayError) as error:
            _own_copy(f"its node has no shared data: {error}")
            return load()
        found = _head(file, at)[0]
        if found == _NOTHING:
            value = load()
            try:
                _write(file, at, key, value)
            except BaseException as error:
                # This process has mapped what was written. Nobody may write there again.
                os.pwrite(file, _HEAD.pack(_GIVEN_UP, 0, 0), at)
                if not isinstance(error, Exception):
                    raise
                _own_copy(f"what {_name(load)} returned, a {type(value).__name__}, cannot be shared: {error}")
                return value
            del value
    if found not in (_NOTHING, key):
        _own_copy(f"what {_name(load)} returns could not be shared")  # or, once in a million times, the place is taken
        return load()
    return _mapped(file, at)  # type: ignore[no-any-return]


def _own_copy(why: str) -> None:
    log.warning("fluidtune.shared: this process loads its own copy, because %s", why)


def _name(load: Callable[[], Any]) -> str:
    return getattr(load, "__qualname__", None) or repr(load)


def _head(file: int, at: int) -> tuple[bytes, int, int]:
    return _HEAD.unpack(os.pread(file, _HEAD.size, at).ljust(_HEAD.size, b"\0"))  # type: ignore[return-value]


class _Pickler(cloudpickle.Pickler):
    """Gives the memory of tensors out of band, too, and that of several views of one storage once."""

    def __init__(self, stream: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(stream, protocol=5, buffer_callback=buffers.append)
        self._storages: dict[int, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor and self._is_plain(obj, torch):
            found = obj.untyped_storage()
            storage = self._storages.setdefault(found.data_ptr() or id(found), found)
            return _tensor, (storage, obj.dtype, obj.storage_offset(), tuple(obj.shape), obj.stride())
        if torch is not None and type(obj) is torch.UntypedStorage and obj.device.type == "cpu":
            return _storage, (pickle.PickleBuffer(torch.empty(0, dtype=torch.uint8).set_(obj).numpy()),)
        return super().reducer_override(obj)

    @staticmethod
    def _is_plain(tensor: Any, torch: Any) -> bool:
        """Whether it is its memory and how that is laid out, and nothing else. torch makes others from such tensors."""
        dense = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
        return dense and not (tensor.is_conj() or tensor.is_neg() or tensor.requires_grad or tensor.__dict__)


def _storage(memory: Any) -> Any:
    import torch

    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage() if len(memory) else torch.UntypedStorage(0)


def _tensor(storage: Any, dtype: Any, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    import torch

    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


def _write(file: int, at: int, key: bytes, value: Any) -> None:
    stream, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(stream, buffers).dump(value)
    own, table, end = _own_memory(), b"", _HEAD.size
    for part in [*(each.raw() for each in buffers), stream.getbuffer()]:
        first = np.asarray(part).ctypes.data
        ours = any(begin <= first and first + part.nbytes <= over for begin, over in own)
        exchange = ours and part.nbytes >= _LARGE and len(_never_freed) < _MOST
        end += -end % _ALIGNED
        if exchange:
            _never_freed.append(part)
            end += (first - end) % mmap.PAGESIZE  # a page is mapped from a page of the file
        table += _ROW.pack(end, part.nbytes)
        done = 0
        while done < part.nbytes:
            wrote = os.pwrite(file, part[done : done + _PIECE], at + end + done)
            if exchange:
                _exchange(first + done, wrote, file, at + end + done)
            done += wrote
        end += part.nbytes
    os.pwrite(file, table, at + end)
    os.pwrite(file, _HEAD.pack(key, end, end + len(table)), at)


def _own_memory() -> list[tuple[int, int]]:
    """Where this process has memory that is in no file and that no other process has: begin and end of each area."""
    found: list[tuple[int, int]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, mode, _, _, inode = line.split()[:5]
        if mode == "rw-p" and inode == "0":
            begin, over = (int(each, 16) for each in area.split("-"))
            found.append((found.pop()[0] if found and found[-1][1] == begin else begin, over))
    return found


def _exchange(address: int, size: int, file: int, at: int) -> None:
    """Map the file's bytes from ``at`` where equal bytes are in memory: whole pages of them. Their memory is freed."""
    skipped = -address % mmap.PAGESIZE
    whole = (size - skipped) // mmap.PAGESIZE * mmap.PAGESIZE
    if whole > 0:
        _leave_room(whole)
        how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
        _libc().mmap(address + skipped, whole, *how, file, at + skipped)


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    return libc


def _mapped(file: int, at: int) -> Any:
    _, table, end = _head(file, at)
    _leave_room(end + mmap.PAGESIZE)
    memory = memoryview(mmap.mmap(file, end, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=at))
    *buffers, stream = [memory[begin : begin + size] for begin, size in _ROW.iter_unpack(memory[table:])]
    return pickle.loads(stream, buffers=buffers)


def _leave_room(size: int) -> None:
    """Raise the limit of this process' data by a mapping: a trial's share of memory is for what it has alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        room = soft + size
        resource.setrlimit(resource.RLIMIT_DATA, (room if hard == resource.RLIM_INFINITY else min(room, hard), hard))
