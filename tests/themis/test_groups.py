"""Groups that have to be there and to be gone, `Groups`, over a stand-in of Ray on a virtual clock."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from themis_bridge import messages as m
from themis_bridge.shell import groups
from themis_bridge.shell.groups import CREATE_S, PAUSE_S, Wanted

WANTED = Wanted({"GPU": 1.0}, "node:one")
#: Seconds of calls in a tick, and between two ticks.
CALLS_S, TICK_S = 0.02, 0.1


class Ray:
    """Each call takes ``seconds``. ``fails``: each call raises. ``broken``: each look at the groups of these GPUs does,
    after ``blocks`` seconds.

    The machine has so many ``rooms``, and none while it is ``full``. They go to groups in the order in which those were
    asked for.
    """

    def __init__(self, monkeypatch, seconds=0.0, rooms=10**6):
        self.now, self.seconds, self.full, self.fails = 0.0, seconds, False, False
        self.rooms, self.made, self.broken, self.blocks = rooms, set(), (), 0.0
        self.gone: set[tuple[str, str, int]] = set()
        self.asked: list[tuple[str, str, int]] = []
        ray = SimpleNamespace(
            REMOVED="REMOVED",
            id_of=lambda group: group[1],
            CREATED="CREATED",
            reserve=self._reserve,
            find=lambda key: self._wait(None),
            state=lambda group: self._state(self._wait(group)),
            remove=lambda group: self._wait(self.gone.add(group)),
        )
        monkeypatch.setattr(groups, "reservations", ray)
        self.groups = groups.Groups(lambda: self.now)
        self.wanted = {}

    def _wait(self, answer):
        self.now += self.seconds
        if self.fails:
            raise RuntimeError("injected")
        return answer

    def _state(self, key):
        if key[1] in self.broken:
            self.now += self.blocks
            raise RuntimeError("injected")
        here = [each for each in self.asked if each not in self.gone]
        self.made = {each for each in here if each in self.made}
        for each in [] if self.full else here:
            if len(self.made) < self.rooms:
                self.made.add(each)
        return "REMOVED" if key in self.gone else "CREATED" if key in self.made else "PENDING"

    def _reserve(self, key, bundle, tie):
        self.gone.discard(key)
        self.asked = [each for each in self.asked if each != key]
        self.asked.append(key)
        return self._wait(key)

    def reserve(self, number):
        self.wanted |= {("a", f"g{token}", token): WANTED for token in range(number)}

    def run(self, seconds=60.0):
        """Ticks, until nothing is owed or ``seconds`` are over."""
        events, until = self.work(), self.now + seconds
        while self.groups.owed and self.now < until:
            self.now += TICK_S
            events += self.work()
        return events

    def work(self):
        """What comes of a tick."""
        return self.groups.work(self.wanted, CALLS_S)


@pytest.mark.parametrize(("number", "seconds"), [(1024, 0.001), (8, 1.0), (1, 6.0)])
def test_a_reservation_that_ray_can_make_is_made_however_busy_the_arbiter_is(number, seconds, monkeypatch):
    ray = Ray(monkeypatch, seconds)
    ray.reserve(number)
    events = ray.run()
    assert len(events) == number and all(each.group for each in events)


def test_a_group_that_an_earlier_arbiter_asked_for_has_its_time_from_the_first_look(monkeypatch):
    ray = Ray(monkeypatch)
    ray.full = True
    ray.asked.append(("a", "g0", 0))
    ray.groups.found(*ray.asked, *ray.asked, made=False)
    ray.reserve(1)
    ray.now += CREATE_S + 1
    assert ray.work() == []
    ray.full = False
    assert ray.run() == [m.Reservation("g0", 0, "g0")]


@pytest.mark.parametrize("fault", ["full", "fails"])
def test_a_reservation_that_ray_cannot_make_is_told_once_and_waits(fault, monkeypatch):
    ray = Ray(monkeypatch)
    setattr(ray, fault, True)
    ray.reserve(1)
    assert ray.run(CREATE_S - 1) == []
    assert ray.run(2.2) == [m.Reservation("g0", 0)], "after five to six seconds"
    assert ray.run() == [] and (ray.groups.trouble != "") == (fault == "fails")
    setattr(ray, fault, False)
    assert ray.run() == [m.Reservation("g0", 0, "g0")] and ray.now < 66 + PAUSE_S + 1
    ray.wanted = {}
    assert ray.run() == [] and ray.gone and not ray.groups.trouble


def test_a_call_fails_for_as_long_as_it_raises_and_not_since_the_group_was_asked_for(monkeypatch):
    # Seen: Ray was said to fail for an hour, when one look at a group that had waited for an hour raised.
    ray = Ray(monkeypatch)
    ray.full = True
    ray.reserve(1)
    ray.run(3600)
    ray.fails = True
    ray.run(PAUSE_S + 1)
    assert re.search(r"for [0-6] s \(RuntimeError", ray.groups.trouble)
    ray.wanted = {}
    ray.run(2)
    assert re.search(r"removed for [0-2] s \(RuntimeError", ray.groups.trouble)


def test_groups_whose_calls_block_leave_time_to_others(monkeypatch):
    # Seen: two of them took the whole time of each tick, in turn, and no other group was ever attended to.
    ray = Ray(monkeypatch)
    ray.reserve(2)
    ray.run(1.0)
    ray.broken, ray.blocks = ("g0", "g1"), PAUSE_S + 1
    ray.wanted = {("c", "g2", 9): Wanted({"GPU": 1.0}, "node:two")}
    assert ray.run(4 * ray.blocks) == [m.Reservation("g2", 9, "g2")]
    ray.broken = ()
    ray.run(2 * ray.blocks)
    assert ray.groups.owed == 0


def test_a_reservation_has_no_room_only_when_ray_has_been_asked_for_it_for_that_long(monkeypatch):
    # Seen: one that was taken back, since another GPU of its machine changed hands, was told "no room" at once.
    ray = Ray(monkeypatch, rooms=1)
    ray.reserve(2)
    ray.run(1.0)
    ray.broken, ray.wanted = ("g0",), {("b", "g0", 7): WANTED, ("a", "g1", 1): WANTED}
    assert ray.run(30.0) == []
    ray.broken = ()
    assert ray.run(CREATE_S - 2) == [m.Reservation("g0", 7, "g0")]
    assert ray.run(CREATE_S) == [m.Reservation("g1", 1)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.3, 3.0, 9.0])), max_size=10))
def test_whatever_changes_hands_the_room_of_a_group_is_its_heirs(changes):
    """Something outside uses two of the four GPUs. ``changes``: a GPU that changes hands, and seconds after that."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        ray = Ray(monkeypatch, rooms=2)
        ray.reserve(4)
        ray.run(9.0)
        had = {gpu for _, gpu, _ in ray.made}
        for token, (number, seconds) in enumerate(changes, 10):
            ray.wanted = {key: need for key, need in ray.wanted.items() if key[1] != f"g{number}"}
            ray.wanted["b", f"g{number}", token] = WANTED
            ray.run(seconds)
            there = [gpu for _, gpu, _ in set(ray.asked) - ray.gone]
            assert len(there) == len(set(there)), "a GPU has two groups"
        ray.run(9.0)
        assert {gpu for _, gpu, _ in ray.made} == had and ray.made <= ray.wanted.keys()
