"""Commits: states to which a trial can return, and the store that keeps the last two of them.

A commit of iteration k is the state after k iterations whose results were reported before. The store decides whether a
commit is worth its price (`BUDGET`), and which of the two that it keeps are whole.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import pickle
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from fluidtune.error_lines import failure

from ..random_streams import Streams

log = logging.getLogger(__name__)

_MAGIC = b"FLUIDCM1"
_HEAD = struct.Struct("<8sQQ32s")  # magic, sequence number, length, SHA-256 of sequence number and payload
_NAMES = ("commit-0", "commit-1")

#: The share of a trial's time that its commits may cost: a commit that takes a second comes about once a minute.
BUDGET = 0.02


@dataclass(frozen=True)
class Commit:
    """A state to which a trial can return.

    ``trial``, ``fingerprint``: see `ElasticSession`. ``loop``, ``epoch``, ``iteration``: see `TrialPosition`.
    ``state``: what `CommittableState.capture` returned, with tensors on the CPU. ``note``: what the host keeps with it.
    ``streams``: the random streams with which the trial's code began (`random_streams`); None in a
    commit that was written before 2026-11-23.
    """

    trial: str
    fingerprint: str
    loop: int
    epoch: int
    iteration: int
    state: dict[str, Any]
    note: Any = None
    streams: Streams | None = None


class Files(Protocol):
    """Where commits are kept. A path is "folder/name"."""

    def write_bytes(self, path: str, data: bytes) -> None:
        """Make this the file's content. It need not be atomic: a store detects a torn file when it loads it."""

    def read_bytes(self, path: str) -> bytes:
        """The file's content. FileNotFoundError if there is none."""
        ...


class LocalFiles:
    """Folders of this machine. A write is complete or did not happen, even after a crash of the machine."""

    def write_bytes(self, path: str, data: bytes) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        new = f"{path}.tmp"
        with open(new, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)

    def read_bytes(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()


class CommitStore:
    """The last two commits of a trial, in ``folder``; a thread writes one at a time. One process uses a folder.

    Args:
        folder: where the commits are, in ``files``.
        files: the storage; by default this machine's file system.
        budget: the share of the time that committing may cost.
        pickling: a module like `pickle`, which writes what is no tensor. `pickle` reads it.
        moved: (module, name) of a class in the FluidTune that wrote a commit -> (module, name) of this class now.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        folder: str,
        *,
        files: Files | None = None,
        budget: float = BUDGET,
        pickling: ModuleType = pickle,
        moved: Mapping[tuple[str, str], tuple[str, str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = [f"{folder.rstrip('/')}/{name}" for name in _NAMES]
        self._files = LocalFiles() if files is None else files
        self._budget = budget
        self._pickling = pickling
        self._moved = moved or {}
        self._clock = clock
        #: Sequence number of the next commit; its parity selects the file. None: not known so far.
        self._next: int | None = None
        self._writer: threading.Thread | None = None
        #: Seconds that each of the last commits took, snapshot and writing. The initial 0 keeps the first commit, which
        #: also imports modules and creates folders, from counting alone.
        self._costs: deque[float] = deque([0.0], maxlen=3)
        #: When the last commit began.
        self._last: float | None = None
        #: Why there is no last commit.
        self._error: Exception | None = None

    def offer(self, make: Callable[[], Commit], *, force: bool = False) -> bool:
        """Commit what ``make`` returns, if that is worth its price; False if not, or if ``make`` fails.

        ``force``: at any price.

        ``make`` is called at once, in this thread; a thread of the store writes. It is not worth it while a commit is
        being written, or while the usual cost is more than ``budget`` of the time since the last commit. The usual cost
        is the median of the last three, so that one slow commit does not delay later ones.
        """
        if not force and not self._worth_it():
            return False
        self._join()
        started = self._clock()
        self._last = started
        try:
            commit = make()
        except Exception as error:  # of an object of the user's that says what it consists of
            self._failed("no commit can be made", error)
            self._costs.append(self._clock() - started)
            return False
        self._writer = threading.Thread(target=self._write, args=(commit, started), name="commit", daemon=True)
        self._writer.start()
        return True

    def flush(self) -> bool:
        """Wait until the last commit is written. False if that failed: then the one before it is the newest."""
        self._join()
        return self._error is None

    @property
    def trouble(self) -> str | None:
        """Why the last commit could not be made or written, in a line; None: it could."""
        return None if self._error is None else failure(self._error)

    def load(self) -> Commit | None:
        """The newest whole commit. A file that is cut off or altered is ignored."""
        self._join()
        for _, payload in sorted(self._whole(), reverse=True):
            import torch  # here, because processes that commit nothing need no torch

            unpickling = _pickle_with(self._moved)
            return Commit(
                **torch.load(io.BytesIO(payload), map_location="cpu", pickle_module=unpickling, weights_only=False)
            )
        return None

    def discard(self) -> None:
        """Leave no commit in the store. Raises what the storage raises."""
        self._join()
        for path in self._paths:
            self._files.write_bytes(path, b"")

    def _worth_it(self) -> bool:
        if self._writer is not None and self._writer.is_alive():
            return False
        if self._last is None:
            return True
        usual = sorted(self._costs)[(len(self._costs) - 1) // 2]  # the median
        return usual <= self._budget * (self._clock() - self._last)

    def _join(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _write(self, commit: Commit, started: float) -> None:
        import torch

        try:
            if self._next is None:  # read here: the storage may be slow, or fail
                self._next = 1 + max((sequence for sequence, _ in self._whole()), default=-1)
            sequence = self._next
            fields = {name: getattr(commit, name) for name in Commit.__dataclass_fields__}
            buffer = io.BytesIO()
            torch.save(fields, buffer, pickle_module=self._pickling)
            payload = buffer.getvalue()
            head = _HEAD.pack(_MAGIC, sequence, len(payload), _digest(sequence, payload))
            self._files.write_bytes(self._paths[sequence % 2], head + payload)
            self._next += 1  # one that failed is written again to the same file: the other one is whole
            self._error = None
        except Exception as error:
            self._failed(f"trial {commit.trial}: commit of iteration {commit.iteration} failed", error)
        self._costs.append(self._clock() - started)

    def _failed(self, what: str, error: Exception) -> None:
        """The trial goes on, with an older state to return to. The next commit tries again."""
        if str(error) != str(self._error):
            log.warning("%s: %s", what, error)
        self._error = error

    def _whole(self) -> list[tuple[int, bytes]]:
        """(sequence number, payload) of the files that are whole."""
        found = []
        for path in self._paths:
            try:
                data = self._files.read_bytes(path)
            except FileNotFoundError:
                continue
            if not data:  # discarded
                continue
            if len(data) >= _HEAD.size:
                magic, sequence, length, digest = _HEAD.unpack_from(data)
                payload = data[_HEAD.size :]
                if magic == _MAGIC and length == len(payload) and digest == _digest(sequence, payload):
                    found.append((sequence, payload))
                    continue
            log.warning("commit %s is not whole (%d bytes): passed over", path, len(data))
        return found


def _pickle_with(moved: Mapping[tuple[str, str], tuple[str, str]]) -> ModuleType:
    """What `torch.load` needs of the module `pickle`. Its unpickler finds classes under their present names."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return super().find_class(*moved.get((module, name), (module, name)))

    module = ModuleType("pickle_with_moved_names")
    vars(module).update(Unpickler=Unpickler)
    return module


def _digest(sequence: int, payload: bytes) -> bytes:
    return hashlib.sha256(struct.pack("<Q", sequence) + payload).digest()
