"""Makes Ray's placement groups agree with the leases: those that have to be there, and those that have to be gone.

What is wanted is handed in, as the books say it. What is there is known from the calls of Ray. Where the two differ a
call is made, and repeated until they agree: a call that raises an exception, or has no effect, is made again after a
pause that doubles. What has become of them is returned as the events that the state machine waits for.

A group is tied to a machine, and Ray makes those that wait for it in the order in which they were asked for. So a GPU
changes hands in three steps. First, all groups of that machine that Ray has not made are taken back. Then the group of
the old lease is removed. Then the groups that are wanted are asked for, those first whose GPU had one before: the room
of a group is its heir's. Groups of different machines do not wait for each other.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from themis_bridge import messages as m
from themis_bridge.shell import reservations
from themis_bridge.shell.reservations import Key

logger = logging.getLogger(__name__)

#: A reservation that Ray has not made this many seconds after it was asked has no room: something outside Themis uses
#: the resources. It waits in Ray's queue. The time before the call, and that of the call itself, does not count.
CREATE_S = 5.0
#: Seconds from a call of Ray to the first look at its effect. Ray makes and removes a group in about a millisecond.
LOOK_S = 0.05
#: The longest pause, s: so long a reservation that waited may be there before its app is told; and before it waits.
PAUSE_S, ASKED_PAUSE_S = 5.0, 1.0


@dataclass(frozen=True)
class Wanted:
    """What a reservation needs: the bundle (Ray resource -> amount) and the tie to the GPU's node."""

    bundle: Mapping[str, float]
    tie: str


@dataclass
class Group:
    """One group. Times are seconds on the clock that is handed in."""

    #: Ray's handle; None if it is not known, because it was not asked for or the call raised an exception.
    handle: Any = None
    #: Whether a call that may have made the group has begun.
    asked: bool = False
    #: Whether the room of the last group of its GPU is its own.
    heir: bool = False
    #: Whether something can run in it, and whether it was told that there is no room for it.
    made: bool = False
    late: bool = False
    #: Whether it has to be gone.
    ends: bool = False
    #: When the call that asks for it ended, or when it was to go; infinite before. And the seconds of earlier waits.
    since: float = math.inf
    waited: float = 0.0
    #: When it is attended to next.
    due: float = 0.0
    #: The exception that the last call raised; "" if it raised none. And when calls began to raise.
    why: str = ""
    failing: float = math.inf


