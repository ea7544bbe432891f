"""The arbiter's process without Ray: what it remembers of jobs, and when it writes its books."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from dataclasses import asdict, replace
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from tests.themis.cluster import Job
from tests.themis.shell_world import World
from themis_bridge import messages as m
from themis_bridge.app_record import AppRecord
from themis_bridge.errors import ThemisError
from themis_bridge.settings import Settings
from themis_bridge.shell import actor, books_file, reservations

#: Books as revision 2ce470d wrote them: "b" has joined beside "a", and one GPU of "a" was recalled for
#: it.
BOOKS_OF_2CE470D = """
{"settings": {"f": 0.8, "lease_s": 100, "notice_s": 10, "answer_s": 2, "patience_s": 30, "pace_s": 5.0,
  "quotas": {"b": 2}, "weights": {"a": 2.0}},
 "apps": {
  "a": {"session": "s", "joined": 0.0, "heard": 30.0, "crowd": 35.0, "rho": 1.0, "served": 5.0, "speed": 1.0,
   "useful": 3, "least": 1.0, "doubt": 1.0, "tokens": [1, 2, 3], "at": 25.0, "ends": 975.0, "whole": 1000.0,
   "held_up": [0.0, 0.0], "free": [0.0, 0.0]},
  "b": {"session": "s", "joined": 25.0, "heard": 30.0, "crowd": 10.0, "rho": 100.0, "served": 0.0, "speed": 0.0,
   "useful": 2, "least": Infinity, "doubt": 1.0, "tokens": [], "at": 0.0, "ends": 2000.0, "whole": 10.0,
   "held_up": [0.0, 0.0], "free": [0.0, 0.0]}},
 "leases": {"token": 3, "leases": [
  {"gpu": "m-0", "app": "a", "token": 1, "expires": 35.0, "closing": false, "heir": "b", "ending": true,
   "recalled": false, "leftover": false, "heir_leftover": false},
  {"gpu": "m-1", "app": "a", "token": 2, "expires": 133.3, "closing": false, "heir": null, "ending": false,
   "recalled": false, "leftover": false, "heir_leftover": false},
  {"gpu": "m-2", "app": "a", "token": 3, "expires": 66.6, "closing": false, "heir": null, "ending": false,
   "recalled": false, "leftover": true, "heir_leftover": false}]},
 "rounds": 2, "clock": 30.0, "epoch": 0, "bundles": {"a": {"CPU": 1.0}, "b": {"CPU": 1.0, "memory": 4.0}}}
"""


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Starts an `ArbiterActor` that does nothing by itself. Arguments: the number of cores, and of `World`."""
    return lambda cores, **more: World(monkeypatch, tmp_path, gpus=cores, settings={}, **more)


@pytest.fixture
def world(start):
    """A first arbiter of two cores that no job uses."""
    return start(2)


def books(world: World) -> dict:
    """The books at the end of a tick."""
    world.actor._flush()
    return json.loads(world.books.read_text())


def held(number: int) -> list[tuple[str, str, int]]:
    """The reservations of "a" in the books above, the first ones."""
    return [("a", f"m-{i}", i + 1) for i in range(number)]


def test_books_of_an_earlier_revision_start_the_arbiter(start):
    world = start(3, held=held(3), text=BOOKS_OF_2CE470D)
    before, after = json.loads(BOOKS_OF_2CE470D), books(world)
    # What those books say is kept; fields that are new since then have their defaults.
    apps = {name: {**asdict(AppRecord("", 0.0, 0.0)), **app} for name, app in before["apps"].items()}
    apps = json.loads(json.dumps(apps))
    settings = {**asdict(Settings()), **before["settings"]}
    new = {"settings": settings, "apps": apps, "away": {}, "doubts": {}, "usage": {}, "epoch": 1, "format": 1}
    assert after == {**before, **new}
    status = world.actor.status()
    assert status["apps"]["a"]["rho"] == 1.0 and status["settings"]["quotas"] == {"b": 2}
    assert {gpu: lease["token"] for gpu, lease in status["apps"]["a"]["leases"].items()} == {
        "m-0": 1,
        "m-1": 2,
        "m-2": 3,
    }
    # The GPU that was promised to "b" goes to "b" when "a" leaves it, under a new token.
    world.actor.exchange("a", "s", [m.Release("a", "s", "m-0", 1)])
    world.actor._handle(m.Removed("m-0", 1))
    assert [(lease["gpu"], lease["app"], lease["token"]) for lease in books(world)["leases"]["leases"]][-1:] == [
        ("m-0", "b", 4)
    ]


