"""Commits: states to which a trial can return, and the store that keeps three of them.

A commit of iteration k is the state after k iterations whose results were reported before. The store decides whether a
commit is worth its price (`BUDGET`), which of the files that it keeps are whole, and which may be written over: it has
the newest commit, and the newest *pair*. A pair is the commits of two boundaries that follow each other in one process.
By a pair a restarted trial proves that its commits are whole (`proof`); the store keeps the verdict beside them.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import pickle
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from fluidtune.error_lines import failure

from ..random_streams import Streams

if TYPE_CHECKING:  # processes that commit nothing need no torch
    from ..data.snapshot import Snapshot

log = logging.getLogger(__name__)

_MAGIC = b"FLUIDCM4"  # what is in a file follows it, and the SHA-256 of that: see `_sealed`
_SLOTS = ("commit-0", "commit-1", "commit-2")
_VERDICT = "verdict"

#: The share of a trial's time that its commits may cost: a commit that takes a second comes about once a minute.
BUDGET = 0.02


@dataclass(frozen=True)
class Marks:
    """By name, the marks of a loop's variables: a digest of all, and one that leaves numbers with fractions out.

    ``changed``: those that are not as they were when the loop began.
    """

    of: dict[str, tuple[str, str]] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()

    def apart(self, others: Marks, exact: bool) -> list[str]:
        """The variables that either process has changed, and that are not the same in both."""
        which = 0 if exact else 1
        nothing = ("", "")
        names = [name for name in (*others.of, *self.of) if name in self.changed | others.changed]
        found = dict.fromkeys(
            name for name in names if self.of.get(name, nothing)[which] != others.of.get(name, nothing)[which]
        )
        return list(found)


@dataclass(frozen=True)
class Commit:
    """A state to which a trial can return.

    ``trial``, ``fingerprint``: see `ElasticSession`. ``loop``: which call of `epochs` in the user's function (0: the
    first). ``epoch``: the epoch that runs next. ``iteration``: the iterations done, those before a restart included.
    ``state``: what `TrialState.capture` returned. ``marks``: of what the loop carries besides; see `carried`. ``note``:
    what the host keeps with it. ``streams``: the random streams with which the trial's code began (`random_streams`).
    ``life``: names the session that made it. ``reports``: what was reported since the boundary before, one dict of
    metrics for each report. ``machine``: what its numbers were computed by; see `proof`.
    """

    trial: str
    fingerprint: str
    loop: int
    epoch: int
    iteration: int
    state: Snapshot
    note: Any = None
    streams: Streams | None = None
    life: str = ""
    reports: list[dict[str, Any]] = field(default_factory=list)
    machine: str = ""
    marks: Marks = Marks()
    #: Not stored: the pair to try first; None: the trial may go on from this commit at once.
    pair: tuple[Commit, Commit] | None = None
    #: Not stored: the iteration up to which commits of this trial are proved.
    proved: int = 0

    @property
    def starts(self) -> Commit:
        """The commit whose state the loop takes first."""
        return self if self.pair is None else self.pair[0]


#: What a store knows of a commit without reading its state.
_MARK = ("fingerprint", "life", "loop", "epoch", "iteration")
_NOT_STORED = ("pair", "proved")


@dataclass(frozen=True)
class _Mark:
    """A commit in a file. ``sequence``: commits of a folder have rising numbers."""

    sequence: int
    fingerprint: str
    life: str
    loop: int
    epoch: int
    iteration: int

    def follows(self, other: _Mark) -> bool:
        """Whether one epoch lies between the two, which one process has run."""
        step = (other.life, other.fingerprint, other.loop, other.epoch + 1, other.iteration + 1)
        return bool(self.life) and step == (self.life, self.fingerprint, self.loop, self.epoch, self.iteration)


@dataclass(frozen=True)
class Verdict:
    """What is known of a trial's commits. It holds for one configuration.

    ``proved``: the iteration of the newest commit that was compared with an epoch run again, 0: of none. ``refused``:
    why the trial has no commits, in a line.
    """

    fingerprint: str = ""
    proved: int = 0
    refused: str | None = None


class Files(Protocol):
    """Where commits are kept. A path is "folder/name"."""

    def write_bytes(self, path: str, data: bytes) -> None:
        """Make this the file's content. It need not be atomic: a store detects a torn file when it loads it."""

    def read_bytes(self, path: str) -> bytes:
        """The file's content. FileNotFoundError if there is none."""
        ...


def is_trusted(iteration: int, proved: int) -> bool:
    """Whether a commit of ``iteration`` needs no proof, when one of ``proved`` has had one.

    What a loop keeps may matter late: a stage that begins, a patience that ends. So the proof is made again when the
    trial has twice as many iterations. Judgement: a trial of n iterations makes log2(n) proofs at most.
    """
    return iteration <= 2 * proved


