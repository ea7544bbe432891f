"""What the arbiter owes to Ray: groups that have to be there, and groups that have to be gone.

The state machine has moved on when it returns an instruction, so no instruction may be lost. Each one becomes an errand
of its own here, which is repeated until it is done: a call that raises an exception, or has no effect, is made again
after a pause that doubles. Errands do not wait for each other. What has become of them is returned as the events that
the state machine waits for.

One thread calls `work`, without the lock, because a call of Ray may take long. Everything else is called with the lock.
Ray is handed in: this module neither imports it nor reads a clock.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from themis_bridge import messages as m
from themis_bridge.locality import Gpu

logger = logging.getLogger(__name__)

#: (app, GPU, token).
Key = tuple[str, str, int]

#: A reservation that Ray has not made after this many seconds is given up. Judgement: Ray needs milliseconds if the
#: resources are free; if they are not, something outside Themis uses them.
CREATE_S = 5.0
#: Seconds from a call of Ray to the first look at its effect, and the pause after a first call that failed. Judgement:
#: Ray makes and removes a group in about a millisecond, and a round takes a second.
LOOK_S = 0.05
#: Seconds between two lines of the log about calls that fail. Judgement: a line for each call would fill the log.
LOG_S = 5.0
#: The longest pause, s. Judgement: Ray's head may be busy for minutes; when it answers again, GPUs wait for this long.
PAUSE_S = 10.0


class Groups(Protocol):
    """What `work` calls, see `themis_bridge.shell.reservations`."""

    CREATED: str
    REMOVED: str

    def reserve(self, key: Key, gpu: Gpu, bundle: Mapping[str, float], tie: str) -> Any: ...

    def find(self, key: Key) -> Any | None: ...

    def state(self, group: Any) -> str: ...

    def remove(self, group: Any) -> None: ...


@dataclass(frozen=True)
class Wanted:
    """What a reservation needs: the GPU, the bundle (Ray resource -> amount) and the tie to the GPU's node."""

    gpu: Gpu
    bundle: Mapping[str, float]
    tie: str


@dataclass
class Errand:
    """One group that has to be there, or gone. Times are seconds on the clock that is handed in."""

    key: Key
    #: When it was asked for.
    since: float
    #: When it is attended to next.
    due: float
    #: None: it has to be gone.
    wanted: Wanted | None
    #: None if it is not known, because it was not asked for or the call raised an exception.
    group: Any = None
    #: Whether a call that may have made the group has begun.
    asked: bool = False
    #: Looks at it since it was asked for; the pause between two of them doubles.
    looks: int = 0
    #: Calls in a row that raised an exception.
    failures: int = 0
    #: The last of these exceptions.
    why: str = ""


