"""How many devices a job holds on demand: the rules under random demands, on a stand-in for the cluster. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from fluidtune.cluster.devices.holding import (
    GROW_AGAIN_S,
    GROWTH_WAIT_S,
    LEAVE_S,
    SPARE_S,
    YIELD_AFTER_S,
    Holding,
    Orders,
)
from fluidtune.engine import DeviceDemand


@dataclass
class World:
    """A job on a cluster of ``room`` free devices: Ray makes what is asked for, oldest first."""

    room: int
    most: int | None = None
    most_asked: int = 100
    now: float = 0.0
    used: set[int] = field(default_factory=set)
    others: int = 0

    def __post_init__(self) -> None:
        self.holding = Holding(self.most, self.most_asked)

    def decide(self, demand: DeviceDemand) -> Orders:
        orders = self.holding.decide(self.now, demand, self.used.__contains__, max(0, self.room), self.others)
        for unit in orders.drop:
            self.room += len(unit.devices) if unit.there else 0
            self.used -= set(unit.devices)
            if unit.there:
                self.holding.ended(unit)
        for unit in self.holding.asked():
            if len(unit.devices) <= self.room:
                self.room -= len(unit.devices)
                self.holding.came(unit)
        return orders

    @property
    def there(self) -> int:
        return sum(len(unit.devices) for unit in self.holding.units if unit.there)

    @property
    def asked(self) -> int:
        return len(self.holding.asked())


def waiting(trials: int, size: int = 1) -> DeviceDemand:
    return DeviceDemand({size: trials} if trials else {})


steps = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from([1, 2, 4]), st.integers(1, 6), max_size=3),  # trials that wait, by size
        st.integers(0, 6),  # growing
        st.integers(0, 4),  # others
        st.floats(0, 40),  # seconds until the next look
        st.integers(-4, 4),  # what others take of the cluster or give back
        st.lists(st.booleans(), max_size=30),  # which idle units trials start on, which busy ones they leave
    ),
    max_size=40,
)


@given(steps, st.integers(0, 12), st.none() | st.integers(1, 10), st.integers(1, 8))
@settings(max_examples=300)
def test_whatever_happens(script: list, room: int, most: int | None, most_asked: int) -> None:
    world = World(room, most, most_asked)
    asked_since: dict[object, float] = {}
    for starting, growing, others, seconds, shift, starts in script:
        world.now += seconds
        world.room += shift if world.room + shift >= 0 else 0
        world.others = others
        there_before = {unit for unit in world.holding.units if unit.there}
        idle_before = {unit for unit in there_before if world.used.isdisjoint(unit.devices)}
        grown = tuple(sorted(world.used))[1:]
        demand = DeviceDemand(starting, 0 if starting else growing, grown)
        holding = world.holding
        orders = holding.decide(world.now, demand, world.used.__contains__, world.room, others)

        numbers = [device for unit in (*holding.units, *holding.ending) for device in unit.devices]
        assert len(numbers) == len(set(numbers)), "two devices of one number"
        assert most is None or len(numbers) <= most
        for_trials = [unit for unit in holding.asked() if not unit.growth]
        assert len(holding.asked()) <= max(most_asked, len([unit for unit in holding.asked() if unit.growth]))
        for size in (1, 2, 4):
            idle = [u for u in holding.units if u in idle_before and len(u.devices) == size and u.leaving_since is None]
            mine = [unit for unit in for_trials if len(unit.devices) == size]
            assert len(mine) <= max(0, starting.get(size, 0) - len(idle)), "a request for which no trial waits"
        for unit in orders.drop:
            busy = unit.there and not world.used.isdisjoint(unit.devices)
            assert not busy or world.now - unit.leaving_since >= LEAVE_S, "a device was taken from a trial"
        for unit in orders.ask:
            asked_since[unit] = world.now
            assert not (unit.growth and (starting or others)), "growth while somebody waits"
        for unit in holding.asked():
            if unit.growth and not starting:
                assert world.now - asked_since[unit] < GROWTH_WAIT_S, "growth waits in Ray's queue"
        assert set(orders.leave) <= set(grown)

        if not orders.drop:  # what is dropped here may make room for what was not asked for
            again = holding.decide(world.now, demand, world.used.__contains__, world.room, others)
            assert again == Orders(), "the same question has the same answer"

        for unit in orders.drop:
            world.room += len(unit.devices) if unit.there else 0
            world.used -= set(unit.devices)
            if unit.there and seconds < 20:  # else its worker still ends, as far as anybody knows
                holding.ended(unit)
        for unit in holding.asked():
            if len(unit.devices) <= world.room:
                world.room -= len(unit.devices)
                holding.came(unit)
        for unit, start in zip(list(holding.units), starts, strict=False):
            if unit.there:
                (world.used.update if start else world.used.difference_update)(unit.devices)

    # The trials are over, and nobody else waits: all is given back.
    world.holding.ending.clear()
    world.used.clear()
    world.others = 0
    for _ in range(3):
        world.decide(DeviceDemand())
        world.now += max(SPARE_S, LEAVE_S)
    world.decide(DeviceDemand())
    assert world.holding.units == []


def test_idle_devices_of_another_size_make_room_for_a_gang() -> None:
    world = World(2, most=2)
    world.decide(waiting(2))
    world.decide(waiting(1, size=2))
    assert world.there == 2 and world.asked == 0
    world.now += SPARE_S
    world.decide(waiting(1, size=2))
    world.decide(waiting(1, size=2))
    assert [unit.devices for unit in world.holding.units if unit.there] == [(0, 1)]


def test_a_device_between_two_trials_is_kept() -> None:
    world = World(1)
    world.decide(waiting(1))
    for _ in range(5):
        world.used = {0}
        world.decide(waiting(0))
        world.used = set()
        world.decide(waiting(0))
        world.now += SPARE_S - 0.1
        assert not world.decide(waiting(0)).drop
    world.now += SPARE_S
    assert [unit.devices for unit in world.decide(waiting(0)).drop] == [(0,)]


def test_a_device_is_kept_for_a_trial_that_is_on_its_way_to_it() -> None:
    world = World(room=4)
    world.decide(waiting(1))
    world.used.add(0)
    world.decide(DeviceDemand(growing=1))
    assert world.there == 2
    for _ in range(3):
        world.now += SPARE_S
        world.decide(DeviceDemand(claimed=1))
    assert world.there == 2
    world.decide(DeviceDemand(growing=1, claimed=1))
    assert world.there == 3, "what has a claim is no room for another trial to grow"
    world.used.add(2)
    for _ in range(2):
        world.decide(DeviceDemand())
        world.now += SPARE_S
    world.decide(DeviceDemand())
    assert world.there == 2


def test_growth_that_trials_do_not_use_is_given_back_and_not_tried_again_soon() -> None:
    world = World(2)
    grow = DeviceDemand({}, growing=2)
    world.decide(grow)
    assert world.there == 2
    world.decide(grow)
    world.now += SPARE_S
    assert len(world.decide(grow).drop) == 2
    world.now += GROW_AGAIN_S - 1
    assert not world.decide(grow).ask
    world.now += 1
    assert len(world.decide(grow).ask) == 2


def test_the_pause_of_growth_doubles_each_time_that_others_come() -> None:
    world = World(2)
    world.decide(waiting(2))
    pauses = []
    for _ in range(3):
        world.used = {0, 1}
        grown = DeviceDemand({}, growing=1, grown=(1,))
        world.others = 1
        world.decide(grown)
        world.now += YIELD_AFTER_S
        assert world.decide(grown).leave == [1]
        world.used = {0}
        world.decide(DeviceDemand({}, growing=1))
        world.others, began = 0, world.now
        while not world.decide(DeviceDemand({}, growing=1)).ask:
            world.now += 1.0
        pauses.append(world.now - began)
    assert pauses == [GROW_AGAIN_S, 2 * GROW_AGAIN_S, 4 * GROW_AGAIN_S]
