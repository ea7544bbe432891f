"""Whether a trial may have several workers, as far as its leader has found out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .backends.base import CollectiveBackend
from .control_messages import CommittableState
from .membership import Reform


@dataclass
class Growth:
    """What the leader of a trial knows of its growth; see `LeaderSession` for the first two.

    ``difference``: what differed between the workers at a boundary, not yet told to the host.
    ``differences``: how often something did.
    """

    ungrowable: str | None = None
    refused: float | None = None
    difference: str | None = None
    differences: int = 0

    def note_difference(self, what: str, most: int) -> None:
        """The workers differed at a boundary; after ``most`` times the trial must have one worker."""
        self.difference = what
        self.differences += 1
        if self.differences >= most:
            self.end(f"its workers drift apart: {what}")

    def take_difference(self) -> str | None:
        """See `LeaderSession`."""
        difference, self.difference = self.difference, None
        return difference

    def end(self, why: str) -> None:
        """From now on the trial must have one worker."""
        self.ungrowable = self.ungrowable or why

    def answer(
        self, reform: Reform, members: tuple[str, ...], state: CommittableState, group: CollectiveBackend
    ) -> Literal["yes", "not now", "no"]:
        """Leader, at a boundary: whether ``reform`` can be done. After "no" its joiners end by themselves."""
        joiners = [rank for rank, worker in enumerate(reform.members) if worker not in members]
        if joiners:
            why = self.ungrowable or state.obstacle(lasting=True)
            if why is not None:
                self.end(why)
                self.refused = reform.generation
                group.call_generation(reform.generation, reform.members[:1])
                return "no"
            if state.obstacle() is not None:
                return "not now"
        return "yes" if group.joiners_announced(reform.generation, joiners) else "not now"
