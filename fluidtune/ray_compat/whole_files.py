"""A run's files reach its storage whole: a driver that is killed while it copies leaves each as it was or as it is.

Tune copies all of a run's files into the storage again every few seconds, each by emptying the one that is there. A
driver that is killed meanwhile leaves empty results, and a state from which nothing can be restored. Here a file is
copied under another name and then renamed, and only where it has changed. The run's state comes last, as it was when
Tune wrote it: it never knows of a result that the stored log of its trial has not. It holds a copy of the searcher's
state, which is a file beside it: else a driver that is killed between the two leaves a searcher that has suggested a
trial which Tune does not know, and that waits for its end.

A storage that is no file system of this machine, such as S3, shows a file once all of it is there. A driver copies the
files of its own run alone (`stage_apart`).
"""

from __future__ import annotations

import base64
import functools
import json
import os
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.fs
from ray.train._internal.storage import StorageContext, _FilesystemSyncer
from ray.tune.execution.tune_controller import TuneController

from fluidtune.ray_compat.run_state import newest_state

#: What the name of a file begins and ends with that is not complete.
_BEFORE, _AFTER = ".", ".partial"
#: What the name of a run's state begins with, in the folder that Tune copies.
_STATE = "experiment_state-"
#: What the name of the file begins with that Tune's callbacks write.
_CALLBACKS = "callback-states-"
#: Under what the state has the searcher's files of the same snapshot: name -> base64 of zlib's bytes.
_BESIDE = "fluidtune_beside"
#: What the name of the state's file begins with, while it is stored: Tune writes the next one meanwhile.
_KEPT = f"{_BEFORE}stored-"
#: Bytes of the state that are in memory at a time.
_PIECE = 1 << 20
#: Files that are copied at a time to a storage that is not here. Judgement: what hides the way there, as pyarrow's own
#: copying does.
_AT_ONCE = 8


def stage_apart() -> None:
    """Have each later run of this process stage its files in a folder of its own. A restored run goes on in its folder.

    Ray names the folder by the second and the experiment's name, and copies all that is in it into the run's storage.
    """
    stock = StorageContext.__init__
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def begin(self: Any, *args: Any, **named: Any) -> None:
        stock(self, *args, **named)
        self._timestamp += f"_{secrets.token_hex(4)}"

    StorageContext.__init__ = begin


def is_here(files: pyarrow.fs.FileSystem) -> bool:
    """Whether the file system, or the one that it is a part of, is this machine's own."""
    while isinstance(files, pyarrow.fs.SubTreeFileSystem):
        files = files.base_fs
    return isinstance(files, pyarrow.fs.LocalFileSystem)


def write_whole(content: bytes | Iterable[bytes], files: pyarrow.fs.FileSystem, path: str, own: str = "") -> None:
    """Have the file at ``path`` hold this content. Who reads it meanwhile finds all of the old or of the new one.

    Where that fails, the old one stays on a file system of this machine. Others may have a part of the new one then.
    ``own``: what the name of the incomplete file has of this writer alone.
    """
    at = _partial(path + own) if is_here(files) else path
    try:
        with files.open_output_stream(at) as stream:
            for piece in [content] if isinstance(content, bytes) else content:
                stream.write(piece)
        if at != path:
            files.move(at, path)
    except BaseException:
        if at != path:
            with suppress(Exception):
                files.delete_file(at)  # on a full disk it holds what was left
        raise


def copy_whole(local: str, files: pyarrow.fs.FileSystem, path: str) -> None:
    """As `write_whole`, with the content of the file at ``local``. FileNotFoundError if there is none."""
    if isinstance(files, pyarrow.fs.LocalFileSystem):
        shutil.copyfile(local, _partial(path))
        os.replace(_partial(path), path)
    elif is_here(files):
        write_whole(Path(local).read_bytes(), files, path)
    else:
        here = pyarrow.fs.LocalFileSystem()
        pyarrow.fs.copy_files(local, path, source_filesystem=here, destination_filesystem=files)


def remove_partial(folder: Path) -> None:
    """Remove what killed drivers have left incomplete in a run's folder and those of its trials."""
    for found in (folder, *(each for each in folder.iterdir() if each.is_dir())):
        for left in found.glob(f"{_BEFORE}*{_AFTER}"):
            with suppress(OSError):
                left.unlink()


#: Files of a run's folder by name, the run's state last: time and size, and what is in it, or the path of a copy.
_State = dict[str, tuple[tuple[int, int], bytes | str]]
#: Called when Tune has written its state. What it returns is called, in another thread, when that is stored (True), or
#: the storage could not take it.
OnState = Callable[[], Callable[[bool], None]]


def store_whole_files(controller: TuneController, on_state: OnState | None = None) -> None:
    """Let Tune bring the run's files into its storage as the module says."""
    storage = controller._storage
    storage.syncer.wait()
    storage.syncer = _WholeFiles(storage.syncer, on_state)


def restore_beside(controller: TuneController) -> None:
    """Give the searcher of a restored run the state that it had when Tune wrote that of the run.

    Tune has given it that of the newest file. Raises what the storage or the searcher raises.
    """
    storage, search = controller._storage, controller._search_alg
    beside = newest_state(storage.experiment_fs_path, storage.storage_filesystem).get(_BESIDE, {})
    with tempfile.TemporaryDirectory() as folder:
        for name, kept in beside.items():
            Path(folder, name).write_bytes(zlib.decompress(base64.b64decode(kept)))
        if search.has_checkpoint(folder):
            search.restore_from_dir(folder)


