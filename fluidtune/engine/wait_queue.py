"""The waiting queue: which trial is next.

The order is: trials that lost their worker or were told to suspend; trials of a group that was passed over too often,
so that no group starves; trials of synchronous groups by *path*, the seconds to the end of all that follows their
group, longest first; trials of asynchronous groups by arrival. This module decides the order only. Whether a device is
there for the next trial is decided by `placing`. The waiting trials of one group that need the same lie in one *line*:
if the first of a line cannot start, neither can the others, and `placing` need not look at them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from fluidtune.engine.trial import Group, Trial


@dataclass(eq=False)
class Line:
    """Waiting trials of one group that need the same, in order."""

    #: These trials ran before and lost their place by no fault of their own, so that they go first.
    first: bool
    group: Group
    #: Whole devices of one node that each trial needs; 1 for a trial that is not a gang.
    gang: int
    #: (order, number, name), ascending. ``order`` is -path in a synchronous group and 0 otherwise.
    entries: list[tuple[float, int, str]] = field(default_factory=list)

    @property
    def next_trial(self) -> str:
        """Name of the trial that starts first."""
        return self.entries[0][2]


class WaitQueue:
    """All waiting trials, in lines."""

    def __init__(self) -> None:
        #: By (first, group, gang, share asked for). No line is empty.
        self._lines: dict[tuple[bool, str, int, float], Line] = {}
        #: The key of each waiting trial's line, and the trial's entry there.
        self._where: dict[str, tuple[tuple[bool, str, int, float], tuple[float, int, str]]] = {}

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, trial: str) -> bool:
        return trial in self._where

    def put(self, trial: Trial, path: float) -> None:
        """Adds ``trial``. ``path``, seconds, orders it if its group is synchronous and it is not ``first``."""
        group = trial.group
        key = (trial.first, group.name, trial.gang, trial.asked_share)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(trial.first, group, trial.gang)
        order = -path if group.synchronous and not trial.first else 0.0
        entry = (order, trial.number, trial.name)
        insort(line.entries, entry)
        self._where[trial.name] = (key, entry)

    def remove(self, trial: str) -> None:
        """Takes ``trial`` out, which must be in the queue."""
        key, entry = self._where.pop(trial)
        line = self._lines[key]
        del line.entries[bisect_left(line.entries, entry)]
        if not line.entries:
            del self._lines[key]

    def lines(self) -> Iterator[Line]:
        """All lines, in no order."""
        return iter(self._lines.values())

    def next_line(self, stuck: list[Line], patience: int) -> Line | None:
        """The line whose first trial is next, other than those in ``stuck``; None if there is none.

        A group that was passed over ``patience`` times comes before the other groups.
        """
        best: Line | None = None
        best_rank: tuple[int, float, int] | None = None
        for line in self._lines.values():
            if line in stuck:
                continue
            order, number, _ = line.entries[0]
            if line.first:
                rank = (0, 0.0, number)
            elif line.group.passed >= patience:
                rank = (1, -line.group.passed, number)
            else:
                rank = (2 if line.group.synchronous else 3, order, number)
            if best_rank is None or rank < best_rank:
                best, best_rank = line, rank
        return best

    def in_order(self) -> list[str]:
        """All waiting trials, next first, but for groups that were passed over. Sorts: not for every event."""
        keyed = []
        for line in self._lines.values():
            for order, number, name in line.entries:
                rank = 0 if line.first else 1 if line.group.synchronous else 2
                keyed.append((rank, order, number, name))
        return [name for *_, name in sorted(keyed)]

    def count_start(self, started: Group) -> None:
        """A trial of ``started`` got devices, so that every other group in the queue was passed over once."""
        for group in {line.group.name: line.group for line in self._lines.values()}.values():
            group.passed += 1
        started.passed = 0

    def validate(self) -> None:
        """Asserts what the comments of the attributes say."""
        seen = 0
        for key, line in self._lines.items():
            assert line.entries and line.entries == sorted(line.entries), key
            seen += len(line.entries)
            for entry in line.entries:
                assert self._where[entry[2]] == (key, entry)
        assert seen == len(self._where)
