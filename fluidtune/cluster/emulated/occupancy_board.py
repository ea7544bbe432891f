"""Which workers train on which emulated device now: one small file that all workers of a job map into memory.

A slot holds the process id of a worker that trains, so that a worker that was killed no longer counts, and the number
of the group of workers to which it belongs.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from salus_share.private_files import open_own

#: What the names of boards begin with; the process id of their driver follows.
PREFIX = "fluidtune-emulated-"
#: Slots of one device in the file.
SLOTS = 32
#: A slot: a process id, and the number of a group; 0: none.
_SLOT = struct.Struct("<II")


class OccupancyBoard:
    """The file at ``path``, which `create` has made.

    ``owner``: the uid of the job's driver, if it may be another than this process's. SalusError if the file is
    anybody else's.
    """

    def __init__(self, path: str | Path, owner: int | None = None):
        self._descriptor = open_own(Path(path), os.O_RDWR, owner)
        self._map = mmap.mmap(self._descriptor, 0)

    @staticmethod
    def of_this_driver(devices: int) -> str:
        """The path of a new board in the folder for temporary files. Those of drivers that were killed are removed."""
        for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
            number = left.name.removeprefix(PREFIX).partition("-")[0]
            if number.isdecimal() and not Path("/proc", number).exists():
                with suppress(OSError):  # another user's
                    left.unlink()
        descriptor, path = tempfile.mkstemp(prefix=f"{PREFIX}{os.getpid()}-")
        os.close(descriptor)
        OccupancyBoard.create(path, devices)
        return path

    @staticmethod
    def create(path: str | Path, devices: int) -> None:
        """An empty board for devices 0 to ``devices`` - 1."""
        with open(open_own(Path(path), os.O_WRONLY | os.O_CREAT), "wb") as file:
            file.write(bytes(devices * SLOTS * _SLOT.size))

    def enter(self, device: int, group: int = 0) -> None:
        """This process trains on the device from now on. RuntimeError if there is no slot left."""
        with self._locked():
            for at in self._slots(device):
                if not self._alive(at):
                    _SLOT.pack_into(self._map, at, os.getpid(), group)
                    return
        raise RuntimeError(f"emulated device {device} has {SLOTS} trials on it already")

    def leave(self, device: int) -> None:
        """This process no longer trains on the device. Does nothing if it did not."""
        with self._locked():
            for at in self._slots(device):
                if _SLOT.unpack_from(self._map, at)[0] == os.getpid():
                    _SLOT.pack_into(self._map, at, 0, 0)
                    return

    def count(self, device: int) -> int:
        """The number of processes that train on the device."""
        return sum(map(self._alive, self._slots(device)))

    def devices_of(self, group: int) -> list[int]:
        """The devices of the living workers of a group, ascending."""
        found = [number for number, (_, each) in enumerate(_SLOT.iter_unpack(self._map)) if each == group]
        return [number // SLOTS for number in found if self._alive(number * _SLOT.size)]

    def close(self) -> None:
        self._map.close()
        os.close(self._descriptor)

    def _slots(self, device: int) -> range:
        begin = device * SLOTS * _SLOT.size
        if begin >= len(self._map):
            raise RuntimeError(f"there is no emulated device {device}: {len(self._map) // (SLOTS * _SLOT.size)} in all")
        return range(begin, begin + SLOTS * _SLOT.size, _SLOT.size)

    def _alive(self, at: int) -> bool:
        pid = _SLOT.unpack_from(self._map, at)[0]
        if not pid:
            return False
        with suppress(PermissionError):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return False
        return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from changing the board. Reading needs no lock."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
