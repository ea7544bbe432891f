"""Which workers train on which emulated device now: a folder in which each of a job's workers has a file.

The file's name has the device, the number of the group of workers, and the worker's process id, so that a worker that
was killed no longer counts.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

from salus_share.private_files import check_directory

#: What the names of boards begin with; the process id of their driver follows.
PREFIX = "fluidtune-emulated-"


class OccupancyBoard:
    """The folder at ``path``.

    ``owner``: the uid of the job's driver, if it may be another than this process's. SalusError if the folder is
    anybody else's.
    """

    def __init__(self, path: str | Path, owner: int | None = None):
        self._folder = Path(path)
        if self._folder.lstat().st_uid != owner:
            check_directory(self._folder)

    @staticmethod
    def of_this_driver() -> str:
        """The path of a new board in the folder for temporary files. Those of drivers that were killed are removed."""
        for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
            number = left.name.removeprefix(PREFIX).partition("-")[0]
            if number.isdecimal() and not Path("/proc", number).exists():
                with suppress(OSError):  # another user's stays
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
        return tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")

    def enter(self, device: int, group: int = 0) -> None:
        """This process trains on the device from now on. A folder that was removed meanwhile is made again."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        (self._folder / f"{device}-{group}-{os.getpid()}").touch()

    def leave(self, device: int) -> None:
        """This process no longer trains on the device. Does nothing if it did not."""
        for own in self._folder.glob(f"{device}-*-{os.getpid()}"):
            own.unlink(missing_ok=True)

    def count(self, device: int) -> int:
        """The number of processes that train on the device."""
        return len(self._living(f"{device}-*-*"))

    def devices_of(self, group: int) -> list[int]:
        """The devices of the living workers of a group, ascending."""
        return sorted(device for device, _ in self._living(f"*-{group}-*"))

    def _living(self, names: str) -> list[tuple[int, int]]:
        """The device and the process id of each living worker whose file has such a name."""
        found = [each.name.split("-") for each in self._folder.glob(names)]
        return [(int(device), int(pid)) for device, _, pid in found if psutil.pid_exists(int(pid))]
