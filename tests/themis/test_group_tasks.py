"""What the arbiter owes to Ray, `GroupTasks`, over a stand-in of Ray on a virtual clock."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from themis_bridge import messages as m
from themis_bridge.shell import group_tasks
from themis_bridge.shell.group_tasks import CREATE_S, GroupTasks, Wanted

WANTED = Wanted({"GPU": 1.0}, "node:one")
#: Seconds of calls in a tick, and between two ticks.
CALLS_S, TICK_S = 0.02, 0.1


class Ray:
    """Each call takes ``seconds``. A group can be made at once, unless ``full``. ``fails``: each `reserve` raises."""

    def __init__(self, monkeypatch, seconds=0.0):
        self.now, self.seconds, self.full, self.fails = 0.0, seconds, False, False
        self.gone: set[tuple[str, str, int]] = set()
        ray = SimpleNamespace(
            REMOVED="REMOVED",
            CREATED="CREATED",
            reserve=self._reserve,
            find=lambda key: self._wait(None),
            state=lambda group: self._wait("REMOVED" if group in self.gone else "PENDING" if self.full else "CREATED"),
            remove=lambda group: self._wait(self.gone.add(group)),
        )
        monkeypatch.setattr(group_tasks, "reservations", ray)
        #: The apps that ask for as much as WANTED.
        self.others = frozenset()
        self.tasks = GroupTasks(lambda: self.now, threading.RLock(), lambda bundle: self.others)

    def _wait(self, answer):
        self.now += self.seconds
        return answer

    def _reserve(self, key, bundle, tie):
        self._wait(None)
        if self.fails:
            raise RuntimeError("injected")
        return key

    def reserve(self, number):
        for token in range(number):
            self.tasks.reserve(("a", f"g{token}", token), WANTED)

    def run(self, seconds=60.0):
        """Ticks, until nothing is owed or ``seconds`` are over."""
        events, until = [], self.now + seconds
        while self.tasks.owed() and self.now < until:
            events += self.tasks.work(CALLS_S)
            self.now += TICK_S
        return events


@pytest.mark.parametrize(("number", "seconds"), [(1024, 0.001), (8, 1.0), (1, 6.0)])
def test_a_reservation_that_ray_can_make_is_made_however_busy_the_arbiter_is(number, seconds, monkeypatch):
    ray = Ray(monkeypatch, seconds)
    ray.reserve(number)
    events = ray.run()
    assert len(events) == number and {type(each) for each in events} == {m.Reserved}


def test_a_reservation_that_waited_for_its_first_call_is_not_given_up(monkeypatch):
    ray = Ray(monkeypatch)
    ray.reserve(1)
    ray.now += CREATE_S + 1
    assert ray.tasks.work(CALLS_S) == []
    ray.now += CREATE_S + 1
    assert ray.tasks.work(CALLS_S) == [m.Reserved("g0", 0)]


def test_a_group_that_an_earlier_arbiter_asked_for_has_its_time_from_the_first_look(monkeypatch):
    ray = Ray(monkeypatch)
    ray.full = True
    ray.tasks.found["a", "g0", 0] = ("a", "g0", 0)
    ray.reserve(1)
    ray.now += CREATE_S + 1
    assert ray.tasks.work(CALLS_S) == []
    ray.full = False
    assert ray.run() == [m.Reserved("g0", 0)]


@pytest.mark.parametrize("fault", ["full", "fails"])
def test_a_reservation_that_ray_cannot_make_is_given_up_after_its_time(fault, monkeypatch):
    ray = Ray(monkeypatch)
    setattr(ray, fault, True)
    ray.reserve(1)
    ray.now += CREATE_S + 1
    began = ray.now
    events = ray.run()
    assert events == [m.ReserveFailed("g0", 0), m.Removed("g0", 0)]
    assert CREATE_S <= ray.now - began < 2 * CREATE_S


@pytest.mark.parametrize("fault", ["full", "fails", "gone"])
def test_only_a_group_that_waits_shows_anything_of_other_apps(fault, monkeypatch):
    ray = Ray(monkeypatch)
    ray.others = frozenset({"b"})
    if fault == "gone":
        ray.gone.add(("a", "g0", 0))
    else:
        setattr(ray, fault, True)
    ray.reserve(1)
    failed, _ = ray.run()
    assert failed == m.ReserveFailed("g0", 0, frozenset({"b"}) if fault == "full" else frozenset())
