"""The journal of a search: what its algorithm was told and what it decided, since Tune's last snapshot.

An entry is written before its decision is carried out. It is in the hands of the operating system then, so that it
outlives its driver; a machine that loses its power may lose the last entries. Each snapshot begins a new file, whose
name has the number of its first entry. The files before it go once that snapshot is in the storage. Every beginning of
a journal is a search that was: what cannot be read ends it, and what was written after that is not used.
"""

from __future__ import annotations

import logging
import math
import pickle
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

#: The first line of each file. Another version of the format has another number.
HEADER = b"fluidtune search journal 1\n"
#: Before each entry: its length, and its CRC-32.
_FRAME = struct.Struct("<II")
#: A result whose entry is longer is written without what is no number, text or None. Judgement: a thousand metrics.
_LONGEST = 64 * 1024
_PLAIN = (int, float, str, type(None))


class Entry(NamedTuple):
    """One call of the algorithm.

    ``kind``: "add", "result", "complete", "error" or "remove". ``added``: what the algorithm put into the result.
    """

    kind: str
    trial: str
    result: dict[str, Any] | None = None
    decision: str | None = None
    added: dict[str, Any] | None = None


class SearchJournal:
    """The journal in ``folder``, behind ``position`` entries. ``cut``: files of a former run there are removed."""

    def __init__(self, folder: Path, position: int, cut: bool = False) -> None:
        self._folder = folder
        self.position = position
        self._file: Any = None
        self._told = False
        if cut:
            _remove(folder)
        self.begin()

    def append(self, entry: Entry) -> None:
        """Write an entry. A disk that is full ends the journal until the next snapshot."""
        if self._file is None:
            return
        content = _encoded(entry)
        try:
            framed = _FRAME.pack(len(content), zlib.crc32(content)) + content
            if self._file.write(framed) != len(framed):
                raise OSError("the disk took only a part of it")
            self.position += 1
        except OSError as error:
            self._failed(error)

    def end(self) -> None:
        """Write nothing until the next snapshot: what happened now is no entry, and it alone has it."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._file = None

    def begin(self) -> Callable[[bool], None]:
        """Tune has written a snapshot with all that is written here. Call the result when it is stored, or is not."""
        self.end()
        first = self.position
        try:
            self._file = self._path(first).open("wb", buffering=0)
            self._file.write(HEADER)
        except OSError as error:
            self._failed(error)

        def stored(done: bool) -> None:
            if done:
                _remove(self._folder, first)

        return stored

    def remove(self) -> None:
        """The search is over: no file is left."""
        self.end()
        _remove(self._folder)

    def _path(self, first: int) -> Path:
        return self._folder / f"fluid_search-{first:012}.log"

    def _failed(self, error: OSError) -> None:
        self.end()
        if not self._told:
            self._told = True
            logger.warning("FluidTune: the order of results is not kept between snapshots of Tune: %s", error)


def read_entries(folder: Path, position: int) -> list[Entry]:
    """The entries behind ``position``, as far as they can be read."""
    found: list[Entry] = []
    files = _files(folder)
    for place, (first, path) in enumerate(files):
        if first > position + len(found):
            break  # those between are lost
        until = files[place + 1][0] if place + 1 < len(files) else None
        read = _read(path)[: None if until is None else until - first]
        found += read[position + len(found) - first :]
    return found


def _files(folder: Path) -> list[tuple[int, Path]]:
    """The journal's files in order, each with the number of entries before it."""
    found = []
    for path in folder.glob("fluid_search-*.log"):
        with suppress(ValueError):
            found.append((int(path.stem.removeprefix("fluid_search-")), path))
    return sorted(found)


def _remove(folder: Path, before: float = math.inf) -> None:
    """Remove the journal's files, or those that begin before this entry."""
    for number, path in _files(folder):
        with suppress(OSError):
            if number < before:
                path.unlink()


def _read(path: Path) -> list[Entry]:
    found: list[Entry] = []
    with suppress(Exception):  # bytes of another version may raise anything
        content = path.read_bytes()
        at = len(HEADER)
        while content.startswith(HEADER) and at + _FRAME.size <= len(content):
            length, mark = _FRAME.unpack_from(content, at)
            entry = content[at + _FRAME.size : at + _FRAME.size + length]
            if len(entry) != length or zlib.crc32(entry) != mark:
                break
            found.append(Entry(*pickle.loads(entry)))
            at += _FRAME.size + length
    return found


def _encoded(entry: Entry) -> bytes:
    with suppress(Exception):  # a result may hold anything
        content = pickle.dumps(tuple(entry), pickle.HIGHEST_PROTOCOL)
        if len(content) <= _LONGEST:
            return content
    return pickle.dumps(tuple(entry._replace(result=_plain(entry.result), added=_plain(entry.added))))


def _plain(values: dict[str, Any] | None) -> dict[str, Any] | None:
    """The numbers, texts and None among the values, each text cut."""
    if values is None:
        return None
    found = {}
    for name, value in values.items():
        value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
        if isinstance(value, _PLAIN):
            found[name] = value[:1024] if isinstance(value, str) else value
    return found
