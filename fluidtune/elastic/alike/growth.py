"""Whether a trial may have several workers, as far as its leader has found out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fluidtune.group_facts import Reform

from ..transport.base import CollectiveBackend

#: Differences at boundaries before a trial goes on with one worker. The first may come from what the loop does once;
#: after it all are equal again.
MOST_DIFFERENCES = 2
#: Boundaries in a row at which a growth is put off for the same loop before it is given up: a loop that may keep an
#: iterator shows within two turns whether it does; meanwhile its new worker holds a device and does nothing.
MOST_BOUNDARIES = 3


@dataclass
class Growth:
    """What the leader of a trial knows of its growth; the fields without underscore are of `GroupFacts`."""

    ungrowable: str | None = None
    refused: float | None = None
    difference: str | None = None
    differences: int = 0
    #: The generation that was asked for last, and the boundaries at which the loop itself has put it off.
    _asked: float = -1
    _put_off: int = 0

    def note_difference(self, what: str) -> None:
        """The workers differed at a boundary, and are equal again; after `MOST_DIFFERENCES` the trial must have one."""
        self.difference = what
        self.differences += 1
        if self.differences >= MOST_DIFFERENCES:
            self.end(f"its workers drift apart: {what}")

    def end(self, why: str) -> None:
        """From now on the trial must have one worker."""
        self.ungrowable = self.ungrowable or why

    def refuse(self, reform: Reform, group: CollectiveBackend) -> None:
        """Leader: it goes on without the others. Those of them that wait for its call end by themselves."""
        self.refused = reform.generation
        group.call_generation(reform.generation, reform.members[:1])

    def answer(
        self,
        reform: Reform,
        members: tuple[str, ...],
        obstacle: Callable[[bool], str | None],
        group: CollectiveBackend,
    ) -> Literal["yes", "not now", "no"]:
        """Leader, at a boundary: whether ``reform`` can be done. After "no" its joiners end by themselves.

        ``obstacle``: why the trial cannot be grown; with True, why it never can be.
        """
        joiners = [rank for rank, worker in enumerate(reform.members) if worker not in members]
        if joiners:
            lasting = self.ungrowable or obstacle(True)
            passing = None if lasting else obstacle(False)
            if passing is not None:
                self._put_off = self._put_off + 1 if reform.generation == self._asked else 1
                self._asked = reform.generation
                if self._put_off <= MOST_BOUNDARIES:
                    return "not now"
                lasting = f"{passing}, at {self._put_off} boundaries in a row"
            if lasting:
                self.end(lasting)
                self.refuse(reform, group)
                return "no"
        return "yes" if group.joiners_announced(reform.generation, joiners) else "not now"
