"""Where a trial's commits are: in its own directory of Tune's storage, which may be a local path, S3 or other.

A storage may be out of reach for a moment. Before a trial goes on it is asked again a few times; what it then still
raises is a `StorageAway`, so that a commit that cannot be read and one that makes no sense are told apart.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from pyarrow.fs import FileSelector
from ray import cloudpickle
from ray.tune.utils.serialization import TuneFunctionEncoder

from fluidtune.error_lines import failure
from fluidtune.ray_compat.whole_files import is_here, write_whole

if TYPE_CHECKING:
    from fluidtune.elastic import Commit, CommitStore

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds to wait before the storage is asked for the same again. Judgement: a file server that starts again, or an
#: object store that has too much to do, answers within some seconds; a trial with devices does not wait much longer.
PAUSES_S = (0.5, 2.0, 5.0)


class StorageAway(Exception):
    """Tune's storage does not do what a trial needs before it goes on."""


def insist(call: Callable[[], T], pauses_s: Iterable[float] = PAUSES_S) -> T:
    """Return what ``call`` gets of the storage; after an error it is called again, after each of ``pauses_s`` seconds.

    Raises:
        FileNotFoundError: the storage says that there is no such file or folder.
        StorageAway: it raised something else each time.
    """
    pauses = iter(pauses_s)
    while True:
        try:
            return call()
        except FileNotFoundError:
            raise
        except Exception as error:  # the filesystems of fsspec raise errors of their own kinds
            pause = next(pauses, None)
            if pause is None:
                raise StorageAway(f"the run's storage fails again and again: {failure(error)}") from error
            time.sleep(pause)


class _StorageFiles:
    """The files of Tune's storage; see `fluidtune.elastic.Files`.

    It insists where a trial would else go on from the wrong state. A commit that is not written is none of these: the
    next one is tried.
    """

    def __init__(self, storage: Any):
        self._fs = storage.storage_filesystem
        self._own = f".{secrets.token_hex(4)}"

    def write_bytes(self, path: str, data: bytes) -> None:
        if data:
            self._write(path, data)
        else:  # a commit is discarded, so that nobody goes on from it
            insist(lambda: self._write(path, data))

    def _write(self, path: str, data: bytes) -> None:
        folder = os.path.dirname(path)
        self._fs.create_dir(folder)
        for each in self._fs.get_file_info(FileSelector(folder)) if is_here(self._fs) else ():
            if each.path.endswith((".partial", ".tmp")) and self._own not in each.path:
                self._fs.delete_file(each.path)  # of a process that was killed, or given up: it must not come late
        write_whole(data, self._fs, path, self._own)

    def read_bytes(self, path: str) -> bytes:
        def read() -> bytes:
            with self._fs.open_input_stream(path) as stream:
                return stream.readall()

        return insist(read)


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


def leader_commit_store(storage: Any) -> CommitStore:
    """Where a trial commits."""
    from fluidtune.elastic import CommitStore

    return CommitStore(commit_path(storage), files=_StorageFiles(storage), pickling=cloudpickle)


def kept_commit(storage: Any, needed: bool = True) -> Commit | None:
    """The newest commit of the trial, if it has one that it may go on from; else None.

    One that cannot be unpickled, because the script has no such class any more, is passed over. ``needed``: False: so
    is one that may be in a storage which is away, as Tune has seen no iteration of the trial.

    Raises:
        StorageAway: it is not known which commits there are, and one is needed.
    """
    try:
        return leader_commit_store(storage).load()
    except MemoryError:
        raise
    except Exception as error:
        if isinstance(error, StorageAway):
            if needed:
                raise
            log.warning("%s begins without a commit, should it have one: %s", storage.trial_fs_path, failure(error))
            return None
        log.warning("the commit in %s cannot be read, and is passed over: %s", commit_path(storage), failure(error))
        return None
