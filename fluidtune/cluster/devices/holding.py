"""How many devices a job holds that gets them on demand: the decision, without Ray and without a clock.

The devices of a job come in *units*. A unit is one device, or the devices that one trial needs together on one node. A
unit is *asked for* until Ray has made its placement group; then it is *there*. `Holding.decide` takes what the job
could use (`DeviceDemand`), which devices are in use, and what the cluster has. It returns which units to ask for and
which to drop. These are the rules:

- For every trial that waits and would start there is a unit: one that is there and idle, or one that is asked for. So a
  request that waits in Ray's queue stands for a trial that waits, and an autoscaler adds nodes for it.
- For trials that could grow, only devices are asked for that the cluster has free, while no trial of the job waits and
  nobody else waits for anything that these devices could serve. A request for growth that is not met soon is dropped,
  so that no autoscaler ever adds a node for it.
- A device that is idle, and that no waiting trial would get, is given back after `SPARE_S`. A device to which a trial
  is on its way is kept until the trial comes.
- If others wait, devices that trials have grown to are given back: the number that others wait for. The trials are
  asked to shrink first. After `LEAVE_S` the devices are taken, because a trial may stand still until the other work is
  done, such as a task that it has started itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fluidtune.engine import DeviceDemand

#: Seconds after which a device that the job has no use for is given back. It is about as long as a new worker process
#: takes to start, so that keeping a device never costs much more than giving it back too early would.
SPARE_S = 3.0
#: Seconds after which a request for growth that is not met is dropped. Ray makes a placement group within milliseconds
#: where there is room, and its view of what is free is about a second old at most.
GROWTH_WAIT_S = 1.0
#: Seconds for which others must have waited without a break before trials shrink for them. It is longer than Ray takes
#: to start a task for which there is room, so that not every short task makes a trial shrink.
YIELD_AFTER_S = 1.0
#: Seconds that a trial gets to shrink. As long as an arbiter's notice (`themis_bridge.settings`), for the same reason:
#: most iterations are shorter.
LEAVE_S = 30.0
#: Seconds without growth after trials have shrunk for others, or have not used what they were given. It doubles each
#: time that trials shrink for others.
GROW_AGAIN_S = 30.0


@dataclass(eq=False)
class Unit:
    """Devices that come and go together."""

    devices: tuple[int, ...]
    #: When it was asked for, or was lost with its node, so that Ray makes it anew (seconds of the caller's clock).
    asked: float
    #: It was asked for so that a trial can grow.
    growth: bool = False
    #: Ray has made it.
    there: bool = False
    #: Since when it is there, idle and of no use; None: it is not.
    spare_since: float | None = None
    #: Since when it is to be given back for others; None: it is not. Infinity: for its node, whenever it is empty.
    leaving_since: float | None = None


@dataclass(frozen=True)
class Orders:
    """What the caller must do: make groups for ``ask``, remove those of ``drop``, announce that ``leave`` will go."""

    ask: list[Unit] = field(default_factory=list)
    drop: list[Unit] = field(default_factory=list)
    leave: list[int] = field(default_factory=list)


class Holding:
    """The units of one job.

    ``most``: the most devices that the job may have, those that are asked for included; None: any number.
    ``most_asked``: the most units that may be asked for at a time.
    """

    def __init__(self, most: int | None, most_asked: int):
        self._most, self._most_asked = most, most_asked
        self.units: list[Unit] = []
        #: Units that were dropped and still hold their devices, until their idle workers have ended.
        self.ending: list[Unit] = []
        #: No growth before this time, and how long it is put off when trials shrink for others the next time.
        self._grow_after = float("-inf")
        self._pause = GROW_AGAIN_S
        #: Since when others wait; None: they do not.
        self._others_since: float | None = None

    # --- what the caller tells

    def came(self, unit: Unit) -> None:
        """Ray has made the unit."""
        unit.there, unit.spare_since, unit.leaving_since = True, None, None

    def lost(self, unit: Unit, now: float) -> None:
        """The unit's node is dead; Ray makes the unit anew where there is room, as if it had been asked for now."""
        unit.there, unit.asked, unit.growth = False, now, False
        unit.spare_since = unit.leaving_since = None

    def vacate(self, unit: Unit) -> None:
        """The unit's node will die: give the unit back as soon as it is empty, however long that takes."""
        if unit.there and unit.leaving_since is None:
            unit.leaving_since = float("inf")

    def forget(self, unit: Unit) -> None:
        """The unit is not the job's any more: it was dropped, or somebody has removed its placement group."""
        self.units.remove(unit)

    def ended(self, unit: Unit) -> None:
        """A dropped unit that was there holds its devices no longer."""
        self.ending.remove(unit)

    def asked(self, size: int | None = None) -> list[Unit]:
        """The units that are asked for, oldest first. ``size``: only those of this number of devices."""
        return [unit for unit in self.units if not unit.there and size in (None, len(unit.devices))]

    @property
    def count(self) -> int:
        """How many devices are there or asked for, those included whose workers are ending."""
        return sum(len(unit.devices) for unit in (*self.units, *self.ending))

    def may_ask(self, size: int) -> bool:
        """Whether the job may ask for a unit of ``size`` devices more."""
        return self._most is None or self.count + size <= self._most

    # --- the decision

    def decide(
        self, now: float, demand: DeviceDemand, in_use: Callable[[int], bool], room: int = 0, others: int = 0
    ) -> Orders:
        """What to do now. The units to ask for are in `units` already, those to drop are not any more.

        Args:
            now: seconds of any clock that never goes back.
            demand: what the job's trials could use.
            in_use: whether something of the job runs on a device that is there.
            room: how many further devices the cluster could give at once.
            others: how many requests of others wait that devices of this job could serve.
        """
        self._note_others(now, others)
        orders = Orders()
        self._drop_left(now, in_use, orders)
        idle: dict[int, list[Unit]] = {size: [] for size in demand.starting}
        for unit in self.units:
            of_its_size = idle.setdefault(len(unit.devices), [])
            if not unit.there or unit.leaving_since is not None:
                continue
            if any(map(in_use, unit.devices)):
                unit.spare_since = None
            else:
                of_its_size.append(unit)
        for size in sorted(idle, reverse=True):
            trials = demand.starting.get(size, 0)
            kept = trials + (demand.claimed if size == 1 else 0)
            self._withdraw_requests(size, trials - len(idle[size]), orders)
            self._drop_spare(now, idle[size][kept:], bool(others), bool(demand.growing), orders)
            for unit in idle[size][:kept]:
                unit.spare_since = None
        for size in sorted(demand.starting, reverse=True):
            missing = demand.starting[size] - len(idle[size]) - len(self.asked(size))
            while missing > 0 and self.may_ask(size) and len(self.asked()) < self._most_asked:
                self._ask(now, size, False, orders)
                missing -= 1
        if not demand.starting:
            unclaimed = max(0, len(idle.get(1, ())) - demand.claimed)
            self._grow(now, demand.growing - unclaimed, room, others, orders)
        self._yield(now, demand.grown, others, orders)
        return orders

    def _note_others(self, now: float, others: int) -> None:
        if not others:
            self._others_since = None
        elif self._others_since is None:
            self._others_since = now

    def _drop_left(self, now: float, in_use: Callable[[int], bool], orders: Orders) -> None:
        """Drop what is to be given back for others, as soon as it is empty or its time is over."""
        for unit in [unit for unit in self.units if unit.leaving_since is not None]:
            assert unit.leaving_since is not None
            if now - unit.leaving_since >= LEAVE_S or not any(map(in_use, unit.devices)):
                self._drop(unit, orders)

    def _withdraw_requests(self, size: int, missing: int, orders: Orders) -> None:
        """Withdraw the requests for units of this size that no trial waits for any more, the youngest first.

        ``missing``: how many units the trials that wait do not have. A request for growth becomes one of these.
        """
        asked = self.asked(size)
        for unit in asked[: max(0, missing)]:
            unit.growth = False
        for unit in reversed(asked[max(0, missing) :]):
            if not unit.growth:
                self._drop(unit, orders)

    def _drop_spare(self, now: float, spare: list[Unit], others: bool, growing: bool, orders: Orders) -> None:
        """Give back units that are idle and that no waiting trial gets, if they have been so for long or others wait.

        The highest numbers go first. Units to which a trial was to grow are kept no longer than others; if it has not
        grown by then, it is not given any for a while.
        """
        for unit in reversed(spare):
            if unit.spare_since is None:
                unit.spare_since = now
            if others or now - unit.spare_since >= SPARE_S:
                self._drop(unit, orders)
                if growing and not others:
                    self._grow_after = max(self._grow_after, now + GROW_AGAIN_S)

    def _grow(self, now: float, missing: int, room: int, others: int, orders: Orders) -> None:
        """Ask for devices to grow to, if they are free and no others wait; drop old requests for such devices."""
        asked = [unit for unit in self.asked() if unit.growth]
        for unit in asked:
            if others or missing <= 0 or now - unit.asked >= GROWTH_WAIT_S:
                self._drop(unit, orders)
        if others or now < self._grow_after or asked:
            return
        for _ in range(min(missing, room)):
            if not self.may_ask(1):
                break
            self._ask(now, 1, True, orders)

    def _yield(self, now: float, grown: tuple[int, ...], others: int, orders: Orders) -> None:
        """Begin to give back devices that trials have grown to: the number that others wait for."""
        if self._others_since is None or now - self._others_since < YIELD_AFTER_S:
            return
        leaving = sum(len(unit.devices) for unit in self.units if unit.leaving_since is not None)
        for unit in reversed(self.units):
            if leaving >= others:
                break
            if unit.there and unit.leaving_since is None and len(unit.devices) == 1 and unit.devices[0] in grown:
                unit.leaving_since = now
                orders.leave.append(unit.devices[0])
                leaving += 1
        if orders.leave:
            self._grow_after = now + self._pause
            self._pause *= 2

    def _ask(self, now: float, size: int, growth: bool, orders: Orders) -> None:
        unit = Unit(tuple(number for number, _ in zip(self._free_numbers(), range(size), strict=False)), now, growth)
        self.units.append(unit)
        orders.ask.append(unit)

    def _free_numbers(self) -> Iterator[int]:
        """The numbers that no device has, ascending: a report then has a row for each number that was ever needed."""
        taken = {device for unit in (*self.units, *self.ending) for device in unit.devices}
        number = 0
        while True:
            if number not in taken:
                yield number
            number += 1

    def _drop(self, unit: Unit, orders: Orders) -> None:
        self.forget(unit)
        if unit.there:
            self.ending.append(unit)
        orders.drop.append(unit)
