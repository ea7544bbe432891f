"""Messages with tensors between a leader and one follower, over one connection.

A message is a kind, a plain value and tensors. Between processes of one machine the bytes of tensors go through memory
that both have mapped (`memfd_create`), each direction through its own; else through the connection. Both sides take
turns: who has sent tensors sends no more before an answer came. So the memory is free again when it is needed.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
import select
import socket
import struct
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from fluidtune.device_kinds import on_accelerator

from .meeting import Lost

_HEAD = struct.Struct("<QQI")  # bytes of the header, bytes of shared memory in use, file descriptors that follow
#: Tensors begin at multiples of this many bytes: a cache line of x86-64.
_ALIGNMENT = 64
#: The most bytes of a header: no real one has more, and a peer that says so has lost its place.
_MOST_HEADER = 2**31
#: How a tensor lies: its type, its shape, its strides, and whether it was on a GPU.
Layout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], bool]


@dataclass(frozen=True)
class Message:
    """``tensors`` of a link with shared memory are views of it: they change when the next message comes."""

    kind: str
    value: Any
    tensors: list[torch.Tensor]


def compact(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor of this shape without holes, its dimensions in memory in the order of ``strides``."""
    made, size = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (strides[d], -d)):
        made[dim] = size
        size *= max(1, shape[dim])
    return tuple(made)


def layout_of(tensor: torch.Tensor) -> Layout:
    """How a copy of the tensor lies."""
    shape = tuple(tensor.shape)
    return tensor.dtype, shape, compact(shape, tensor.stride()), on_accelerator(tensor)


class SharedMemory:
    """Memory that two processes have mapped; it grows. ``file``: its descriptor, which this object owns."""

    def __init__(self, file: int | None = None) -> None:
        self.file = os.memfd_create("fluidtune-divided") if file is None else file
        self._close = weakref.finalize(self, os.close, self.file)
        self._close.atexit = False
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def grow(self, size: int) -> None:
        """Map at least ``size`` bytes. Called by the side that writes, before it writes."""
        if size > len(self._bytes):
            os.ftruncate(self.file, max(size, 2 * len(self._bytes)))
            self.map(size)

    def map(self, size: int) -> None:
        """Map what the other side has made of it, at least ``size`` bytes."""
        if size > len(self._bytes):
            mapped = mmap.mmap(self.file, os.fstat(self.file).st_size)
            self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)

    def view(self, at: int, layout: Layout) -> torch.Tensor:
        """The tensor of this layout that begins at byte ``at``."""
        dtype, shape, strides, _ = layout
        size = dtype.itemsize * math.prod(shape)
        return self._bytes[at : at + size].view(dtype).as_strided(shape, strides)

    def close(self) -> None:
        """Close the file, as the end of this object does; what is mapped stays as long as tensors need it."""
        self.file = -1  # its number may soon be another file's
        self._close()
        self._bytes = torch.empty(0, dtype=torch.uint8)


