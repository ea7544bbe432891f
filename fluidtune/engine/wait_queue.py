"""The waiting queue: which trial is next.

The order is: trials that lost their worker or were told to suspend; trials of a group that was passed over too often,
so that no group starves; trials of synchronous groups by *path*, the seconds to the end of all that follows their
group, longest first; trials of populations in *turn*; trials of asynchronous groups by arrival. This module decides
the order only. Whether a device is there for the next trial is decided by `placing`. The waiting trials of one group
that need the same lie in one *line*: if the first of a line cannot start, neither can the others, and `placing` need
not look at them.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from fluidtune.engine.reasons import Reason
from fluidtune.engine.trial import Group, Trial


def _place(trial: Trial) -> tuple[float, int]:
    return trial.order, trial.number


@dataclass(eq=False)
class Line:
    """Waiting trials of one group that need the same, in order."""

    #: What its trials have in common: whether they go first, and in turn, their group, gang and share of a device.
    key: tuple[bool, bool, str, int, float]
    #: These trials ran before and lost their place by no fault of their own, so that they go first.
    first: bool
    #: Its trials are ordered by their turns.
    in_turn: bool
    group: Group
    #: Whole devices of one node that each trial needs; 1 for a trial that is not a gang.
    gang: int
    #: No other line of the queue has or had this number.
    number: int
    #: By order, and by number where the order is the same.
    trials: list[Trial] = field(default_factory=list)
    #: Why its trials wait, as `placing.new_waits` said last, and those that have come since.
    said: tuple[Reason, dict[str, float]] | None = None
    unsaid: dict[str, None] = field(default_factory=dict)

    @property
    def by_path(self) -> bool:
        """Its trials are ordered by path."""
        return self.group.synchronous and not self.first and not self.in_turn


def _rank(line: Line, trial: Trial, patience: float = math.inf) -> tuple[float, ...]:
    """The lowest is next. ``patience``: as in `WaitQueue.next_line`."""
    if line.first:
        return 0, *_place(trial)
    if line.group.passed >= patience:
        return 1, -line.group.passed, trial.number
    return 2 if line.by_path else 3 if line.in_turn else 4, *_place(trial)


def may_start(lines: Iterable[Line]) -> Iterator[tuple[Line, int]]:
    """Each of the lines, and how many of its trials their group's concurrency lets start."""
    left: dict[str, int] = {}
    for line in lines:
        count = max(0, min(len(line.trials), left.setdefault(line.group.name, line.group.places)))
        left[line.group.name] -= count
        yield line, count


class WaitQueue:
    """All waiting trials, in lines."""

    def __init__(self) -> None:
        #: By key. No line is empty.
        self._lines: dict[tuple[bool, bool, str, int, float], Line] = {}
        #: The line of each waiting trial.
        self._where: dict[str, Line] = {}
        #: The number of the newest line.
        self._newest = 0

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, trial: str) -> bool:
        return trial in self._where

    def put(self, trial: Trial, path: float) -> None:
        """Adds ``trial``. ``path``, seconds, orders it if `Line.by_path`."""
        group, turn = trial.group, None if trial.first else trial.turn
        key = (trial.first, turn is not None, group.name, trial.gang, trial.asked_share)
        line = self._lines.get(key)
        if line is None:
            self._newest += 1
            line = self._lines[key] = Line(key, trial.first, turn is not None, group, trial.gang, self._newest)
        trial.order = turn if turn is not None else -path if line.by_path else 0.0
        insort(line.trials, trial, key=_place)
        self._where[trial.name], line.unsaid[trial.name] = line, None

    def remove(self, trial: Trial) -> None:
        """Takes ``trial`` out, which must be in the queue."""
        line = self._where.pop(trial.name)
        line.unsaid.pop(trial.name, None)
        del line.trials[bisect_left(line.trials, _place(trial), key=_place)]
        if not line.trials:
            del self._lines[line.key]

    def reorder(self, line: Line, paths: Iterable[float]) -> None:
        """All trials of ``line`` get new places. ``paths``: of ``line.trials``, seconds.

        Does nothing where the order is not by path. It costs much less than to put each trial anew.
        """
        if not line.by_path:
            return
        for trial, path in zip(line.trials, paths, strict=True):
            trial.order = -path
        # Twice by one number, which is quicker than once by two.
        line.trials.sort(key=attrgetter("number"))
        line.trials.sort(key=attrgetter("order"))

    def lines(self) -> Iterator[Line]:
        """All lines, in no order."""
        return iter(self._lines.values())

    def next_line(self, stuck: list[Line], patience: int) -> Line | None:
        """The line whose first trial is next, other than those in ``stuck``; None if there is none.

        A group that was passed over ``patience`` times comes before the other groups.
        """
        lines = (line for line in self._lines.values() if line not in stuck)
        return min(lines, key=lambda line: _rank(line, line.trials[0], patience), default=None)

    def in_order(self) -> list[str]:
        """All waiting trials, next first, but for groups that were passed over. Sorts: not for every event."""
        ranks = [(_rank(line, each), each.name) for line in self._lines.values() for each in line.trials]
        return [name for _, name in sorted(ranks)]

    def count_start(self, started: Group) -> None:
        """A trial of ``started`` got devices, so that every other group in the queue was passed over once."""
        for group in {line.group.name: line.group for line in self._lines.values()}.values():
            group.passed += 1
        started.passed = 0