@pytest.mark.parametrize(
    "name", ["themis/a/b/c", "themis/a/b/²", "themis/a/b/+9", "themis/a/b/07", "themis/a/b/-1", "themis//b/7"]
)
@pytest.mark.parametrize("state", ["REMOVED", "CREATED"])
def test_a_group_with_a_name_that_no_arbiter_gives_is_somebody_elses(name, state, world):
    group = world._placement_group([], name=name)
    world.table[group.id.hex()]["state"] = state
    token = reservations.newest_token()
    assert actor.ArbiterActor({}, "CPU", "head") and token == 0
    assert world.table[group.id.hex()]["state"] == state and not reservations.found()


def test_a_job_that_starts_again_changed_gets_what_it_asks_for_now(world):
    world.actor.join("a", "one", {"CPU": 1.0})
    world.actor.join("a", "other", {"CPU": 1.0, "disk": 1.0})
    assert books(world)["bundles"] == {"a": {"CPU": 1.0}}, "it was refused"
    world.actor._handle(m.DriverDied("a", "one"))
    world.actor.join("a", "two", {"CPU": 1.0, "memory": 4.0})
    assert books(world)["bundles"] == {"a": {"CPU": 1.0, "memory": 4.0}}


def test_a_namesake_is_refused_in_the_call_in_which_it_joins(world):
    world.actor.join("a", "one", {"CPU": 1.0})
    for silent, final in ((1.0, True), (15.0, False)):
        world.now += silent
        world.actor._handle(m.Tick())
        world.actor.join("a", "two", {"CPU": 1.0})
        refused = world.actor.exchange("a", "two", [m.Heard("a", "two")])
        assert refused and all((each.final, each.waits) == (final, not final) for each in refused)


EVIL = ("evil", "evil/1")
#: A report that can be true.
HONEST = m.Report(1.0, 2, best=1.0, left=1.0, whole=1.0)


@pytest.mark.parametrize(
    "event",
    [
        m.AppJoined(*EVIL, together=0),
        m.AppJoined(*EVIL, together="2"),
        m.AppJoined(*EVIL, user=["anna"]),
        m.AppJoined(*EVIL, life="no hex"),
        m.AppJoined("evil", None),
        m.Heard(*EVIL, version=(math.inf, 0)),
        m.Heard(*EVIL, version=(10**5000, 0)),
        m.Heard(*EVIL, version=((1 << 63) - 1, 0)),
        m.Heard(*EVIL, version="12"),
        m.Release(*EVIL, ["m-0"], 1),
        m.RhoAnswer(*EVIL, 1, m.Report(1e9, 2, best=1e9, left=1.0, whole=1.0, leases=5)),
        m.RhoAnswer(*EVIL, 1, m.Report(10**308, 2, best=10**308, left=1.0, whole=1.0, fair=10**308)),
        m.RhoAnswer(*EVIL, 1, m.Report(1.0, 2, left=1.0, whole=1.0, ends=10**400)),
        *(
            m.RhoAnswer(*EVIL, 1, replace(HONEST, **{name: kind(1.0)}))
            for name in ("rho", "left", "whole")
            for kind in (Fraction, Decimal, np.float32, str)
        ),
        m.RhoAnswer(*EVIL, 1, replace(HONEST, useful=np.int64(2))),
        m.Release(*EVIL, "\ud800", 1),
        m.Release(*EVIL, "m" * 10**6, 1),
        m.AppJoined(*EVIL, together=1 << 20_000),
        m.GpuLeft("m-0"),
        m.ReserveFailed("m-0", 1),
    ],
)
def test_a_message_that_cannot_be_true_harms_nobody_else(event, world):
    world.actor.join(*EVIL, {"CPU": 1.0})
    world._lives["dead"] = world._lives["evil"] = "ff"
    world.actor.join("dead", "dead/1", {"CPU": 1.0}, life="ff")
    before = world.actor._arbiter.state.epoch
    with contextlib.suppress(Exception):
        world.actor.exchange(*EVIL, [event])
    assert set(world.actor._arbiter.state.gpus) == {"m-0", "m-1"}
    assert world.actor._arbiter.state.apps["evil"].rho is None
    world.join("a", Job(2))
    world.run(30.0)
    assert "dead" not in world.actor._arbiter.state.apps
    assert not world.unused() and set(world.actor._arbiter.state.apps) >= {"a"}
    assert world.actor.status()["failed_rounds"] == 0 and world.actor._arbiter.state.epoch == before
    assert books(world)["epoch"] == before