class Groups:
    """See the module. All but the properties is called by one thread.

    clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._known: dict[Key, Group] = {}
        #: The ties of the machines where a GPU changed hands at the last call of `work`.
        self._turning: set[str] = set()
        #: Until when no call is made again that failed: others have as much time as such calls took.
        self._rests = 0.0

    def found(self, key: Key, handle: Any, made: bool) -> None:
        """A group was there before this process. ``made``: something can run in it."""
        self._known[key] = Group(handle, asked=True, made=made, due=math.inf if made else 0.0)

    @property
    def owed(self) -> int:
        """The number of groups that are not yet as they have to be."""
        return sum(group.ends or not group.made for group in list(self._known.values()))

    @property
    def trouble(self) -> str:
        """The failure that lasts longest, for people; "" if no call fails."""
        failing = [(group.failing, key, group) for key, group in list(self._known.items()) if group.why]
        if not failing:
            return ""
        since, (app, gpu, _), worst = min(failing, key=lambda each: each[0])
        return (
            f"Ray fails for {len(failing)} of {self.owed} reservations: GPU {gpu} of {app} could not be "
            f"{'removed' if worst.ends else 'reserved'} for {self._clock() - since:.0f} s ({worst.why}); it is "
            "tried again"
        )

    def work(self, wanted: Mapping[Key, Wanted], seconds: float) -> list[m.Event]:
        """Attend to what is due, for about ``seconds``. Returns what became of it.

        ``wanted``: what each group needs that has to be there; all others have to be gone.
        """
        events: list[m.Event] = []
        began = self._clock()
        for key, group in self._known.items():
            if key not in wanted and not group.ends:
                group.ends, group.since, group.due, group.why = True, began, began, ""
        ending = {key[1] for key, group in self._known.items() if group.ends}
        for key in wanted.keys() - self._known.keys():
            self._known[key] = Group(due=began)
        # The ties of the machines where a GPU changes hands, and of those where Ray has not made all that it was asked.
        next_tie = {key[1]: need.tie for key, need in wanted.items()}
        turning = {tie for gpu, tie in next_tie.items() if gpu in ending}
        for key, group in self._known.items():
            if group.ends or group.made or wanted[key].tie not in turning:
                continue
            if not group.asked:
                # All are due at once when nothing changes hands any more.
                group.due = began
            elif wanted[key].tie not in self._turning:
                # All that Ray has not made is taken back: at once, and then after pauses of its own.
                group.waited, group.since, group.due = group.waited + max(0.0, began - group.since), began, began
        self._turning = turning
        unmade = {next_tie.get(key[1]) for key, group in self._known.items() if group.asked and not group.made}
        # Who has been due for longest is first, so that no group waits for more than one call of each other one.
        for key, group in sorted(self._known.items(), key=lambda each: (each[1].due, not each[1].heir, each[0][2])):
            need = None if group.ends else wanted[key]
            turns = need is not None and need.tie in turning and not group.made
            held_up = next_tie.get(key[1], key) in unmade and group.made if need is None else turns and not group.asked
            if not held_up and group.due <= began and (not group.why or self._rests <= began):
                events += self._attend(key, group, need, turns)
                if (spent := self._clock() - began) >= seconds:
                    self._rests = self._clock() + min(spent, PAUSE_S) if group.why else self._rests
                    break
        return events

    def _attend(self, key: Key, group: Group, need: Wanted | None, turns: bool) -> list[m.Event]:
        """Make the next call for a group. ``turns``: as of `_call`."""
        _, gpu, token = key
        try:
            state, group.why = self._call(key, group, need, turns), ""
        except Exception as error:
            # Whatever Ray raises: this group's call is repeated, and all others go on.
            others = any(each.why for each in self._known.values())
            group.failing = group.failing if group.why else self._clock()
            state, group.why = "", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if not others:
                logger.warning("themis: Ray fails, and is asked again (`arbiter status` tells how long): %s", group.why)
        now = self._clock()
        group.since = min(group.since, now)
        # Each pause is as long as it has lasted so far; but what was asked for just now is looked at soon.
        lasts = now - group.since if state or group.why else 0.0
        group.due = now + min(max(LOOK_S, lasts), PAUSE_S if group.ends or group.late else ASKED_PAUSE_S)
        if state == reservations.REMOVED:
            if need is None:
                del self._known[key]
                for (_, other, _), each in self._known.items():
                    each.heir |= other == gpu and (group.made or (group.heir and not group.late))
            # Else it was taken back, or removed by somebody before its app was told of it. It is asked for again.
            group.waited, group.since, group.due = group.waited + now - group.since, math.inf, now
            group.handle, group.asked, group.heir = None, False, group.heir and not group.late
            return []
        if need is not None and state == reservations.CREATED:
            group.made, group.due = True, math.inf
            return [m.Reservation(gpu, token, reservations.id_of(group.handle))]
        if need is not None and not group.late and group.waited + now - group.since > CREATE_S:
            group.late = True
            return [m.Reservation(gpu, token)]
        return []

    def _call(self, key: Key, group: Group, need: Wanted | None, turns: bool) -> str:
        """Call Ray. Returns the state of the group, "" while it is not worth a look.

        ``turns``: if Ray has not made the group, it is taken back, since a GPU of its machine changes hands.
        """
        if group.handle is None and group.asked:
            # A call that raised an exception may have made the group.
            group.handle = reservations.find(key)
        if group.handle is None:
            if need is None or turns:
                return reservations.REMOVED
            group.asked = True
            group.handle = reservations.reserve(key, need.bundle, need.tie)
            return ""
        if not group.made:
            state = reservations.state(group.handle)
            group.made = state == reservations.CREATED
            # One that is to end and turns out to be made is removed in its turn.
            if group.made or not (need is None or turns):
                return state
        reservations.remove(group.handle)
        return reservations.state(group.handle)
