"""Which batches all workers of a grown trial compute whole, so that each joiner is compared with the leader.

A joiner has what the loop has prepared, and begins everything else anew, such as a counter or a list of the loop's. So
after a growth every worker gets whole batches at first, with the leader's random streams. The leader's gradients count
alone, and the others compare theirs. Once a gradient at weights that such a step has made is the same in all workers,
batches are divided: "first" until a turn with such batches has ended, "divided" from then on.

The machine has no tensors and no group. An event may have two answers:

| state | formed with joiners | formed without | compared | stepped | drawn | turn ends | differed |
| --- | --- | --- | --- | --- | --- | --- | --- |
| divided | unproven | divided | - | divided | divided | divided | differed |
| unproven | unproven | first | compared | unproven | unproven | unproven, or first if nothing learns | differed |
| compared | unproven | first | compared | stepped | compared | compared | differed |
| stepped | unproven | first | proven | stepped | stepped | stepped | differed |
| proven | unproven | first | proven | proven | proven, or first if it may begin | first | differed |
| first | unproven | first | - | first | first | first, or divided if it had such batches | differed |
| differed | unproven | first | differed | differed | differed | differed | differed |
"""

from __future__ import annotations

from typing import Literal

State = Literal["divided", "unproven", "compared", "stepped", "proven", "first", "differed"]


class CommonBatches:
    """One worker's view of its group; all workers see the same events, but only the leader draws batches."""

    def __init__(self) -> None:
        self.state: State = "divided"
        #: In this turn the loop has got batches that all workers computed whole, and batches that were divided.
        self.had_common = self.had_divided = False
        self._learned = False

    def fails_divided(self, error: BaseException, width: int) -> str | None:
        """Why the loop must have one worker, if it raises ``error`` in the first divided turn since workers joined."""
        if not (self.state == "first" and self.had_divided):
            return None
        return f"divided among {width} workers the loop fails: {error!r}".splitlines()[0]

    @property
    def are_common(self) -> bool:
        """Whether the next batch is one that all workers compute whole."""
        return self.state not in ("first", "divided")

    @property
    def whole_turn(self) -> bool:
        """Whether the leader alone has seen all that was computed in this turn so far, and the others the same."""
        return self.had_common and not self.had_divided

    def formed(self, joiners: bool) -> None:
        """A group has formed. ``joiners``: some of its workers have begun the trial's code for it."""
        self.state = "unproven" if joiners else "divided" if self.state == "divided" else "first"
        self.had_common = self.had_divided = False

    def compared(self) -> None:
        """All workers had the same gradient of a common batch."""
        after: dict[State, State] = {"unproven": "compared", "stepped": "proven"}
        self.state = after.get(self.state, self.state)

    def stepped(self) -> None:
        self._learned = True
        if self.state == "compared":
            self.state = "stepped"

    def draw(self, *, may_divide: bool) -> bool:
        """The leader draws a batch; whether it is common. ``may_divide``: nothing that the loop does would mix both."""
        if self.state == "proven" and may_divide:
            self.state = "first"
        return self.are_common

    def follow(self, common: bool) -> None:
        """A follower hears how a batch was drawn."""
        if not common and self.state not in ("divided", "differed"):
            self.state = "first"

    def got(self, common: bool) -> None:
        self.had_common = self.had_common or common
        self.had_divided = self.had_divided or not common

    def turn_ended(self) -> None:
        """A boundary, at which all workers were compared. If no optimizer has stepped, there is no more to compare."""
        if self.state == "first" and self.had_divided:
            self.state = "divided"
        elif self.state == "proven" or (self.state == "unproven" and not self._learned):
            self.state = "first"
        self.had_common = self.had_divided = self._learned = False

    def differed(self) -> None:
        """A worker is not what the leader is: from now on the leader alone counts."""
        self.state = "differed"