@dataclass
class Errands:
    """See the module.

    groups: Ray.
    clock: seconds.
    lock: held by whoever calls anything but `work`.
    """

    groups: Groups
    clock: Callable[[], float]
    lock: threading.RLock
    #: Reservation -> its group, for those in which something can run.
    there: dict[Key, Any] = field(default_factory=dict)
    #: Reservation -> its group, for the others that an earlier arbiter has asked for.
    found: dict[Key, Any] = field(default_factory=dict)
    _errands: dict[Key, Errand] = field(default_factory=dict)
    #: (due, key) of every errand; pairs that are out of date are skipped.
    _queue: list[tuple[float, Key]] = field(default_factory=list)
    _logged: float = -LOG_S

    # --- what is owed

    def reserve(self, key: Key, wanted: Wanted) -> None:
        """The group has to be there."""
        now, group = self.clock(), self.found.pop(key, None)
        errand = self._errands[key] = Errand(key, now, now, wanted, group, asked=group is not None)
        self._put(errand, now)

    def remove(self, key: Key) -> None:
        """The group has to be gone, and what runs in it."""
        now, group = self.clock(), self.there.pop(key, None) or self.found.pop(key, None)
        errand = self._errands.get(key)
        if errand is None:
            errand = self._errands[key] = Errand(key, now, now, None, group, asked=group is not None)
        else:
            errand.since, errand.wanted, errand.looks = now, None, 0
        self._put(errand, now)

    def owed(self, app: str | None = None) -> list[Errand]:
        """The errands that are not done, of one app or of all."""
        return [errand for key, errand in self._errands.items() if app in (None, key[0])]

    def trouble(self) -> str:
        """The failure that lasts longest, for people; "" if no call fails."""
        worst = max(self._errands.values(), key=lambda errand: errand.failures, default=None)
        if worst is None or not worst.failures:
            return ""
        what = "removed" if worst.wanted is None else "reserved"
        count = sum(1 for errand in self._errands.values() if errand.failures)
        return (
            f"Ray fails for {count} of {len(self._errands)} reservations: GPU {worst.key[1]} of {worst.key[0]} could "
            f"not be {what} for {self.clock() - worst.since:.0f} s ({worst.why}); it is tried again"
        )

    # --- carrying it out

    def work(self, seconds: float) -> list[m.Event]:
        """Attend to what is due, for about ``seconds``, without the lock. Returns what became of it."""
        events: list[m.Event] = []
        began = self.clock()
        while (errand := self._next(began)) is not None:
            events += self._attend(errand)
            if self.clock() - began >= seconds:
                break
        return events

    def _next(self, now: float) -> Errand | None:
        with self.lock:
            while self._queue and self._queue[0][0] <= now:
                due, key = heapq.heappop(self._queue)
                errand = self._errands.get(key)
                if errand is not None and errand.due == due:
                    return errand
        return None

    def _put(self, errand: Errand, due: float) -> None:
        errand.due = due
        heapq.heappush(self._queue, (due, errand.key))

    def _attend(self, errand: Errand) -> list[m.Event]:
        """Make the next call for an errand."""
        wanted = errand.wanted
        try:
            state = self._call(errand, wanted)
        except Exception as error:
            # Whatever Ray raises: this errand is repeated, and all others go on.
            with self.lock:
                return self._failed(errand, error)
        with self.lock:
            errand.failures, errand.why = 0, ""
            if errand.wanted is not wanted:
                return []  # It was called off meanwhile, and is due again.
            if wanted is None:
                if state != self.groups.REMOVED:
                    self._look_again(errand)
                    return []
                del self._errands[errand.key]
                return [m.Removed(errand.key[1], errand.key[2])]
            if state == self.groups.CREATED:
                del self._errands[errand.key]
                self.there[errand.key] = errand.group
                return [m.Reserved(errand.key[1], errand.key[2])]
            if state == self.groups.REMOVED or self.clock() - errand.since > CREATE_S:
                return self._give_up(errand)
            self._look_again(errand)
            return []

    def _call(self, errand: Errand, wanted: Wanted | None) -> str:
        """Call Ray. Returns the state of the group, "" while it is not worth a look."""
        if errand.group is None and errand.asked:
            # A call that raised an exception may have made the group.
            errand.group = self.groups.find(errand.key)
        if errand.group is None:
            if wanted is None:
                return self.groups.REMOVED
            errand.asked = True
            errand.group = self.groups.reserve(errand.key, wanted.gpu, wanted.bundle, wanted.tie)
            return ""
        if wanted is None:
            self.groups.remove(errand.group)
        return self.groups.state(errand.group)

    def _look_again(self, errand: Errand) -> None:
        self._put(errand, self.clock() + min(LOOK_S * 2**errand.looks, CREATE_S / 5))
        errand.looks = min(errand.looks + 1, 30)

    def _give_up(self, errand: Errand) -> list[m.Event]:
        """The reservation cannot be made: remove what there is of it, and let the state machine go on."""
        self.remove(errand.key)
        return [m.ReserveFailed(errand.key[1], errand.key[2])]

    def _failed(self, errand: Errand, error: Exception) -> list[m.Event]:
        errand.why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if errand.wanted is not None and self.clock() - errand.since > CREATE_S:
            failures = errand.failures
            events = self._give_up(errand)
            errand.failures = failures + 1
            return events
        pause = min(LOOK_S * 2**errand.failures, PAUSE_S)
        errand.failures = min(errand.failures + 1, 60)
        if self.clock() - self._logged >= LOG_S:
            self._logged = self.clock()
            logger.warning("themis: %s", self.trouble())
        self._put(errand, self.clock() + pause)
        return []
