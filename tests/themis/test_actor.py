"""The arbiter's process without Ray: what it remembers of jobs, and when it writes its books."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import replace

import pytest

from tests.themis.cluster import Job
from tests.themis.shell_world import World
from themis_bridge import messages as m
from themis_bridge.errors import ThemisError
from themis_bridge.fairness import JobKind
from themis_bridge.shell import actor, control, reservations

#: Books of two apps, of which "a" holds three GPUs. One of them is promised to "b".
BOOKS = """
{"settings": {"f": 0.8, "lease_s": 100, "notice_s": 10, "quotas": {"b": 2}, "weights": {"a": 2.0}},
 "apps": {
  "a": {"session": "s", "joined": 0.0, "heard": 30.0, "crowd": 35.0, "rho": 1.0, "rho_gpus": 3, "served": 5.0,
   "speed": 1.0, "useful": 3, "least": 1.0, "doubt": 1.0, "tokens": [1, 2, 3], "at": 25.0, "ends": 975.0,
   "whole": 1000.0},
  "b": {"session": "s", "joined": 25.0, "heard": 30.0, "crowd": 10.0, "useful": 2, "wanted": 2, "whole": 10.0,
   "bundle": {"CPU": 1.0, "memory": 4.0}}},
 "leases": {"token": 3, "leases": [
  {"gpu": "m-0", "app": "a", "token": 1, "expires": 35.0, "heir": "b", "ending": true},
  {"gpu": "m-1", "app": "a", "token": 2, "expires": 133.3}, {"gpu": "m-2", "app": "a", "token": 3, "expires": 66.6}]},
 "rounds": 2, "clock": 30.0, "format": 5}
"""


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Starts an `ArbiterActor` that does nothing by itself. Arguments: the number of cores, and of `World`."""
    return lambda cores, **more: World(monkeypatch, tmp_path, (cores,), {}, **more)


@pytest.fixture
def world(start):
    """A first arbiter of two cores that no job uses."""
    return start(2)


def heard(app: str, number: int, *more, session: str = "one", report: m.Report | None = None, **other) -> m.Heartbeat:
    """What an app of single cores says."""
    return m.Heartbeat(app, session, number, report or m.Report(), *more, **{"bundle": {"CPU": 1.0}, **other})


def books(world: World) -> dict:
    """The books at the end of a tick."""
    world.actor._flush()
    return json.loads(world.books.read_text())


def held(number: int) -> list[tuple[str, str, int]]:
    """The reservations of "a" in the books above, the first ones."""
    return [("a", f"m-{i}", i + 1) for i in range(number)]


@pytest.mark.parametrize(
    "name", ["themis/a/b/c", "themis/a/b/²", "themis/a/b/+9", "themis/a/b/07", "themis/a/b/-1", "themis//b/7"]
)
@pytest.mark.parametrize("state", ["REMOVED", "CREATED"])
def test_a_group_with_a_name_that_no_arbiter_gives_is_somebody_elses(name, state, world):
    group = world._placement_group([], name=name)
    world.table[group.id.hex()]["state"] = state
    assert actor.ArbiterActor({}, "CPU", "head") and reservations.found() == ({}, 0)
    assert world.table[group.id.hex()]["state"] == state


@pytest.mark.parametrize(
    "message",
    [
        heard("evil", 2, report=m.Report(done=math.nan)),
        heard("evil", 2, left=(("m-0", 1),)),
        heard("evil", (1 << 63) - 1, "digest", report=m.Report(endless=100_000)),
        heard("evil", 2, report=m.Report(((JobKind(100_000, 1 << 62, 1e14, 1e14),),), 1e14, 1)),
        heard("evil", 2, user="a", together=1024),
        heard("a", 1),
        m.Gpus(()),
        m.Reservation("m-0", 1),
        None,
    ],
)
def test_whatever_an_app_sends_it_harms_nobody_else(message, world):
    world.actor.hear(heard("evil", 1))
    world.actor.hear(heard("dead", 1, life="ff"))
    world.join("a", Job(2))
    with contextlib.suppress(ThemisError):
        world.actor.hear(message)
    assert set(world.actor._arbiter.state.gpus) == {"m-0", "m-1"}
    world.run(10.0)
    assert "dead" not in world.actor._arbiter.state.apps
    world.run(70.0)
    assert not world.unused() and set(world.actor._arbiter.state.apps) >= {"a"}
    assert world.actor.status()["failed_rounds"] == 0 and not world.actor.status()["trouble"]