class CommitStore:
    """The last commits of a trial, in ``folder``; a thread writes one at a time. One process uses a folder.

    Args:
        folder: where the commits are, in ``files``.
        files: the storage.
        budget: the share of the time that committing may cost.
        pickling: a module like `pickle`, which writes what is no tensor. `pickle` reads it.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        folder: str,
        *,
        files: Files,
        budget: float = BUDGET,
        pickling: ModuleType = pickle,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder.rstrip("/")
        self._files = files
        self._budget = budget
        self._pickling = pickling
        self._clock = clock
        #: The whole commits, by file. None: not known so far.
        self._slots: dict[str, _Mark] | None = None
        self._verdict = Verdict()
        self._writer: threading.Thread | None = None
        #: Seconds that each of the last commits took, snapshot and writing. The initial 0 keeps the first commit, which
        #: also imports modules and creates folders, from counting alone.
        self._costs: deque[float] = deque([0.0], maxlen=3)
        #: When the last commit began.
        self._last: float | None = None
        #: Why there is no last commit.
        self._error: Exception | None = None
        #: Why the trial has no commits, in a line, as soon as the store has read it.
        self.refused: str | None = None

    # -- writing --

    def offer(self, make: Callable[[], Commit], *, force: bool = False, times: int = 1) -> bool:
        """Commit what ``make`` returns, if that is worth its price; False if not, or if ``make`` fails.

        ``force``: at any price. ``times``: the commits that it will cost, as the first of a pair costs two.

        ``make`` is called at once, in this thread; a thread of the store writes. It is not worth it while a commit is
        being written, or while the usual cost is more than ``budget`` of the time since the last commit. The usual cost
        is the median of the last three, so that one slow commit does not delay later ones.
        """
        if not force and not self._worth_it(times):
            return False
        started = self._clock()
        self._last = started
        try:
            commit = make()
        except Exception as error:  # of an object of the user's that says what it consists of
            self._failed("no commit can be made", error)
            self._costs.append(self._clock() - started)
            return False
        self._writer = threading.Thread(
            target=self._write, args=(commit, started, self._writer), name="commit", daemon=True
        )
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

    def forget(self) -> None:
        """Others have changed the folder."""
        self._join()
        self._slots = None

    def discard(self) -> None:
        """Leave no commit in the store. Raises what the storage raises."""
        self._join()
        self._slots = None
        for name in _SLOTS:
            self._files.write_bytes(f"{self._folder}/{name}", b"")

    def note_proved(self, fingerprint: str, iteration: int) -> None:
        """The commits of this configuration are proved up to ``iteration``. They stay so if this cannot be written."""
        self._join()
        self._verdict = Verdict(fingerprint, iteration)
        try:
            self._files.write_bytes(f"{self._folder}/{_VERDICT}", _sealed(vars(self._verdict)))
        except Exception as error:
            log.warning("that a commit is proved cannot be written, so it will be proved again: %s", failure(error))

    def refuse(self, fingerprint: str, why: str) -> None:
        """The trial has no commits from now on. Raises what the storage raises when a commit is discarded."""
        self._join()
        self.refused, self._verdict = why, Verdict(fingerprint, refused=why)
        try:
            self._files.write_bytes(f"{self._folder}/{_VERDICT}", _sealed(vars(self._verdict)))
        except Exception as error:
            log.warning("that commits are not to be used cannot be written: %s", failure(error))
        self.discard()

    def _worth_it(self, times: int) -> bool:
        if self._writer is not None and self._writer.is_alive():
            return False
        if self._last is None:
            return True
        usual = sorted(self._costs)[(len(self._costs) - 1) // 2]  # the median
        return times * usual <= self._budget * (self._clock() - self._last)

    def _join(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _write(self, commit: Commit, started: float, before: threading.Thread | None) -> None:
        import torch

        if before is not None:
            before.join()
        try:
            if self._slots is None:  # read here: the storage may be slow, or fail
                self._slots = {name: mark for name, mark, _ in self._whole()}
                self._verdict = self._read_verdict()
            if self._verdict.fingerprint == commit.fingerprint and self._verdict.refused is not None:
                self.refused = self._verdict.refused
                return
            sequence = 1 + max((mark.sequence for mark in self._slots.values()), default=-1)
            mark = _Mark(sequence, **{name: getattr(commit, name) for name in _MARK})
            kept = {each.name: getattr(commit, each.name) for each in fields(Commit) if each.name not in _NOT_STORED}
            buffer = io.BytesIO()
            torch.save(kept, buffer, pickle_module=self._pickling, pickle_protocol=5)
            slot = self._slot_for(mark, self._slots)
            self._slots.pop(slot, None)  # a write that fails may have torn it: the next one goes there as well
            self._files.write_bytes(f"{self._folder}/{slot}", _sealed(vars(mark), buffer.getvalue()))
            self._slots[slot] = mark
            self._error = None
        except Exception as error:
            self._failed(f"trial {commit.trial}: commit of iteration {commit.iteration} failed", error)
        finally:
            self._costs.append(self._clock() - started)

    def _slot_for(self, mark: _Mark, slots: Mapping[str, _Mark]) -> str:
        """The file that this commit may be written over."""
        free = next((name for name in _SLOTS if name not in slots), None)
        if free is not None:
            return free
        oldest, *_, newest = sorted(slots, key=lambda name: slots[name].sequence)
        pair = _newest_pair(slots.values())
        if pair is None or not self._protects(pair[1]) or (slots[newest] not in pair and mark.follows(slots[newest])):
            return oldest
        return next(name for name in _SLOTS if slots[name] not in pair)

    def _protects(self, second: _Mark) -> bool:
        """Whether a pair may be needed for a proof."""
        known = self._verdict.proved if self._verdict.fingerprint == second.fingerprint else 0
        return not known or second.iteration > known

    def _failed(self, what: str, error: Exception) -> None:
        """The trial goes on, with an older state to return to. The next commit tries again."""
        if str(error) != str(self._error):
            log.warning("%s: %s", what, error)
        self._error = error

    # -- reading --

    def load(self) -> Commit | None:
        """The newest commit, with the pair that must be tried before the trial goes on from it.

        None: there is none, or none that could be proved. A file that is cut off or altered is ignored.
        """
        self._join()
        found = {mark: payload for _, mark, payload in self._whole()}
        newest = max(found, key=lambda mark: mark.sequence, default=None)
        if newest is None:
            return None
        verdict = self._read_verdict()
        if verdict.fingerprint != newest.fingerprint:
            verdict = Verdict()
        if verdict.refused is not None:
            return None
        marks = [mark for mark in found if (mark.life, mark.fingerprint) == (newest.life, newest.fingerprint)]
        pair = None if is_trusted(newest.iteration, verdict.proved) else _newest_pair(marks)
        if pair is None and not verdict.proved:
            log.info("the commit of iteration %d in %s has no pair to prove it by", newest.iteration, self._folder)
            return None
        wanted = {newest, *pair} if pair is not None and pair[1].iteration > verdict.proved else {newest}
        commits = {mark: self._unpickled(found[mark]) for mark in wanted}
        tried = (commits[pair[0]], commits[pair[1]]) if pair is not None and len(wanted) > 1 else None
        return replace(commits[newest], pair=tried, proved=verdict.proved)

    def _unpickled(self, payload: bytes) -> Commit:
        import torch  # here, because processes that commit nothing need no torch

        return Commit(**torch.load(io.BytesIO(payload), map_location="cpu", weights_only=False))

    def _whole(self) -> list[tuple[str, _Mark, bytes]]:
        """(name, mark, payload) of the files that are whole."""
        found = []
        for name in _SLOTS:
            data = self._read(name)
            if not data:  # never written, or discarded
                continue
            whole = _opened(data)
            if whole is None:
                was = data[: len(_MAGIC)]
                foreign = was != _MAGIC and re.fullmatch(rb"FLUIDCM\d", was)
                why = f"is of another version of FluidTune (format {was.decode()})" if foreign else "is not whole"
                log.warning("commit %s/%s %s (%d bytes): passed over", self._folder, name, why, len(data))
                continue
            said, _, payload = whole.partition(b"\n")
            found.append((name, _Mark(**json.loads(said)), payload))
        return found

    def _read_verdict(self) -> Verdict:
        said = _opened(self._read(_VERDICT))
        return Verdict() if said is None else Verdict(**json.loads(said))

    def _read(self, name: str) -> bytes:
        try:
            return self._files.read_bytes(f"{self._folder}/{name}")
        except FileNotFoundError:
            return b""


def _newest_pair(marks: Iterable[_Mark]) -> tuple[_Mark, _Mark] | None:
    ordered = sorted(marks, key=lambda mark: mark.sequence, reverse=True)
    found = ((first, second) for second in ordered for first in ordered if second.follows(first))
    return next(found, None)


def _sealed(said: dict[str, Any], payload: bytes = b"") -> bytes:
    """The content of a file: a line of JSON and the rest."""
    body = json.dumps(said).encode() + b"\n" + payload
    return _MAGIC + hashlib.sha256(body).digest() + body


def _opened(data: bytes) -> bytes | None:
    """What was sealed; None: the file is not whole."""
    head = len(_MAGIC) + hashlib.sha256().digest_size
    body = data[head:]
    return body if data[:head] == _MAGIC + hashlib.sha256(body).digest() else None
