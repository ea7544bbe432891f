"""Files in places that every user of a machine may write to (/dev/shm, /tmp): ours alone, or refused.

The names there are known beforehand, so another user may have made them first. A directory is made with mode 0700 and
a file with 0600; what is there already must belong to this user and must not be a symbolic link. Otherwise SalusError
names the path and its owner, before anything was read.
"""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

from salus_share.errors import SalusError


def own_directory(path: Path) -> Path:
    """The directory, made if it is not there; only this user may enter it. Its parent must be this user's, or root's.

    Raises:
        SalusError: another user has made it, or it is no directory.
    """
    if not path.parent.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.parent.lstat().st_uid != 0:
        _check_owner(path.parent, path.parent.lstat())
    path.mkdir(exist_ok=True, mode=0o700)
    return check_directory(path)


def check_directory(path: Path) -> Path:
    """The directory, which is there; only this user may enter it.

    Raises:
        SalusError: it is another user's, or no directory.
        OSError: it is not there.
    """
    found = path.lstat()
    _check_owner(path, found)
    if not stat.S_ISDIR(found.st_mode):
        raise SalusError(f"{path} is not a directory; remove it")
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)
    return path


def open_own(path: Path, flags: int) -> int:
    """A descriptor of the file, opened with these flags of `os.open`; a file that is made has mode 0600.

    Raises:
        SalusError: another user's file is there.
        OSError: it cannot be opened, or is a symbolic link.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _check_owner(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def trusted_owner(path: Path) -> bool:
    """Whether a path is this user's or root's: what another user has put there is not used."""
    try:
        return path.lstat().st_uid in (0, os.geteuid())
    except OSError:
        return False


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise SalusError(
            f"{path} belongs to {_user(found.st_uid)} and not to {_user(os.geteuid())}: "
            "have its owner or an administrator remove it, it is not used"
        )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
