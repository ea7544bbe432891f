"""The variables that a loop carries from one epoch to the next by itself, without `elastic.prepare` or `elastic.state`.

What such a variable does may show much later: a scheduler's next step, the end of a patience. So a commit has a mark of
each, and an epoch that is run again must end with the same marks (`proof`). They also name what a loop should prepare.

A variable is looked at if an epoch may read it before the epoch writes it, as the bytecode of the loop's body says; of
a class trainable, if it is a public attribute. It counts if it is plain (numbers, text, tensors, collections of them),
a random generator, or has a ``state_dict``, and if it has changed since the loop began. Of an object of one of the
script's own classes the attributes are looked at. What is read off a clock is left out, or is named like it.
"""

from __future__ import annotations

import dis
import enum
import hashlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

import numpy
import torch

from ..data.plain_state import Drawing
from .commit_store import Marks
from .proof import is_measured

_LOADS = ("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF")
_STORES = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")
#: A variable with more entries, or more bytes, is data and no state. Judgement.
_MOST_ENTRIES, _MOST_BYTES = 2**17, 2**26


class Carried:
    """Marks the variables of one loop. ``look``: returns those that are looked at, and the name of the script."""

    def __init__(self, look: Callable[[], tuple[dict[str, Any], str]]) -> None:
        self._look = look
        #: When the loop began, by the clocks whose readings a loop may keep.
        self._clocks = [(clock, clock()) for clock in (time.time, time.perf_counter)]
        self._begun: dict[str, tuple[str, str]] = {}

    @classmethod
    def by_loop(cls, code: CodeType) -> Carried:
        """Of the function that has called `epochs`. It is used while the loop waits for its next epoch."""

        def look() -> tuple[dict[str, Any], str]:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_code is not code:
                frame = frame.f_back
            if frame is None:
                return {}, ""
            there = {**frame.f_globals, **frame.f_locals}
            found = {name: there[name] for name in read_first(code, frame.f_lasti) if name in there}
            return found, frame.f_globals.get("__name__", "")

        return cls(look)

    @classmethod
    def by_object(cls, owner: Any) -> Carried:
        """Of a class trainable. What begins with an underscore is Tune's."""
        own, home = vars(owner), type(owner).__module__
        return cls(lambda: ({f"self.{key}": each for key, each in own.items() if not key.startswith("_")}, home))

    def begin(self, prepared: Iterable[Any]) -> None:
        """The loop begins. ``prepared``: objects of which the commit takes care."""
        self._begun = self._marks(prepared)

    def marks(self, prepared: Iterable[Any]) -> Marks:
        """The marks now."""
        now = self._marks(prepared)
        changed = {name for name in now.keys() | self._begun.keys() if now.get(name) != self._begun.get(name)}
        return Marks(now, frozenset(changed))

    def _marks(self, prepared: Iterable[Any]) -> dict[str, tuple[str, str]]:
        known = {id(obj) for obj in prepared}
        values, home = self._look()
        found = {}
        for name, value in values.items():
            own = type(value).__module__ == home and not isinstance(value, type | enum.Enum)
            if own and id(value) not in known and not hasattr(value, "state_dict"):
                parts = {f"{name}.{key}": part for key, part in getattr(value, "__dict__", {}).items()}
            else:
                parts = {name: value}
            for full, part in parts.items():
                if id(part) in known or is_measured(full) or self._is_reading(part):
                    continue
                if (mark := _mark(part)) is not None:
                    found[full] = mark
        return found

    def _is_reading(self, value: Any) -> bool:
        """Whether the loop has read it off a clock. (A clock from the start of the machine, as ``perf_counter``.)"""
        return isinstance(value, float) and any(begun <= value <= clock() for clock, begun in self._clocks)


def read_first(code: CodeType, at: int) -> list[str]:
    """The variables that the body of a loop may read before it has written them. ``at``: its FOR_ITER in the code.

    Each inner loop counts as run, each other branch as not.
    """
    instructions = list(dis.get_instructions(code))
    # What runs now is the FOR_ITER, or its cache behind it.
    before = [number for number, each in enumerate(instructions) if each.offset <= at]
    start = before[-1] if before else 0
    if instructions[start].opname != "FOR_ITER":
        return []
    end = instructions[start].argval
    read: dict[str, None] = {}
    written: list[tuple[str, frozenset[int]]] = []  # with the ends of the branches that it is in
    branches: frozenset[int] = frozenset()
    for each in instructions[start + 1 :]:
        if each.offset >= end:
            break
        branches = frozenset(stop for stop in branches if stop > each.offset)
        # Python 3.13 has instructions for two variables at a time.
        names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
        if each.opname.startswith(_LOADS):
            for name in names:
                if not any(name == other and inside <= branches for other, inside in written):
                    read[name] = None
        if each.opname.startswith(_STORES) or each.opname == "LOAD_FAST_STORE_FAST":
            written += [(name, branches) for name in names]
        elif each.opcode in (*dis.hasjrel, *dis.hasjabs) and each.opname != "FOR_ITER" and each.argval > each.offset:
            branches |= {each.argval}
    return list(read)


class _Unmarked(Exception):
    """A value has no mark."""


def _mark(value: Any) -> tuple[str, str] | None:
    digests = _Digests()
    try:
        digests.take(value, top=True)
    except Exception:  # also of an object of the user's
        return None
    return digests.full.hexdigest(), digests.rough.hexdigest()


class _Digests:
    """``full``: of a value; ``rough``: of it without its numbers with fractions, which rounding changes."""

    def __init__(self) -> None:
        self.full, self.rough = hashlib.sha1(), hashlib.sha1()
        self._entries = self._bytes = 0

    def _say(self, said: bytes, exactly: bool = True) -> None:
        self._entries, self._bytes = self._entries + 1, self._bytes + len(said)
        if self._entries > _MOST_ENTRIES or self._bytes > _MOST_BYTES:
            raise _Unmarked
        self.full.update(b"/%d/" % len(said) + said)
        if exactly:
            self.rough.update(b"/%d/" % len(said) + said)

    def take(self, value: Any, top: bool = False) -> None:
        if isinstance(value, torch.Tensor):
            if value.numel() * value.element_size() > _MOST_BYTES:
                raise _Unmarked
            value = value.detach().cpu()
            value = value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
        if isinstance(value, numpy.generic | numpy.ndarray):
            if value.dtype.hasobject:
                raise _Unmarked
            self._say(f"{value.dtype} {value.shape}".encode())
            self._say(value.tobytes(), exactly=value.dtype.kind not in "fc")
        elif isinstance(value, float | complex):
            self._say(repr(value).encode(), exactly=False)
        elif value is None or isinstance(value, bool | int | str | bytes | enum.Enum):
            self._say(repr(value).encode())
        elif isinstance(value, dict):
            self._say(b"dict %d" % len(value))
            for key, part in value.items():
                self._say(repr(key).encode())
                self.take(part)
        elif isinstance(value, list | tuple | deque):
            self._say(b"list %d" % len(value))
            for part in value:
                self.take(part)
        elif isinstance(value, set | frozenset):
            self._say(" ".join(sorted(map(repr, value))).encode())
        elif Drawing.fits(value):
            self.take(Drawing(value).state_dict())
        elif not isinstance(value, type) and callable(getattr(value, "state_dict", None)):
            self.take(value.state_dict())
        elif top:
            raise _Unmarked
        else:
            self._say(type(value).__qualname__.encode())