def _pieces(run: str, beside: Mapping[str, bytes]) -> Iterator[bytes]:
    """The run's state, a JSON object in a file, and in it the searcher's files ``beside``, as in `_BESIDE`.

    In pieces: that of 10,000 trials has 40 MB.
    """
    kept = {name: base64.b64encode(zlib.compress(content, 1)).decode() for name, content in beside.items()}
    last = f', "{_BESIDE}": {json.dumps(kept)}}}'.encode() if kept else b""
    with open(run, "rb") as file:
        left = os.fstat(file.fileno()).st_size - (len(b"}") if kept else 0)
        while piece := file.read(min(left, _PIECE)):
            left -= len(piece)
            yield piece
    yield last


def _partial(path: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f"{_BEFORE}{name}{_AFTER}")


class _WholeFiles(_FilesystemSyncer):
    """Takes the place of ``syncer``, Tune's own."""

    def __init__(self, syncer: _FilesystemSyncer, on_state: OnState | None) -> None:
        super().__init__(syncer.storage_filesystem, sync_period=syncer.sync_period, sync_timeout=syncer.sync_timeout)
        self._on_state = on_state
        #: By its path here, the time and the size of each file that the storage has; and the folders that it has.
        self._stored: dict[str, tuple[int, int]] = {}
        self._folders: set[str] = set()
        #: The run's folder, and how many of its states were taken.
        self._run, self._states = "", 0

    def _sync_up_command(self, local_path: str, uri: str, exclude: list[str] | None = None) -> Any:
        """Tune calls it at once when it has written its state, and runs what is returned in a thread."""
        if exclude or not os.path.isdir(local_path):
            return super()._sync_up_command(local_path, uri, exclude)
        names = [each.name for each in os.scandir(local_path) if each.is_file() and not each.name.startswith(_KEPT)]
        if any(name.startswith(_STATE) for name in names):
            self._run = local_path
        if local_path != self._run:
            return self._copy_changed, {"folder": local_path, "to": uri, "below": False}
        changed = {name: mark for name in names if (mark := self._changed(os.path.join(local_path, name)))}
        # A restored run has those of the drivers before as well. Their names have the time.
        run = max((name for name in changed if name.startswith(_STATE)), default=None)
        state: _State = {each: (of, Path(local_path, each).read_bytes()) for each, of in changed.items() if each != run}
        if run is not None:
            self._states += 1
            kept = os.path.join(local_path, f"{_KEPT}{self._states}")
            os.replace(os.path.join(local_path, run), kept)
            state[run] = changed[run], kept
        stored = None if self._on_state is None else self._on_state()
        return self._store, {"folder": local_path, "to": uri, "state": state, "stored": stored}

    def _store(self, folder: str, to: str, state: _State, stored: Callable[[bool], None] | None) -> None:
        """``state``: what has changed in a run's folder itself, as it was; it comes last. ``stored``: see `OnState`."""
        done = False
        try:
            self._copy_changed(folder, to, below=True)
            beside = {name: content for name, (_, content) in state.items() if isinstance(content, bytes)}
            for name, (mark, content) in state.items():
                session = os.path.splitext(name)[0].removeprefix(_STATE)
                own = (each for each in beside if session in each and not each.startswith((_STATE, _CALLBACKS)))
                whole = (
                    content if isinstance(content, bytes) else _pieces(content, {each: beside[each] for each in own})
                )
                write_whole(whole, self.storage_filesystem, os.path.join(to, name))
                self._stored[os.path.join(folder, name)] = mark
            done = True
        finally:
            for _, content in state.values():
                if isinstance(content, str):
                    os.remove(content)
            state.clear()  # the syncer keeps what it was given until the next time
            if stored is not None:
                stored(done)

    def _copy_changed(self, folder: str, to: str, *, below: bool) -> None:
        """``below``: see `_found`."""
        files = self.storage_filesystem

        def copy(found: tuple[str, str, tuple[int, int]]) -> None:
            local, path, mark = found
            with suppress(FileNotFoundError):  # it is gone again
                copy_whole(local, files, path)
                self._stored[local] = mark

        found = self._found(folder, to, below=below)
        if is_here(files):
            for each in found:
                copy(each)
        else:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(copy, found))

    def _found(self, folder: str, to: str, *, below: bool) -> Iterator[tuple[str, str, tuple[int, int]]]:
        """The files that have changed: path here, path there, time and size. Their folders are made.

        ``below``: only those in folders below this one.
        """
        for directory, _, names in os.walk(folder):
            there = os.path.normpath(os.path.join(to, os.path.relpath(directory, folder)))
            if directory not in self._folders:
                self.storage_filesystem.create_dir(there)
                self._folders.add(directory)
            for name in [] if below and directory == folder else names:
                local = os.path.join(directory, name)
                if mark := self._changed(local):
                    yield local, os.path.join(there, name), mark

    def _changed(self, local: str) -> tuple[int, int] | None:
        """The time and the size of the file, if the storage has another one."""
        with suppress(FileNotFoundError):
            found = os.stat(local)
            mark = (found.st_mtime_ns, found.st_size)
            return mark if self._stored.get(local) != mark else None
        return None

    def __getstate__(self) -> dict[str, Any]:
        """What goes to other processes, and into the run's own state, knows nothing of what was stored."""
        return {
            **super().__getstate__(),
            "_current_cmd": None,
            "_on_state": None,
            "_stored": {},
            "_folders": set(),
            "_run": "",
        }
