"""Commits: states of a trial that can be returned to, and the store that keeps the last two.

A commit of iteration k says that k turns are done and that what they reported was reported before. The store
decides when one is worth its price (at most 2 % of the time) and which of the two it has is whole.
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

log = logging.getLogger(__name__)

_MAGIC = b"FLUIDCM1"
_HEAD = struct.Struct("<8sQQ32s")  # magic, sequence number, length, SHA-256 of sequence number and payload
_NAMES = ("commit-0", "commit-1")

#: The share of a trial's time that its commits may cost. Judgement: less than the noise of iteration times, and a
#: commit that takes a second still comes about once a minute.
BUDGET = 0.02


@dataclass(frozen=True)
class Commit:
    """A state that can be returned to.

    ``loop``: which call of `epochs` in the user's function (0 the first). ``epoch``: the one that runs next.
    ``iteration``: turns done. ``state``: `TrialState.capture`, tensors on the CPU. ``note``: the host's own.
    """

    trial: str
    fingerprint: str
    loop: int
    epoch: int
    iteration: int
    state: dict[str, Any]
    note: Any = None


class Files(Protocol):
    """Where commits are kept. Paths are "folder/name"."""

    def write_bytes(self, path: str, data: bytes) -> None:
        """Make this the file's content; if it cannot be atomic, a torn file is found out on loading."""

    def read_bytes(self, path: str) -> bytes:
        """The file's content. FileNotFoundError if there is none."""
        ...


class LocalFiles:
    """A folder of this machine. A write is whole or not there, also after a crash of the machine."""

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
    """The last two commits of a trial, in ``folder``; written from a thread of its own, one at a time.

    One process at a time uses a folder.

    Args:
        folder: where the commits are, in ``files``.
        files: None: folders of this machine.
        budget: the share of the time that committing may cost.
        moved: for commits that an older FluidTune has written: (module, name) of what they contain, as that version
            named it, to its (module, name) now.
        clock: seconds.
    """

    def __init__(
        self,
        folder: str,
        *,
        files: Files | None = None,
        budget: float = BUDGET,
        moved: Mapping[tuple[str, str], tuple[str, str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = [f"{folder.rstrip('/')}/{name}" for name in _NAMES]
        self._files = LocalFiles() if files is None else files
        self._budget = budget
        self._moved = moved or {}
        self._clock = clock
        self._next: int | None = None  # sequence number of the next one; its parity says which file
        self._writer: threading.Thread | None = None
        #: Seconds that the last ones took, snapshot and writing. The first tells little: it imports and creates.
        self._costs: deque[float] = deque([0.0], maxlen=3)
        self._last: float | None = None
        self._error: Exception | None = None

    def offer(self, make: Callable[[], Commit], *, force: bool = False) -> bool:
        """Commit what ``make`` returns, if it is worth it; False if not. ``force``: whatever it costs.

        ``make`` is called at once, in this thread; writing goes on behind. Not worth it: one is still being
        written, or one usually costs more than ``budget`` of the time since the last. (One that was slow, because the
        machine or the disk was busy, does not put off those after it.)
        """
        if not force and not self._worth_it():
            return False
        self._join()
        started = self._clock()
        commit = make()
        self._last = started
        if self._next is None:
            self._next = 1 + max((sequence for sequence, _ in self._whole()), default=-1)
        self._writer = threading.Thread(
            target=self._write, args=(self._next, commit, started), name="commit", daemon=True
        )
        self._next += 1
        self._writer.start()
        return True

    def flush(self) -> bool:
        """Wait until the last commit is written. False if it could not be: then the one before it stands."""
        self._join()
        return self._error is None

    def load(self) -> Commit | None:
        """The newest whole commit, or None. One that is cut off or altered is passed over for the one
        before it.
        """
        self._join()
        for _, payload in sorted(self._whole(), reverse=True):
            import torch  # here, for processes that commit nothing

            unpickling = _pickle_with(self._moved)
            return Commit(
                **torch.load(io.BytesIO(payload), map_location="cpu", pickle_module=unpickling, weights_only=False)
            )
        return None

    def _worth_it(self) -> bool:
        if self._writer is not None and self._writer.is_alive():
            return False
        if self._last is None:
            return True
        usual = sorted(self._costs)[(len(self._costs) - 1) // 2]  # the middle one
        return usual <= self._budget * (self._clock() - self._last)

    def _join(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _write(self, sequence: int, commit: Commit, started: float) -> None:
        import torch

        try:
            fields = {name: getattr(commit, name) for name in Commit.__dataclass_fields__}
            buffer = io.BytesIO()
            torch.save(fields, buffer)
            payload = buffer.getvalue()
            head = _HEAD.pack(_MAGIC, sequence, len(payload), _digest(sequence, payload))
            self._files.write_bytes(self._paths[sequence % 2], head + payload)
            self._error = None
        except Exception as error:
            # The trial goes on: it only has an older state to return to. The next commit tries again.
            log.warning("trial %s: commit of iteration %d failed: %s", commit.trial, commit.iteration, error)
            self._error = error
        self._costs.append(self._clock() - started)

    def _whole(self) -> list[tuple[int, bytes]]:
        """(sequence number, payload) of the files that are whole."""
        found = []
        for path in self._paths:
            try:
                data = self._files.read_bytes(path)
            except FileNotFoundError:
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
