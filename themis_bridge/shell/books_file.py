"""The file of the arbiter's books. It stands where every user of the head node may write, so its owner is checked.

Another user may have made a directory of this name first, with books in it that give himself every GPU. So the
directory is made with mode 0700 and the file with 0600; what another user has made is refused before it is read.
"""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

from themis_bridge.errors import ThemisError


def read_books(path: Path) -> str | None:
    """What is in the books; None: there are none. ThemisError if another user has made them."""
    _check_directory(path.parent)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(descriptor) as file:
        _check_owner(path, os.fstat(descriptor))
        return file.read()


def write_books(path: Path, text: str) -> None:
    """Replace the books in one step. ThemisError if their directory is another user's."""
    _check_directory(path.parent)
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(text)
    fresh.replace(path)


def _check_directory(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = path.lstat()
    _check_owner(path, found)
    if stat.S_ISLNK(found.st_mode):
        raise ThemisError(f"{path} is a symbolic link: remove it, the arbiter keeps its books in a directory there")
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise ThemisError(
            f"{path} belongs to {_user(found.st_uid)} and not to {_user(os.geteuid())}: "
            "have its owner or an administrator remove it, the arbiter does not use it"
        )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