@pytest.mark.parametrize("says_so", [True, False])
def test_the_heir_of_an_app_that_goes_has_its_gpu_under_a_quota(says_so, start, caplog):
    # Seen: the leases of an app that was gone were counted to a user that nobody knew, and no lease began or ended.
    text = BOOKS.replace('s": 35', 's": 99').replace('"s"', '"a/1"', 1).replace('"s"', '"b/1"')
    world = start(3, held=held(3), text=text)
    world.join("b", Job(2))
    if says_so:
        world.actor.leave("a", "a/1")
    world.run(60.0)
    assert [app for app, _, _ in world.there()] == ["b", "b"] and not caplog.text


@pytest.mark.parametrize("changes", [{"life": "no hex"}, {"app": "a/b"}, {"bundle": {"GPU": 1.0}}])
def test_a_job_that_cannot_be_is_refused(changes, world):
    with pytest.raises(ValueError):
        world.actor.hear(replace(heard("evil", 1), **changes))
    assert not world.actor._arbiter.state.apps


def test_an_arbiter_of_another_unit_is_refused_before_ray_is_asked():
    with pytest.raises(ThemisError, match=r"unit='gpu': an arbiter leases 'GPU' or 'CPU'"):
        control.start("gpu")


def test_an_app_that_ray_cannot_be_asked_for_bars_no_other(world):
    def call(name, real, args):
        if name == "placement_group" and "/evil/" in str(args):
            raise UnicodeEncodeError("utf-8", "planet", 0, 1, "no such resource")
        return real()

    world.call = call
    world.join("evil", Job(2))
    world.agents["evil"].bundle["planet"] = 1.0
    world.run(3.0)
    assert {lease.app for lease in world.actor._arbiter.state.leases} == {"evil"}
    world.join("a", Job(2))
    world.run(30.0)
    assert [app for app, _, _ in world.there()] == ["a", "a"]


def test_a_heartbeat_does_not_rewrite_the_books(world):
    assert world.actor.hear(heard("a", 1)) is None, "nothing is told before it is written"
    world.run(1.1)
    before = books(world)
    world.now += 3.0
    told = world.actor.hear(heard("a", 2))
    assert isinstance(told, m.Leases) and world.actor.hear(heard("a", 3, told.digest)) is None
    assert books(world) == before
    world.actor.configure({"lease_s": 100.0})
    assert books(world)["settings"]["lease_s"] == 100.0


GOOD = json.loads(BOOKS)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (BOOKS[:700], "JSONDecodeError"),
        ("[]", "they are a list"),
        *((json.dumps({**GOOD, "format": each}), f"another version of FluidTune: format {each}") for each in (4, 99)),
        (json.dumps({**GOOD, "settings": {"lease_s": -1}}), "lease_s=-1"),
        (json.dumps({**GOOD, "apps": {"a": {**GOOD["apps"]["a"], "planet": "x"}}}), "planet"),
        (json.dumps({**GOOD, "clock": None}), "NoneType"),
        *(
            (json.dumps({**GOOD, "apps": {"a": {**GOOD["apps"]["a"], name: value}}}), f"{name}=")
            for name, value in (("joined", "soon"), ("rho", [1.0]), ("together", True), ("held_up", [1.0]))
        ),
        (json.dumps({**GOOD, "away": {"b": {**GOOD["apps"]["b"], "bundle": {"CPU": "4"}}}}), "bundle="),
        (
            json.dumps({**GOOD, "leases": {"leases": [{**GOOD["leases"]["leases"][0], "expires": None}]}}),
            "expires=None",
        ),
    ],
)
def test_books_that_cannot_be_read_are_kept_aside(text, why, start, caplog):
    world = start(3, held=held(2), text=text)
    assert world.books.with_suffix(".kept").read_text() == text
    assert why in caplog.text and "head.kept" in caplog.text
    # What the placement groups tell: the holder keeps its GPUs, and tokens go on above all that existed.
    assert world.actor.hear(heard("a", 1, session="s")) is None, "nothing is told before it is written"
    leases = world.actor.status()["apps"]["a"]["leases"]
    assert {gpu: lease["token"] for gpu, lease in leases.items()} == {"m-0": 1, "m-1": 2}
    assert books(world)["leases"]["token"] == 2
