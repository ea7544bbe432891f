"""Makes Ray's placement groups agree with the leases: those that have to be there, and those that have to be gone.

What is wanted is handed in, as the books say it. What is there is known from the calls of Ray. Where the two differ a
call is made, and repeated until they agree: a call that raises an exception, or has no effect, is made again after a
pause that doubles. Groups do not wait for each other. What has become of them is returned as the events that the state
machine waits for.
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

#: A reservation that Ray has not made this many seconds after it was asked is given up: something outside Themis uses
#: the resources. The time before the call, and that of the call itself, does not count.
CREATE_S = 5.0
#: Seconds from a call of Ray to the first look at its effect, and the pause after a first call that failed. Ray makes
#: and removes a group in about a millisecond.
LOOK_S = 0.05
#: Seconds between two lines of the log about calls that fail.
LOG_S = 5.0
#: The longest pause, s. When a head that was busy for minutes answers again, GPUs wait for this long.
PAUSE_S = 10.0
#: A pause is doubled at most this often, so that 2 to this power is a float.
MOST_DOUBLINGS = 30


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
    #: Whether something can run in it.
    made: bool = False
    #: Whether it has to be gone, and whether it is.
    ends: bool = False
    gone: bool = False
    #: When Ray was asked: when that call returned, or when a call first failed; infinite before.
    since: float = math.inf
    #: When it is attended to next.
    due: float = 0.0
    #: Looks at it since it was asked for, and calls in a row that raised an exception.
    looks: int = 0
    failures: int = 0
    #: The last of these exceptions.
    why: str = ""


class Groups:
    """See the module. All but the properties is called by one thread.

    clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._known: dict[Key, Group] = {}
        self._logged = -LOG_S

    def found(self, key: Key, handle: Any, made: bool) -> None:
        """A group was there before this process. ``made``: something can run in it."""
        self._known[key] = Group(handle, asked=True, made=made, due=math.inf if made else 0.0)

    @property
    def there(self) -> list[Key]:
        """The reservations in which something can run."""
        return [key for key, group in list(self._known.items()) if group.made and not group.ends]

    @property
    def owed(self) -> int:
        """The number of groups that are not yet as they have to be."""
        return sum(not group.gone and (group.ends or not group.made) for group in list(self._known.values()))

    @property
    def trouble(self) -> str:
        """The failure that lasts longest, for people; "" if no call fails."""
        failing = [(group.failures, key, group) for key, group in list(self._known.items()) if group.failures]
        if not failing:
            return ""
        _, (app, gpu, _), worst = max(failing, key=lambda each: each[0])
        return (
            f"Ray fails for {len(failing)} of {self.owed} reservations: GPU {gpu} of {app} could not be "
            f"{'removed' if worst.ends else 'reserved'} for {self._clock() - worst.since:.0f} s ({worst.why}); it is "
            "tried again"
        )

    def work(self, wanted: Mapping[Key, Wanted | None], seconds: float) -> list[m.Event]:
        """Attend to what is due, for about ``seconds``. Returns what became of it.

        ``wanted``: what each group needs that has to be there; None, as for groups that are not in it: it has to be
        gone.
        """
        events: list[m.Event] = []
        began = self._clock()
        # One that was given up is remembered while it is wanted, so that no token is reserved twice.
        self._known = {key: group for key, group in self._known.items() if not group.gone or wanted.get(key)}
        for key, need in wanted.items():
            if key not in self._known and need is None:
                events.append(m.Removed(key[1], key[2]))
            elif key not in self._known:
                self._known[key] = Group()
        for key, group in self._known.items():
            if not wanted.get(key) and not group.ends:
                group.ends, group.since, group.due, group.looks = True, began, began, 0
            if group.due <= began:
                events += self._attend(key, group, None if group.ends else wanted[key])
                if self._clock() - began >= seconds:
                    break
        return events

    def _attend(self, key: Key, group: Group, need: Wanted | None) -> list[m.Event]:
        """Make the next call for a group."""
        try:
            state = self._call(key, group, need)
        except Exception as error:
            # Whatever Ray raises: this group's call is repeated, and all others go on.
            return self._failed(key, group, need, error)
        now = self._clock()
        group.failures, group.why = 0, ""
        if need is None and state == reservations.REMOVED:
            group.gone, group.due = True, math.inf
            return [m.Removed(key[1], key[2])]
        if need is not None and state == reservations.CREATED:
            group.made, group.due = True, math.inf
            return [m.Reserved(key[1], key[2], reservations.id_of(group.handle))]
        if need is not None:
            group.since = min(group.since, now) if state else now
            if state == reservations.REMOVED:
                return self._give_up(key, group)
            if now - group.since > CREATE_S:
                # It waits, so that there is no room for others who ask for as much. A call that raises an exception
                # shows nothing of others: its cause may be what this app asks for.
                return self._give_up(key, group, need.bundle)
        group.due = now + min(LOOK_S * 2**group.looks, CREATE_S / 5)
        group.looks = min(group.looks + 1, MOST_DOUBLINGS)
        return []

    def _call(self, key: Key, group: Group, need: Wanted | None) -> str:
        """Call Ray. Returns the state of the group, "" while it is not worth a look."""
        if group.handle is None and group.asked:
            # A call that raised an exception may have made the group.
            group.handle = reservations.find(key)
        if group.handle is None:
            if need is None:
                return reservations.REMOVED
            group.asked = True
            group.handle = reservations.reserve(key, need.bundle, need.tie)
            return ""
        if need is None:
            reservations.remove(group.handle)
        return reservations.state(group.handle)

    def _give_up(self, key: Key, group: Group, no_room: Mapping[str, float] | None = None) -> list[m.Event]:
        """The reservation cannot be made: remove what there is of it, and let the state machine go on."""
        group.ends, group.since, group.due, group.looks = True, self._clock(), 0.0, 0
        return [m.ReserveFailed(key[1], key[2], no_room)]

    def _failed(self, key: Key, group: Group, need: Wanted | None, error: Exception) -> list[m.Event]:
        now = self._clock()
        group.why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        group.since = min(group.since, now)
        group.due = now + min(LOOK_S * 2**group.failures, PAUSE_S)
        group.failures = min(group.failures + 1, MOST_DOUBLINGS)
        if need is not None and now - group.since > CREATE_S:
            return self._give_up(key, group)
        if now - self._logged >= LOG_S:
            self._logged = now
            logger.warning("themis: %s", self.trouble)
        return []
