"""A process' own folders in the place for temporary files, where every user may write. A lock says that one is in use.

The process holds the lock of its folder. The kernel lets go of it when the process has ended, in whatever way. The next
process of this user that makes such a folder removes those whose lock nobody holds. What another user has put there is
neither opened nor changed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from salus_share.errors import SalusError
from salus_share.private_files import check_directory, open_own

#: Seconds for which a folder without a lock may be one that is being made.
YOUNG_S = 5.0


def open_in(folder: str, name: str) -> IO[str]:
    """An empty file of this name in the folder, to be written.

    Raises:
        OSError: the folder is another user's, or the file cannot be made.
    """
    try:
        check_directory(Path(folder))
        return os.fdopen(open_own(Path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK), "w")
    except SalusError as error:
        raise PermissionError(str(error)) from None


def sweep(prefix: str, lock: str, place: str) -> None:
    """Remove this user's folders in ``place`` whose names begin with ``prefix`` and that no process holds."""
    for folder in Path(place).glob(f"{prefix}*"):
        with suppress(OSError, SalusError):
            check_directory(folder)
            if not os.path.lexists(folder / lock) and time.time() - folder.lstat().st_mtime < YOUNG_S:
                continue  # it is being made
            with os.fdopen(open_own(folder / lock, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK), "w") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
