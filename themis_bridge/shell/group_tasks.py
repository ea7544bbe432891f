"""What the arbiter owes to Ray: groups that have to be there, and groups that have to be gone.

The state machine has moved on when it returns an instruction, so no instruction may be lost. Each one becomes a task
here, which is repeated until it is done: a call that raises an exception, or has no effect, is made again after a pause
that doubles. Tasks do not wait for each other. What has become of them is returned as the events that the state machine
waits for.

One thread calls `work`, without the lock, because a call of Ray may take long. Everything else is called with the lock.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Wanted:
    """What a reservation needs: the bundle (Ray resource -> amount) and the tie to the GPU's node."""

    bundle: Mapping[str, float]
    tie: str


@dataclass
class GroupTask:
    """One group that has to be there, or gone. Times are seconds on the clock that is handed in."""

    key: Key
    #: When Ray was asked: when that call returned, or when a call first failed; infinite before. Of a group that has to
    #: be gone: when that was asked for.
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
class GroupTasks:
    """See the module.

    clock: seconds.
    lock: held by whoever calls anything but `work`.
    also_for: bundle -> the apps that ask for at least as much. Asked, with the lock, when Ray has had no room for it.
    """

    clock: Callable[[], float]
    lock: threading.RLock
    also_for: Callable[[Mapping[str, float]], frozenset[str]]
    #: Reservation -> its group, for those in which something can run.
    there: dict[Key, Any] = field(default_factory=dict)
    #: Reservation -> its group, for the others that an earlier arbiter has asked for.
    found: dict[Key, Any] = field(default_factory=dict)
    _tasks: dict[Key, GroupTask] = field(default_factory=dict)
    #: (due, key) of every task; pairs that are out of date are skipped.
    _queue: list[tuple[float, Key]] = field(default_factory=list)
    _logged: float = -LOG_S

    # --- what is owed

    def reserve(self, key: Key, wanted: Wanted) -> None:
        """The group has to be there."""
        now, group = self.clock(), self.found.pop(key, None)
        task = self._tasks[key] = GroupTask(key, math.inf, now, wanted, group, asked=group is not None)
        self._put(task, now)

    def remove(self, key: Key) -> None:
        """The group has to be gone, and what runs in it."""
        now, group = self.clock(), self.there.pop(key, None) or self.found.pop(key, None)
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = GroupTask(key, now, now, None, group, asked=group is not None)
        else:
            task.since, task.wanted, task.looks = now, None, 0
        self._put(task, now)

    def owed(self) -> int:
        """The number of tasks that are not done."""
        return len(self._tasks)

    def trouble(self) -> str:
        """The failure that lasts longest, for people; "" if no call fails."""
        worst = max(self._tasks.values(), key=lambda task: task.failures, default=None)
        if worst is None or not worst.failures:
            return ""
        what = "removed" if worst.wanted is None else "reserved"
        count = sum(1 for task in self._tasks.values() if task.failures)
        return (
            f"Ray fails for {count} of {len(self._tasks)} reservations: GPU {worst.key[1]} of {worst.key[0]} could "
            f"not be {what} for {self.clock() - worst.since:.0f} s ({worst.why}); it is tried again"
        )

    # --- carrying it out

    def work(self, seconds: float) -> list[m.Event]:
        """Attend to what is due, for about ``seconds``, without the lock. Returns what became of it."""
        events: list[m.Event] = []
        began = self.clock()
        while (task := self._next(began)) is not None:
            events += self._attend(task)
            if self.clock() - began >= seconds:
                break
        return events

    def _next(self, now: float) -> GroupTask | None:
        with self.lock:
            while self._queue and self._queue[0][0] <= now:
                due, key = heapq.heappop(self._queue)
                task = self._tasks.get(key)
                if task is not None and task.due == due:
                    return task
        return None

    def _put(self, task: GroupTask, due: float) -> None:
        task.due = due
        heapq.heappush(self._queue, (due, task.key))

    def _attend(self, task: GroupTask) -> list[m.Event]:
        """Make the next call for a task."""
        wanted = task.wanted
        try:
            state = self._call(task, wanted)
        except Exception as error:
            # Whatever Ray raises: this task is repeated, and all others go on.
            with self.lock:
                return self._failed(task, error)
        with self.lock:
            task.failures, task.why = 0, ""
            if task.wanted is not wanted:
                return []  # It was called off meanwhile, and is due again.
            if wanted is None:
                if state != reservations.REMOVED:
                    self._look_again(task)
                    return []
                del self._tasks[task.key]
                return [m.Removed(task.key[1], task.key[2])]
            if state == reservations.CREATED:
                del self._tasks[task.key]
                self.there[task.key] = task.group
                return [m.Reserved(task.key[1], task.key[2])]
            now = self.clock()
            task.since = min(task.since, now) if state else now
            if state == reservations.REMOVED:
                return self._give_up(task)
            if now - task.since > CREATE_S:
                # It waits, so that there is no room for others who ask for as much. A call that raises an exception
                # shows nothing of others: its cause may be what this app asks for.
                return self._give_up(task, self.also_for(wanted.bundle))
            self._look_again(task)
            return []

    def _call(self, task: GroupTask, wanted: Wanted | None) -> str:
        """Call Ray. Returns the state of the group, "" while it is not worth a look."""
        if task.group is None and task.asked:
            # A call that raised an exception may have made the group.
            task.group = reservations.find(task.key)
        if task.group is None:
            if wanted is None:
                return reservations.REMOVED
            task.asked = True
            task.group = reservations.reserve(task.key, wanted.bundle, wanted.tie)
            return ""
        if wanted is None:
            reservations.remove(task.group)
        return reservations.state(task.group)

    def _look_again(self, task: GroupTask) -> None:
        self._put(task, self.clock() + min(LOOK_S * 2**task.looks, CREATE_S / 5))
        task.looks = min(task.looks + 1, 30)

    def _give_up(self, task: GroupTask, also_for: frozenset[str] = frozenset()) -> list[m.Event]:
        """The reservation cannot be made: remove what there is of it, and let the state machine go on."""
        self.remove(task.key)
        return [m.ReserveFailed(task.key[1], task.key[2], also_for)]

    def _failed(self, task: GroupTask, error: Exception) -> list[m.Event]:
        task.why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        task.since = min(task.since, self.clock())
        if task.wanted is not None and self.clock() - task.since > CREATE_S:
            failures = task.failures
            events = self._give_up(task)
            task.failures = failures + 1
            return events
        pause = min(LOOK_S * 2**task.failures, PAUSE_S)
        task.failures = min(task.failures + 1, 60)
        if self.clock() - self._logged >= LOG_S:
            self._logged = self.clock()
            logger.warning("themis: %s", self.trouble())
        self._put(task, self.clock() + pause)
        return []
