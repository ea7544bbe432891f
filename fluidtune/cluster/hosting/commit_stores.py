"""Where a trial's commits are: in its own directory of Tune's storage, which may be a local path, S3 or other."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from pyarrow.fs import FileSelector, FileType
from ray import cloudpickle
from ray.tune.utils.serialization import TuneFunctionEncoder

from fluidtune.cluster.hosting.result_replay import MOVED_NAMES

if TYPE_CHECKING:
    from fluidtune.elastic import CommitStore


class _StorageFiles:
    """The files of Tune's storage; see `fluidtune.elastic.Files`."""

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
    """The folder of a trial's commits: inside the trial's own directory in Tune's storage."""
    return os.path.join(storage.trial_fs_path, ".fluid_commit")


def delete_commits(storage: Any) -> None:
    """Delete all commits of a trial that will never continue."""
    with contextlib.suppress(FileNotFoundError):
        storage.storage_filesystem.delete_dir(commit_path(storage))


class _Encoder(TuneFunctionEncoder):
    """As Tune's, but what has another pickle in each process is written as what it holds: tensors, modules and sets."""

    def default(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if isinstance(obj, set | frozenset):
            return {"set": sorted(json.dumps(each, cls=_Encoder, sort_keys=True) for each in obj)}
        if torch is not None and isinstance(obj, torch.nn.Module):
            said = re.sub(" at 0x[0-9a-f]+", "", repr(obj))
            return {"module": f"{type(obj).__module__} {said}", "state": dict(obj.state_dict())}
        if torch is not None and isinstance(obj, torch.Tensor):
            plain = obj.detach().to_dense().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            return {"tensor": [str(obj.dtype), list(obj.shape), hashlib.sha1(plain.tobytes()).hexdigest()]}
        return super().default(obj)


def fingerprint(config: dict[str, Any]) -> str:
    """Names a trial's configuration: a trial that was given another one must not go on from the commits of this one.

    It is the same before and after Tune has written the configuration as JSON and read it back, and in all processes.
    """
    plain = {str(key): value for key, value in config.items() if not str(key).startswith("__")}
    try:
        written = json.loads(json.dumps(plain, cls=_Encoder))
        data = json.dumps(written, sort_keys=True).encode()
    except Exception:
        data = repr(sorted(plain)).encode()
    return hashlib.sha1(data).hexdigest()


def commit_stores(storage: Any) -> list[CommitStore]:
    """The store of the trial's leader, then those of all followers that have ever outlived their leader."""
    from fluidtune.elastic import CommitStore

    files, own = _StorageFiles(storage), commit_path(storage)
    paths = (own, *files.folders(own))
    return [CommitStore(path, files=files, pickling=cloudpickle, moved=MOVED_NAMES) for path in paths]


def follower_commit_store(storage: Any, worker: str) -> CommitStore:
    """Where a follower commits in place of a leader that died."""
    from fluidtune.elastic import CommitStore

    folder = os.path.join(commit_path(storage), f"heir-{worker}")
    return CommitStore(folder, files=_StorageFiles(storage), pickling=cloudpickle)
