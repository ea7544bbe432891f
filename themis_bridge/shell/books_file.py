"""The file of the arbiter's books. It stands where every user of the head node may write, so its owner is checked.

Another user may have made a directory of this name first, with books in it that give himself every GPU. So the
directory is made with mode 0700 and the file with 0600; what another user has made is refused before it is read.

`Books` are used while the arbiter runs: books that cannot be read are kept aside, and a write that fails is repeated.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from themis_bridge.errors import ThemisError

logger = logging.getLogger(__name__)

#: The format of the books. Whoever changes what a field means makes it larger; books with another one are not read.
FORMAT = 5
#: Where the books of all users' arbiters are, whatever TMPDIR says. It may be another in each job, and any of them may
#: start the arbiter.
ROOT = Path("/tmp")


def books_path(head: str) -> Path:
    """The books of the arbiter of a Ray cluster. ``head``: id of its head node; another head is another cluster."""
    return ROOT / f"themis-{os.geteuid()}" / f"{head[:16]}.json"


class Books:
    """The books at ``path``. ``clock``: seconds."""

    def __init__(self, path: Path, clock: Callable[[], float]):
        self._path, self._clock = path, clock
        #: Since when writing has failed, and why; "" if it has not.
        self._since, self._why = 0.0, ""

    def text(self) -> str | None:
        """What the last arbiter wrote; None if there are no books. Raises ThemisError if another user has made them."""
        try:
            _check_directory(self._path.parent)
            with open(os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as file:
                _check_owner(self._path, os.fstat(file.fileno()))
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.keep_aside(error)
            return None

    def keep_aside(self, why: Exception) -> None:
        """Give books that cannot be read another name, so that they can be looked at."""
        aside = self._path.with_suffix(".kept")
        try:
            self._path.replace(aside)
            kept = f"they are kept as {aside}"
        except OSError as error:
            kept = f"they stay as {self._path} ({error.strerror})"
        logger.error(
            "themis: the books cannot be read (%s: %s); %s, and the arbiter starts with what the placement groups tell",
            type(why).__name__,
            why,
            kept,
        )

    def write(self, data: Mapping[str, Any]) -> bool:
        """Replace the books. Returns whether they are stored; if not, the caller comes again."""
        try:
            write_books(self._path, json.dumps({**data, "format": FORMAT}))
        except (OSError, ThemisError) as error:
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "make room on that disk" if full else "let this user write there"
            before, self._why = self._why, f"({error}); no lease begins or ends until they can: {remedy}"
            if not before:
                self._since = self._clock()
                logger.warning("themis: %s", self.trouble())
            return False
        if self._why:
            logger.warning("themis: the books are written again, after %.0f s", self._clock() - self._since)
        self._why = ""
        return True

    def remove(self) -> None:
        """Delete the books, because no lease is left. If that fails, the next arbiter reads old books."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("themis: the books %s cannot be deleted (%s)", self._path, error)

    def trouble(self) -> str:
        """Why the books cannot be written, for people; "" if they can."""
        lasts = self._clock() - self._since
        return self._why and f"the books {self._path} cannot be written for {lasts:.0f} s {self._why}"


def loaded(text: str) -> dict[str, Any]:
    """The data in the text of books. Raises TypeError, ValueError or RecursionError if they are no books of ours."""
    data = json.loads(text)
    if not isinstance(data, dict):
        raise TypeError(f"they are a {type(data).__name__}")
    if (found := data.pop("format", 1)) != FORMAT:
        raise TypeError(f"they are of another version of FluidTune: format {found!r}; this one reads {FORMAT}")
    return data


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
    path.chmod(0o700)  # It may have been there, for others to write to.


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise ThemisError(
            f"{path} belongs to user {found.st_uid} and not to user {os.geteuid()}: "
            "have its owner or an administrator remove it, the arbiter does not use it"
        )
