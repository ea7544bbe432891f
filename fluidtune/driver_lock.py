"""One driver a run: the process that carries a run on holds a lock on a file in the run's folder, with its name in it.

The kernel gives the lock back when the process has ended, however that ends. The boundary: drivers see each other where
``flock`` reaches, which is one machine, and the machines of a shared file system that passes locks on. Two drivers
within one process are one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import time
import weakref
from contextlib import suppress
from pathlib import Path

from fluidtune.errors import FluidTuneError

logger = logging.getLogger(__name__)

#: The file, in the run's folder.
FILE = "fluid_driver.lock"
#: Seconds that a driver waits for the end of another one, which may be about to end. Judgement: as long as one that has
#: got notice takes (`FluidExecutor.notice_s`).
PATIENCE_S = 30.0
#: Seconds between two tries. Judgement.
_LOOK_S = 0.1


def this_machine() -> str:
    """This machine in words, as it is in the lock and in a log's first event."""
    return f"{platform.node()}, {os.cpu_count()} cores"


class DriverLock:
    """See `hold`. It is held until `close`, the end of the process, or until nothing refers to it."""

    def __init__(self, folder: Path, patience_s: float) -> None:
        self._path, self.file = folder / FILE, -1
        until, told = time.monotonic() + patience_s, False
        try:
            while not self._take():
                name = os.read(self.file, 4096).decode(errors="replace") or "which begins"
                driver = f"the run in {folder} has a driver, {name}"
                driven = not _tried(self.file, fcntl.LOCK_SH)  # who only looks (`is_held`) shares the lock
                self.let_go()
                if driven and time.monotonic() >= until:
                    raise FluidTuneError(f"{driver}; wait for its end, or end it first; a new run needs another name")
                if driven and not told:
                    logger.warning("FluidTune: %s; waiting up to %.0f s for its end", driver, patience_s)
                told = told or driven
                time.sleep(_LOOK_S)
        except OSError as error:
            if os.path.lexists(self._path) and not os.access(self._path, os.W_OK, effective_ids=True):
                self.let_go()
                raise FluidTuneError(f"another user's driver may have the run: {error}; if none has, remove that file")
            logger.warning("FluidTune: a second driver of the run in %s would not be noticed: %s", folder, error)
            return
        with suppress(OSError):  # on a full disk nobody learns who drives the run
            os.truncate(self.file, 0)
            os.write(self.file, f"process {os.getpid()} on {this_machine()}".encode())

    def _take(self) -> bool:
        """Whether the lock is held now, of the file that is there: a driver that ends removes its own."""
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self.file = os.open(self._path, flags | os.O_RDWR | os.O_CREAT, 0o644)
        except PermissionError:  # another user's
            self.file = os.open(self._path, flags | os.O_RDONLY)
        return _tried(self.file, fcntl.LOCK_EX) and self._is_there()

    def _is_there(self) -> bool:
        """Whether the path still leads to the file of this lock."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self.file), self._path.stat())
        return False

    def let_go(self) -> None:
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)

    def close(self) -> None:
        """Another driver may carry the run on; idempotent."""
        if self.file >= 0:
            with suppress(OSError):
                if self._is_there():
                    self._path.unlink()
            self.let_go()

    __del__ = close


#: By folder, the locks of this process.
_held: weakref.WeakValueDictionary[Path, DriverLock] = weakref.WeakValueDictionary()


def hold(folder: Path, waits: bool = True) -> DriverLock:
    """The lock of the run in this folder, for this process, which may have it already.

    Raises:
        FluidTuneError: another process has it, and if this one ``waits``, has not ended in `PATIENCE_S` seconds. Or
            the file is another user's and cannot be tried.
    """
    folder = folder.resolve()
    lock = _held.get(folder)
    if lock is None or lock.file < 0:
        lock = _held[folder] = DriverLock(folder, PATIENCE_S if waits else 0.0)
    return lock


def is_held(folder: Path) -> bool:
    """Whether a process that this machine sees carries the run on; False where that cannot be found out."""
    with suppress(OSError), (folder / FILE).open("rb") as file:
        return not _tried(file.fileno(), fcntl.LOCK_SH)
    return False


def _tried(file: int, kind: int) -> bool:
    """Whether this process has the lock now."""
    with suppress(BlockingIOError):
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        return True
    return False


def _forked() -> None:
    """A forked process is no driver: else its parent's lock would outlive the parent."""
    for lock in list(_held.values()):
        lock.let_go()


os.register_at_fork(after_in_child=_forked)
