"""Copies of checkpoints that a search may still delete. A process that dies loads its model again, maybe days later.

Ray Tune deletes the older checkpoints of a trial that goes on, as the run's `CheckpointConfig` says. So of such a trial
a copy is served. It is in the service's own folder on its run's storage, where every model process finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import posixpath
import secrets
from collections.abc import Iterable
from dataclasses import replace

from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType, copy_files
from ray.tune import Checkpoint

from fluidtune.serving.winners import Winner
from symphony_serve.errors import ServeError

logger = logging.getLogger(__name__)


#: Where copies are, in the folder of their service.
COPIES = "checkpoints"


def held(winner: Winner, folder: str, storage: FileSystem) -> Winner:
    """The winner, with a copy of its checkpoint in the folder of its service if the search may delete it.

    Raises ServeError if the search has deleted it, or if it cannot be copied. Nothing is left then.
    """
    if not winner.goes_on:
        return winner
    source = winner.checkpoint
    path = posixpath.join(folder, COPIES, f"{winner.name}-{secrets.token_hex(4)}")
    try:
        storage.create_dir(path)
        # In one thread, as uploads by several may block: https://github.com/apache/arrow/issues/32372
        copy_files(
            source.path, path, source_filesystem=source.filesystem, destination_filesystem=storage, use_threads=False
        )
        # It is whole if all of the checkpoint is still there: it may have been deleted meanwhile.
        if _files(source.filesystem, source.path) != _files(storage, path):
            raise FileNotFoundError(source.path)
    except OSError as error:
        _remove([path], storage)
        said = f"the checkpoint of trial {winner.name}, which goes on, cannot be copied to {path}: {error}"
        if isinstance(error, FileNotFoundError):
            said = f"the checkpoint of trial {winner.name} is not there (any more): {source.path}"
            said += "; a search deletes older ones: try again, or have it keep more (num_to_keep)"
        raise ServeError(said) from None
    return replace(winner, checkpoint=Checkpoint(path, storage), goes_on=False)


def let_go(winners: Iterable[Winner], folder: str) -> None:
    """Remove the copies among the winners' checkpoints."""
    for one in winners:
        if one.checkpoint is not None and posixpath.dirname(one.checkpoint.path) == posixpath.join(folder, COPIES):
            _remove([one.checkpoint.path], one.checkpoint.filesystem)


class HeldCheckpoints:
    """The copies of the service with this folder, on the front's event loop. first: a trial of its run."""

    def __init__(self, folder: str, first: Winner):
        self._folder, self._first = folder, first
        #: The names of those that are there and whole. A storage may list paths in other ways.
        self._there: set[str] = set()

    @property
    def _storage(self) -> FileSystem:
        return self._first.checkpoint.filesystem

    async def begin(self) -> None:
        """See what this service has, and what one before it has left."""
        copies = FileSelector(posixpath.join(self._folder, COPIES), allow_not_found=True)
        with contextlib.suppress(OSError):
            self._there = {_name(one.path) for one in await asyncio.to_thread(self._storage.get_file_info, copies)}

    async def hold(self, winner: Winner) -> Winner:
        """As `held`. The next `keep` removes a copy that is not served then."""
        found = await asyncio.to_thread(held, winner, self._folder, self._storage)
        if found is not winner:
            self._there.add(_name(found.checkpoint.path))
        return found

    async def keep(self, winners: Iterable[Winner]) -> None:
        """Remove all but those of these winners. One that cannot be removed now is left to the next time."""
        gone = self._there - {_name(one.checkpoint.path) for one in winners if one.checkpoint is not None}
        if gone:
            paths = [posixpath.join(self._folder, COPIES, name) for name in gone]
            stay = await asyncio.to_thread(_remove, paths, self._storage)
            self._there -= gone - {_name(path) for path in stay}


def _name(path: str) -> str:
    return posixpath.basename(path.rstrip("/"))


def _files(storage: FileSystem, path: str) -> set[tuple[str, int]]:
    """Names and sizes of the files in this folder and below it. A storage may list them with or without a first "/"."""
    found: list[FileInfo] = storage.get_file_info(FileSelector(path, recursive=True))
    root = f"/{path.lstrip('/')}"
    files = (one for one in found if one.type == FileType.File)
    return {(posixpath.relpath(f"/{one.path.lstrip('/')}", root), one.size) for one in files}


def _remove(paths: Iterable[str], storage: FileSystem) -> list[str]:
    """Remove these folders. Returns those that stay."""
    stay = []
    for path in paths:
        try:
            storage.delete_dir(path)
        except FileNotFoundError:
            """It is gone already."""
        except OSError as error:
            logger.warning("A checkpoint that is not served any more stays in %s: %s", path, error)
            stay.append(path)
    return stay