def places(layouts: Sequence[Layout]) -> tuple[list[int], int]:
    """Where each tensor begins when they lie one after the other, and where the last one ends."""
    found, begin = [], 0
    for dtype, shape, _, _ in layouts:
        found.append(begin)
        begin += -(-dtype.itemsize * math.prod(shape) // _ALIGNMENT) * _ALIGNMENT
    return found, begin


class Link:
    """One connection. ``shared``: both ends are on one machine, connected by a Unix socket. ``device``: of tensors that
    come and were on a GPU at the other end. ``stall_s``: seconds for which the other side may take in nothing of what
    it is sent; None: any, until the kernel finds it dead.
    """

    #: A `Pair`, which carries the tensors that it takes in place of the connection; None: there is none.
    pair: Any = None

    def __init__(
        self, connection: socket.socket, shared: bool, device: torch.device, stall_s: float | None = None
    ) -> None:
        self._socket, self._device, self._stall_s = connection, device, stall_s
        #: Both ends are on one machine.
        self.shares = shared
        connection.settimeout(stall_s)
        self._out = self._in = None
        _links.add(self)
        if shared:
            self._out = SharedMemory()
            socket.send_fds(connection, [b"m"], [self._out.file])
            self._in = SharedMemory(self._file())

    def _file(self) -> int:
        try:
            said, files, _, _ = socket.recv_fds(self._socket, 1, 1)
        except OSError as error:
            raise Lost(f"its connection ended: {error}") from error
        if not said or len(files) != 1:
            raise Lost("its connection has ended")
        return files[0]

    def send(self, kind: str, value: Any = None, tensors: Sequence[torch.Tensor] = (), file: int | None = None) -> None:
        """Send a message. ``file``: a descriptor that goes with it, for `take_file`.

        Raises:
            Lost: the other side is gone.
        """
        layouts = [layout_of(tensor) for tensor in tensors]
        paired = [self.pair is not None and self.pair.takes(tensor) for tensor in tensors]
        beside = [tensor for tensor, flag in zip(tensors, paired, strict=True) if not flag]
        own = [layout for layout, flag in zip(layouts, paired, strict=True) if not flag]
        used = 0
        try:
            if self._out is not None:
                starts, used = places(own)
                self._out.grow(used)
                for at, layout, tensor in zip(starts, own, beside, strict=True):
                    if tensor.numel():
                        self._out.view(at, layout).copy_(tensor)
            header = pickle.dumps((kind, value, layouts, paired), 5)
            self._send(_HEAD.pack(len(header), used, file is not None) + header)
            if file is not None:
                socket.send_fds(self._socket, [b"f"], [file])
            if self._out is None:
                for layout, tensor in zip(own, beside, strict=True):
                    if tensor.numel():
                        self._send(_raw(_dense(tensor.cpu(), layout)))
            if any(paired):
                through = [_dense(t, y) for t, y, flag in zip(tensors, layouts, paired, strict=True) if flag]
                self.pair.send(through, self._has_ended)
        except OSError as error:
            raise Lost(f"its connection ended: {error}") from error

    def _send(self, content: bytes | memoryview) -> None:
        left = memoryview(content)
        while left:
            left = left[self._socket.send(left) :]

    def receive(self, within: float | None = None) -> Message:
        """The next message. ``within``: seconds to wait for it; None: any.

        Raises:
            Lost: the other side is gone, or has said nothing in time.
        """
        deadline = None if within is None else time.monotonic() + within
        length, used, files = _HEAD.unpack(self._exactly(bytearray(_HEAD.size), deadline))
        if length > _MOST_HEADER:
            raise Lost("its connection has lost its place")
        kind, value, layouts, paired = pickle.loads(self._exactly(bytearray(length), deadline))
        self._files = files
        own = [layout for layout, flag in zip(layouts, paired, strict=True) if not flag]
        if self._in is not None:
            self._in.map(used)
            starts, _ = places(own)
            found = [
                self._in.view(at, layout) if all(layout[1]) else _empty(layout)
                for at, layout in zip(starts, own, strict=True)
            ]
        else:
            found = [_empty(layout) for layout in own]
            for tensor in found:
                if tensor.numel():
                    self._exactly(_raw(tensor), deadline)
        through = [
            _empty(y).to(self._device if y[3] else "cpu") for y, flag in zip(layouts, paired, strict=True) if flag
        ]
        if through:
            try:
                self.pair.receive(through, self._has_ended)
            except OSError as error:
                raise Lost(str(error)) from error
        each = {True: iter(through), False: iter(found)}
        come = [(next(each[flag]), layout[3] and not flag) for layout, flag in zip(layouts, paired, strict=True)]
        return Message(kind, value, [t.to(self._device) if moves else t for t, moves in come])

    def _has_ended(self) -> bool:
        """Whether the other side is gone, also while a message of it waits."""
        try:
            return self.has_message() and not self._socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def has_message(self) -> bool:
        """Whether something has come, or the connection has ended."""
        try:
            return bool(select.select([self._socket], [], [], 0)[0])
        except (OSError, ValueError):
            return True

    def take_file(self) -> int:
        """The descriptor that came with the latest message. The caller closes it."""
        return self._file()

    def _exactly(self, buffer: Any, deadline: float | None) -> Any:
        view = memoryview(buffer)
        at = 0
        while at < len(view):
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise Lost("it has not answered in time")
            try:
                self._socket.settimeout(left)
                got = self._socket.recv_into(view[at:])
            except TimeoutError:
                raise Lost("it has not answered in time") from None
            except OSError as error:
                raise Lost(f"its connection ended: {error}") from error
            if not got:
                raise Lost("its connection has ended")
            at += got
        self._socket.settimeout(self._stall_s)
        return buffer

    def close(self) -> None:
        """End the connection; idempotent. Any thread: one that waits in `receive` gets `Lost`."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._let_go()

    def _let_go(self) -> None:
        if self.pair is not None:
            self.pair.close()
        self._socket.close()
        for memory in (self._out, self._in):
            if memory is not None:
                memory.close()


#: A forked process, as a data loader's, lets go of its parent's connections: else a follower of a leader that was
#: killed would wait until the loader's processes have ended.
_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _let_go_of_all() -> None:
    for link in list(_links):
        link._let_go()


os.register_at_fork(after_in_child=_let_go_of_all)


def _empty(layout: Layout) -> torch.Tensor:
    dtype, shape, strides, _ = layout
    return torch.empty_strided(shape, strides, dtype=dtype)


def _dense(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The tensor on the CPU, as its layout says."""
    if tensor.stride() == layout[2] and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return torch.empty_strided(layout[1], layout[2], dtype=layout[0], device=tensor.device).copy_(tensor)


def _raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor without holes."""
    flat = torch.as_strided(tensor.detach(), (tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())
