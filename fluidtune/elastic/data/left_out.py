"""Detects `if len(x) < k: continue`: all workers skip a batch for its short parts that one worker would train on.

If the workers decide differently, they wait for each other in different collectives, and `lockstep` finds that. If all
parts are short, none waits, and the trial would learn from fewer batches than alone.

The loop's limit is not known. So two things are taken for such a decision: all left-out batches of a reading have
shorter parts than the used ones; or no batch of a turn was used at all. A batch of one sample is left out alone, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .batches import Reading, Share

#: Where in the loop it is: a reading has ended, the loop asks for a mean, or it has come to a boundary.
Place = Literal["reading", "mean", "boundary"]


@dataclass
class _Sizes:
    """Of one reading in this turn. ``waiting``: samples of the batches fetched since the last backward pass.

    ``used``: the smallest batch that a pass came after; 0: none did.
    """

    waiting: list[int] = field(default_factory=list)
    used: int = 0


class LeftOut:
    """The batches of a turn, by reading. ``learns``: the trial has an optimizer."""

    def __init__(self) -> None:
        self.learns = False
        self.clear()

    def clear(self) -> None:
        """A turn begins."""
        self._readings: dict[Reading, _Sizes] = {}
        #: Readings of which the loop has used something without a backward pass: it evaluates.
        self._counted: set[Reading] = set()
        self._ended: set[Reading] = set()
        self._width = 1
        self._suspect: str | None = None
        #: The loop has got a batch that all workers have whole; and has used one.
        self._had_whole = self._used_whole = False

    def fetched(self, reading: Reading, share: Share) -> None:
        """The loop gets a batch of which this worker has a share."""
        if share.common:
            self._had_whole = True
        else:
            self._width = share.width
            self._readings.setdefault(reading, _Sizes()).waiting.append(share.size)

    def used(self) -> None:
        """A backward pass: it is about what was fetched last, and perhaps about what was fetched before that."""
        self._used_whole = self._had_whole
        for reading, sizes in self._readings.items():
            if sizes.waiting:
                *before, last = sizes.waiting
                sizes.used = min(sizes.waiting if not sizes.used else [*sizes.waiting, sizes.used])
                if not reading.evaluates:
                    self._look(before, last)
                sizes.waiting = []

    def counted(self) -> None:
        """The loop has asked for the statistics or the number of samples of what it fetched."""
        self._counted.update(reading for reading, sizes in self._readings.items() if sizes.waiting)

    def ended(self, reading: Reading) -> None:
        """The loop reads no further."""
        self._ended.add(reading)

    def why(self, place: Place) -> str | None:
        """Why the trial cannot be divided, as far as it is known at this place of the loop."""
        learning = {reading: sizes for reading, sizes in self._readings.items() if not reading.evaluates}
        for sizes in learning.values():
            if sizes.used:
                self._look(sizes.waiting, sizes.used)
        over = place == "boundary" or (place == "mean" and self._ended >= learning.keys())
        if over and self.learns and not (self._used_whole or any(sizes.used for sizes in self._readings.values())):
            unused = [sizes.waiting for reading, sizes in learning.items() if reading not in self._counted]
            largest = max((size for waiting in unused for size in waiting), default=0)
            if largest > 1:
                self._suspect = self._suspect or self._text(largest, "no batch of this turn was used")
        return self._suspect

    def _look(self, left_out: list[int], used: int) -> None:
        """Whether the longest part of the batches left out is shorter than the shortest part of the batch used."""
        largest = max(left_out, default=0)
        if largest > 1 and -(-largest // self._width) < max(1, used // self._width):
            self._suspect = self._suspect or self._text(largest, "longer ones were used")

    def _text(self, size: int, seen: str) -> str:
        return (
            f"a batch of {size} samples was left out, perhaps because its part is short in each of {self._width} "
            f"workers ({seen}): let no `if` depend on the length of a batch (drop_last=True may do what it is for)"
        )