@pytest.mark.parametrize(
    "changes",
    [
        {"bundle": {"CPU": 1.0, "memory": "4"}},
        {"bundle": {"CPU": 1.0, 4: 4.0}},
        {"bundle": {"CPU": 1.0, "memory": {4}}},
        {"bundle": {"CPU": 1.0, "memory": -1.0}},
        {"bundle": {"CPU": 1.0, "memory": math.nan}},
        {"bundle": ["CPU"]},
        {"together": 0},
        {"together": "2"},
        {"together": 1 << 20_000},
        {"together": 2048},
        {"user": "\ud800"},
        {"user": "a" * 10**6},
        {"app": "\ud800"},
        {"bundle": {"CPU": 1.0, "\ud800": 0.0}},
        {"bundle": {"CPU": 1.0, "memory": Fraction(4)}},
        {"bundle": {"CPU": 1.0, "memory": 1e300}},
        {"bundle": {"CPU": 1.0} | {f"r{number}": 0.0 for number in range(1000)}},
        {"user": ["anna"]},
        {"user": 5},
        {"life": "no hex"},
        {"life": 5},
        {"session": None},
        {"app": 5},
        {"app": "a/b"},
    ],
)
def test_a_join_that_cannot_be_true_is_refused(changes, world):
    with pytest.raises(ValueError):
        world.actor.join(**{"app": "evil", "session": "evil/1", "bundle": {"CPU": 1.0}, **changes})
    assert not world.actor._arbiter.state.apps and not world.actor._bundles


@pytest.mark.parametrize("events", [itertools.repeat(m.Heard(*EVIL)), [m.Heard(*EVIL)] * 10**6, None])
def test_what_is_no_list_of_messages_that_an_app_may_have_is_refused(events, world):
    world.actor.join(*EVIL, {"CPU": 1.0})
    with pytest.raises(ThemisError, match="messages"):
        world.actor.exchange(*EVIL, events)


def test_figures_of_numpy_that_are_floats_are_written_as_floats(world):
    world.actor.join(*EVIL, {"CPU": 1.0})
    world.actor.exchange(*EVIL, [m.RhoAnswer(*EVIL, 1, replace(HONEST, rho=np.float64(3.0), whole=2))])
    app = world.actor._arbiter.state.apps["evil"]
    assert type(app.rho) is float and type(app.whole) is float and books(world)["apps"]["evil"]["whole"] == 2.0


def test_books_that_json_does_not_have_count_as_not_written(world, caplog):
    world.actor.join("a", "one", {"CPU": 1.0})
    before = books(world)
    world.actor._arbiter.state.apps["a"].whole = Fraction(1)
    world.actor.join("b", "one", {"CPU": 1.0})
    world.actor._try(world.actor._pass_time)
    assert "Fraction is not JSON serializable" in "".join(world.actor.status()["trouble"])
    assert "a part of a tick failed" not in caplog.text
    assert json.loads(world.books.read_text()) == before
    world.actor._arbiter.state.apps["a"].whole = 1.0
    world.now += 10.0
    assert books(world)["apps"]["a"]["whole"] == 1.0 and not world.actor.status()["trouble"]


def test_an_app_that_ray_cannot_be_asked_for_bars_no_other(world, monkeypatch):
    make = reservations.placement_group

    def fail(bundles, **kwargs):
        if "planet" in bundles[0]:
            raise UnicodeEncodeError("utf-8", "planet", 0, 1, "no such resource")
        return make(bundles, **kwargs)

    monkeypatch.setattr(reservations, "placement_group", fail)
    world.join("evil", Job(2))
    world.actor.join("evil", "evil/1", {"CPU": 1.0, "planet": 0.0})
    world.join("a", Job(2))
    world.run(30.0)
    assert [app for app, _, _ in world.there()] == ["a", "a"]


