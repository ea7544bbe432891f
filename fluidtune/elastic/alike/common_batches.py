"""Which batches all workers of a grown trial compute whole, so that each joiner is compared with the leader.

A joiner has what the loop has prepared, and begins everything else anew, such as a counter or a list of the loop's. So
after a growth every worker gets whole batches at first, with the leader's random streams. The leader's gradients count
alone, and the others compare theirs. Once a gradient at weights that such a step has made is the same in all workers,
batches are divided: "first" until a turn with such batches has ended, "divided" from then on.

What differs may begin to matter later, as weights of losses do that follow the means of the last two turns. So later
turns begin with such a comparison, too: "again" until one gradient was compared, "agreed" until a batch is divided.
Which turns do so is a matter of counts (`compares`), and only for a loop that is known to divide within a turn.

The machine has no tensors and no group. An event may have two answers:

| state | formed with joiners | formed without | compared | stepped | drawn | turn ends | due again | differed |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
| divided | unproven | divided | - | divided | divided | divided | again | differed |
| again | unproven | divided | agreed | again | again | divided | - | differed |
| agreed | unproven | divided | agreed | agreed | agreed, or divided if it may begin | divided | - | differed |
| unproven | unproven | first | compared | unproven | unproven | unproven, or first if nothing learns | - | differed |
| compared | unproven | first | compared | stepped | compared | compared | - | differed |
| stepped | unproven | first | proven | stepped | stepped | stepped | - | differed |
| proven | unproven | first | proven | proven | proven, or first if it may begin | first | - | differed |
| first | unproven | first | - | first | first | first, or divided if it had such batches | - | differed |
| differed | unproven | first | differed | differed | differed | differed | differed | differed |
"""

from __future__ import annotations

from typing import Literal

State = Literal["divided", "again", "agreed", "unproven", "compared", "stepped", "proven", "first", "differed"]

#: Turns or evaluations after a growth, the first ones, of which each begins with a comparison. Weights of losses follow
#: the means of the last two turns in "End-to-End Multi-Task Learning with Attention" (section 4.2.2), so that they
#: begin in the third; one more is for a growth before the first turn.
EACH = 4


def compares(number: int) -> bool:
    """Whether the turn, or the evaluation, of this number since the growth, from 1 on, begins with a comparison.

    It is each of the first `EACH`, then 8, 16, 32 ..: of n at most 2 + log2(n), for n from 4 on.
    """
    return number <= EACH or number & (number - 1) == 0


class CommonBatches:
    """One worker's view of its group; all workers see the same events, but only the leader draws batches.

    One thing: each method is an event of the machine, or a question to it.
    """

    def __init__(self) -> None:
        self.state: State = "divided"
        #: In this turn the loop has got batches that all workers computed whole, and batches that were divided.
        self.had_common = self.had_divided = False
        #: The leader's loop has got a divided batch in this process: what it keeps may be of its part.
        self.has_divided = False
        #: Growths so far.
        self.growths = 0
        self._learned = False
        #: Turns that have ended since workers joined.
        self._turns = 0
        #: In a turn since then, batches were divided after one that all computed whole. Only the leader knows.
        self._within_turn = False

    def fails_divided(self, error: BaseException, width: int) -> str | None:
        """Why the loop must have one worker, if it raises ``error`` in the first divided turn since workers joined.

        So it must if it raises ``error`` where divided turns are followed by a whole batch.
        """
        if not (self.state == "first" and self.had_divided) and not (self.state == "again" and self.had_common):
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
        agree = self.state in ("divided", "again", "agreed")
        self.state = "unproven" if joiners else "divided" if agree else "first"
        self.had_common = self.had_divided = False
        if joiners:
            self.growths += 1
            self._turns, self._within_turn = 0, False

    def compared(self) -> None:
        """All workers had the same gradient of a common batch."""
        after: dict[State, State] = {"unproven": "compared", "stepped": "proven", "again": "agreed"}
        self.state = after.get(self.state, self.state)

    def stepped(self) -> None:
        self._learned = True
        if self.state == "compared":
            self.state = "stepped"

    def draw(self, *, may_divide: bool) -> bool:
        """The leader draws a batch; whether it is common. ``may_divide``: nothing that the loop does would mix both."""
        if self.state in ("proven", "agreed") and may_divide:
            self._within_turn = True
            self.follow(False)
        return self.are_common

    def follow(self, common: bool) -> None:
        """A follower hears how a batch was drawn."""
        if not common and self.state not in ("divided", "differed"):
            self.state = "divided" if self.state in ("again", "agreed") else "first"

    def got(self, common: bool) -> None:
        self.had_common = self.had_common or common
        self.had_divided = self.had_divided or not common
        self.has_divided = self.has_divided or not common

    @property
    def due_again(self) -> bool:
        """Leader, at a boundary before `turn_ended`: whether the next turn is to begin with a comparison."""
        return self._within_turn and compares(self._turns + 2)

    def ask_again(self) -> None:
        """The turn that begins is one of those."""
        if self.state == "divided":
            self.state = "again"

    def turn_ended(self) -> None:
        """A boundary, at which all workers were compared. If no optimizer has stepped, there is no more to compare."""
        self._turns += 1
        if self.state in ("again", "agreed") or (self.state == "first" and self.had_divided):
            self.state = "divided"
        elif self.state == "proven" or (self.state == "unproven" and not self._learned):
            self.state = "first"
        self.had_common = self.had_divided = self._learned = False

    def differed(self) -> None:
        """A worker is not what the leader is: from now on the leader alone counts."""
        self.state = "differed"
