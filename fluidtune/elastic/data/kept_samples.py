"""Finds a loop that trains on samples of an earlier turn again, as on hard examples or a buffer of a replay.

Divided, each worker would keep those of its parts. No check of a growth sees that before they are used, which may be
many turns later, and then the leader has only what it kept of its own part. So it is looked for in a trial with one
worker, too, and the trial is not grown.

A loop keeps samples if it has not let go of a turn's batches when the first step of the next turn is taken. Those that
were fetched for the last steps do not count: its variables hold them. Only batches that torch's own `default_collate`
makes are known to be the loop's alone: other functions may hand out tensors that the dataset keeps. Of a batch the
first tensor is looked at, as metrics keep targets. What the loop copies is not seen.
"""

from __future__ import annotations

from collections import deque
from typing import Any
from weakref import ref

import torch

from .batches import tensors_in

#: Steps whose batches a loop's variables hold: one that fetches ahead holds those of the last two.
_STEPS = 2
#: Batches of a turn, after which those that the loop has let go of are forgotten: a bound of memory.
_MANY = 1024

KEEPS = (
    "the loop still has samples of the turn before when it trains in the next, as with hard examples or a replay: "
    "several workers would each have those of their parts"
)


class KeptSamples:
    """The batches that the loop learns from, by turn. ``keeps``: it keeps samples for a later one."""

    def __init__(self) -> None:
        self.keeps = False
        #: Of this turn: by step the last ones, and those before them.
        self._last: deque[list[ref[torch.Tensor]]] = deque()
        self._now: list[ref[torch.Tensor]] = []
        self._limit = _MANY
        self._stepped = True
        #: Of turns before, those that the loop still had at the boundary; empty after a step.
        self._before: list[ref[torch.Tensor]] = []
        #: At a step, the loop had let go of all these.
        self._lets_go = False

    def note(self, batch: Any) -> None:
        """The loop gets this batch to learn from."""
        if self._stepped or len(self._last[-1]) >= _MANY:
            self._stepped = False
            self._last.append([])
            if len(self._last) > _STEPS:
                self._now += self._last.popleft()
        tensor = next(tensors_in(batch), None)
        if tensor is not None:
            self._last[-1].append(ref(tensor))
        if len(self._now) > self._limit:
            self._now = _alive(self._now)
            self._limit = max(_MANY, 2 * len(self._now))

    def next_turn(self) -> None:
        """A boundary."""
        self._before = _alive(self._before + self._now)
        self._now, self._limit, self._stepped = [], _MANY, True
        self._last.clear()

    def stepped(self) -> None:
        """An optimizer has stepped. By now a loop has let go of the last turn's batches, if it means to."""
        self._stepped = True
        if self._before:
            kept = bool(_alive(self._before))
            self.keeps, self._lets_go, self._before = self.keeps or kept, not kept, []

    def obstacle(self, lasting: bool) -> str | None:
        """At a boundary, why the trial must have one worker; not ``lasting``: for now, as it is not known so far."""
        if self.keeps:
            return KEEPS
        unknown = not lasting and self._before and not self._lets_go
        return KEEPS.replace("still has", "may still have") if unknown else None


def _alive(refs: list[ref[torch.Tensor]]) -> list[ref[torch.Tensor]]:
    return [each for each in refs if each() is not None]