def test_what_one_app_cannot_have_bars_those_that_ask_for_as_much_of_what_it_asks_for(world):
    for name, more in (("a", {}), ("b", {"memory": 4.0}), ("c", {"memory": 8.0, "disk": 0.0})):
        world.actor.join(name, "one", {"CPU": 1.0, **more})
    for bundle, apps in (({}, "abc"), ({"disk": 0.0}, "abc"), ({"memory": 4.0}, "bc"), ({"memory": 8.0}, "c")):
        assert world.actor._asking_for({"CPU": 1.0, **bundle}) == set(apps)


def test_a_heartbeat_does_not_rewrite_the_books(world):
    world.actor.join("a", "one", {"CPU": 1.0})
    world.now = 1.0
    world.actor.exchange("a", "one", [m.Heard("a", "one")])
    before = books(world)
    world.actor._write_ahead._mail.clear()
    world.now = 3.0
    assert [type(each) for each in world.actor.exchange("a", "one", [m.Heard("a", "one")])] == [m.Leases]
    assert books(world) == before
    world.actor.configure({"lease_s": 100.0})
    assert books(world)["settings"]["lease_s"] == 100.0


def test_a_thousand_joins_within_a_tick_write_the_books_once(world, monkeypatch):
    written, dumps = [], []
    write, dump = books_file.write_books, json.dumps
    monkeypatch.setattr(books_file, "write_books", lambda *args: written.append(write(*args)))
    monkeypatch.setattr(books_file, "json", SimpleNamespace(dumps=lambda data: dumps.append(dump(data)) or dumps[-1]))
    for number in range(1000):
        world.actor.join(f"app{number}", f"app{number}/1", {"CPU": 1.0})
        world.actor.exchange(f"app{number}", f"app{number}/1", [m.Heard(f"app{number}", f"app{number}/1")])
    assert not dumps and not world.actor._write_ahead._mail, "nothing is carried out before it is written"
    assert len(books(world)["apps"]) == 1000
    assert len(dumps) == len(written) == 1
    kinds = {type(each) for mail in world.actor._write_ahead._mail.values() for each in mail}
    assert kinds == {m.AskRho, m.Leases} and len(world.actor._write_ahead._mail) == 1000
    world.actor.exchange("app7", "app7/1", [m.Heard("app7", "app7/1")])
    assert len(dumps) == 1, "a heartbeat is answered at once"


GOOD = json.loads(BOOKS_OF_2CE470D)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (BOOKS_OF_2CE470D[:700], "JSONDecodeError"),
        ("", "JSONDecodeError"),
        ("[]", "they are a list"),
        (json.dumps({**GOOD, "format": 99}), "newer FluidTune"),
        (json.dumps({**GOOD, "settings": {"lease_s": -1}}), "lease_s=-1"),
        (json.dumps({**GOOD, "apps": {"a": {**GOOD["apps"]["a"], "planet": "x"}}}), "planet"),
        (json.dumps({**GOOD, "apps": {"a": {**GOOD["apps"]["a"], "joined": "soon"}}}), "joined='soon'"),
        (json.dumps({**GOOD, "bundles": 3}), "bundles"),
        (json.dumps({**GOOD, "clock": None}), "NoneType"),
    ],
)
def test_books_that_cannot_be_read_are_kept_aside(text, why, start, caplog):
    world = start(3, held=held(2), text=text)
    assert world.books.with_suffix(".kept").read_text() == text
    assert why in caplog.text and "head.kept" in caplog.text
    # What the placement groups tell: the holder keeps its GPUs, and tokens go on above all that existed.
    world.actor.exchange("a", "s", [m.Heard("a", "s")])
    leases = world.actor.status()["apps"]["a"]["leases"]
    assert {gpu: lease["token"] for gpu, lease in leases.items()} == {"m-0": 1, "m-1": 2}
    assert books(world)["leases"]["token"] == 1e12
