"""How many workers a trial may lose before it is itself at fault."""

from __future__ import annotations

from dataclasses import dataclass

#: A trial whose workers die this many times without one iteration done in between is itself at fault.
#: Judgement: two deaths in a row may be an accident of its node.
MAX_DEATHS = 3
#: A trial is failed, too, when it loses this many workers through the cluster's fault without one iteration done in
#: between: before they had started, or together with their node. Judgement: it may take seconds until Ray notices that
#: a node is dead, and meanwhile workers are started there.
MAX_MISSES = 10


@dataclass(eq=False)
class Losses:
    """The losses of one trial since its last iteration."""

    #: How many of its workers died, as far as is known through its own fault.
    deaths: int = 0
    #: How many workers it lost through the cluster's fault.
    misses: int = 0
    #: Why the trial last left its workers, in words.
    last: str = ""

    def count_death(self, *, started: bool, device_there: bool) -> bool:
        """A worker of the trial died; ``started``: it had started before. Returns whether that was too often."""
        if started and device_there:
            self.deaths += 1
        else:
            self.misses += 1
        return self.deaths >= MAX_DEATHS or self.misses >= MAX_MISSES

    def forgive(self) -> None:
        """The trial has done an iteration."""
        self.deaths = self.misses = 0
