"""Where a trial's commits lie: in its own directory of Tune's storage, whatever that is (a local path, S3, ...)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

from pyarrow.fs import FileSelector, FileType
from ray.tune.utils.serialization import TuneFunctionEncoder

from fluidtune.cluster.result_replay import MOVED_NAMES

if TYPE_CHECKING:
    from fluidtune.elastic import CommitStore


class _StorageFiles:
    """A trial's place in Tune's storage."""

    def __init__(self, storage: Any):
        self._fs = storage.storage_filesystem
        base = getattr(self._fs, "base_fs", self._fs)
        self._local = base.type_name == "local"

    def write_bytes(self, path: str, data: bytes) -> None:
        self._fs.create_dir(os.path.dirname(path))
        # A rename is atomic on a local disk; an object store shows an object only when it is whole.
        target = f"{path}.{os.getpid()}.tmp" if self._local else path
        with self._fs.open_output_stream(target) as stream:
            stream.write(data)
        if target != path:
            self._fs.move(target, path)

    def folders(self, path: str) -> list[str]:
        """The paths of the folders in a folder; none if it is not there."""
        infos = self._fs.get_file_info(FileSelector(path, allow_not_found=True))
        return [info.path for info in infos if info.type == FileType.Directory]

    def read_bytes(self, path: str) -> bytes:
        with self._fs.open_input_stream(path) as stream:
            return stream.readall()


def commit_path(storage: Any) -> str:
    """Where a trial's commits lie: inside the trial's own directory in Tune's storage."""
    return os.path.join(storage.trial_fs_path, ".fluid_commit")


def delete_commits(storage: Any) -> None:
    """The trial will never come back."""
    with contextlib.suppress(FileNotFoundError):
        storage.storage_filesystem.delete_dir(commit_path(storage))


def fingerprint(config: dict[str, Any]) -> str:
    """A commit belongs to one configuration; a trial that was given another one must not resume from it.

    The same before and after Tune has written the configuration down and read it, as JSON.
    """
    plain = {key: value for key, value in config.items() if not key.startswith("__")}
    try:
        written = json.loads(json.dumps(plain, cls=TuneFunctionEncoder))
        data = json.dumps(written, sort_keys=True).encode()
    except Exception:
        data = repr(sorted(plain)).encode()
    return hashlib.sha1(data).hexdigest()


def commit_stores(storage: Any) -> list[CommitStore]:
    """The trial's own store, then those of followers that ever outlived its leader."""
    from fluidtune.elastic import CommitStore

    files, own = _StorageFiles(storage), commit_path(storage)
    return [CommitStore(path, files=files, moved=MOVED_NAMES) for path in (own, *files.folders(own))]


def follower_commit_store(storage: Any, worker: str) -> CommitStore:
    """Where a follower commits in place of a leader that died."""
    from fluidtune.elastic import CommitStore

    return CommitStore(os.path.join(commit_path(storage), f"heir-{worker}"), files=_StorageFiles(storage))
