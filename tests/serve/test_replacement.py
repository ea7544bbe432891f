"""The machine that places models anew: memory holds whatever happens, and each move comes to its end."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from symphony_serve.errors import ServeError
from symphony_serve.replacement import (
    Asked,
    Device,
    Down,
    Drop,
    Dropped,
    Found,
    Held,
    Hold,
    Lost,
    NotFound,
    NotHeld,
    Phase,
    PlacementState,
    Rates,
    Search,
    Up,
    Wanted,
    differ,
    handle,
)
from tests.drawings import changes_of, tried

NAMES = "abcd"
DRAWN = changes_of("placement.md", "### The states of a placement")


def events_of(state):
    """Of two models on one device, which has room for one."""
    yield from (Rates(now, {"a": rate, "b": 1.0}, 100.0) for now, rate in ((0.0, 9.0), (10.0, 9.0), (10.0, 1.0)))
    yield from (Asked(0.0, {"a": 1}), NotFound(state.searches))
    for models in ("a", ""):
        yield from (Found(state.searches, {0: frozenset(models)}), Wanted({0: frozenset(models)}))
    device = state.devices[0]
    yield Down(0) if device.up else Up(0)
    for kinds, models in (((Lost,), device.held), ((Held, NotHeld), device.loads), ((Dropped,), device.drops)):
        yield from (kind(0, model) for kind in kinds for model in models)


def test_the_page_draws_exactly_what_the_machine_does():
    begin = standing(1, "", sizes=dict.fromkeys("ab", 1.0))
    ways = tried(begin, events_of, lambda state, event: handle(state, event)[0], 6)
    changes = {(before.phase, state.phase, event) for before, event, state in ways}
    assert {change for change in changes if change[0] != change[1]} == DRAWN
    assert {phase for change in DRAWN for phase in change[:2]} == set(get_args(Phase))


def standing(memory, *held, sizes=None, **given):
    devices = {number: Device(frozenset(models)) for number, models in enumerate(held)}
    return PlacementState(sizes or dict.fromkeys("abc", 1.0), memory, devices, 10.0, dict.fromkeys("abc", 1.0), **given)


def moved(state, *placement):
    """All acts until the placement is reached, each as (what, device, model); each load and unload succeeds."""
    found = Found(state.searches, {number: frozenset(models) for number, models in enumerate(placement)})
    state, acts = handle(state, found)
    told = []
    while acts:
        act, *acts = acts
        last = "!" if isinstance(act, Drop) and act.last else ""
        told.append(("+" if isinstance(act, Hold) else "-") + f"{act.device}{act.model}{last}")
        done = Held if isinstance(act, Hold) else Dropped
        state, more = handle(state, done(act.device, act.model))
        acts += more
    assert state.phase == "settled"
    return told, [("".join(sorted(device.held))) for device in state.devices.values()]


@pytest.mark.parametrize(
    ("memory", "held", "target", "acts"),
    [
        # Room: loads first, then unloads. No room, but another device has it: unload first.
        (3, ["ab", "ac"], ["bc", "ac"], ["+0c", "-0a"]),
        (2, ["ab", "ac"], ["bc", "ac"], ["-0a", "+0c"]),
        # The last copy of a goes to a device with room for a while.
        (1, ["a", "b", ""], ["b", "a", ""], ["+2b", "-1b", "+1a", "-0a", "+0b", "-2b"]),
        (1, ["a", "b", "c"], ["b", "a", "c"], ["-0a!", "+0b", "-1b", "+1a"]),
        (2, ["ab", "c"], ["ab", "c"], []),
    ],
)
def test_the_way_to_a_placement(memory, held, target, acts):
    sizes = dict.fromkeys("".join(held), 1.0)
    assert moved(standing(memory, *held, sizes=sizes), *target) == (acts, ["".join(sorted(one)) for one in target])


def after(state, *events):
    """The state after these events, and the acts of the last of them."""
    for event in events:
        state, acts = handle(state, event)
    return state, acts


ALIKE = dict.fromkeys("abc", 1.0)


def test_a_load_that_fails_brings_back_what_stood_before():
    rates = {"a": 1.0, "b": 1.0, "c": 9.0}
    found = Found(1, {0: frozenset("ab"), 1: frozenset("ac")})
    state, acts = after(standing(2, "ab", "ac"), found, Rates(0.0, rates, 30.0), Rates(10.0, rates, 30.0))
    assert acts == [Search(2, rates, (0, 1))]
    state, acts = after(state, Found(2, {0: frozenset("bc"), 1: frozenset("ac")}))
    assert acts == [Drop(0, "a")]
    state, acts = after(state, Dropped(0, "a"))
    assert acts == [Hold(0, "c")]
    state, acts = after(state, NotHeld(0, "c"))
    assert acts == [Hold(0, "a")]
    state, _ = after(state, Held(0, "a"))
    assert (state.phase, state.devices[0].held) == ("settled", frozenset("ab"))
    # What it was looked for is known: the same rates ask for no other search.
    assert after(state, Rates(90.0, rates, 30.0))[0].phase == "settled"


def test_a_model_that_does_not_load_and_stands_nowhere_is_left_out_until_rates_ask_for_a_search():
    placement = {0: frozenset("a"), 1: frozenset("bc")}
    state, (search,) = after(standing(2, "a", "bc"), Found(1, placement), Down(1))
    assert (state.devices[1].held, search.devices) == (frozenset(), (0,))
    assert after(state, Down(1)) == (state, [])
    state, (search,) = after(state, Up(1))
    state, acts = after(state, Found(search.number, placement))
    assert acts == [Hold(1, "b"), Hold(1, "c")]
    state, acts = after(state, NotHeld(1, "b"))
    assert (acts, state.phase, state.failed) == ([], "moving", {"b"})
    state, _ = after(state, Held(1, "c"))
    assert (state.phase, state.devices[1].held) == ("settled", frozenset("c"))
    # Another process is not asked to load it, as that may be what ends processes.
    state, (search,) = after(state, Down(1), Up(1))
    state, acts = after(state, Found(search.number, placement))
    assert acts == [Hold(1, "c")]
    state, (search,) = after(state, Held(1, "c"), Rates(0.0, ALIKE, 10.0), Rates(10.0, ALIKE, 10.0))
    assert after(state, Found(search.number, placement))[1] == [Hold(1, "b")]


def test_a_model_that_stands_nowhere_comes_when_it_is_asked_and_one_that_does_not_load_is_left_out():
    events = NotFound(1), Down(1), NotFound(2), Rates(0.0, ALIKE, 10.0), Asked(1.0, {"b": 1})
    state, acts = after(standing(2, "ab", "c"), *events)
    assert (state.phase, acts) == ("settled", [])
    state, acts = after(state, Asked(2.0, {"c": 1}))
    assert (state.phase, acts) == ("moving", [Drop(0, "a")])
    state, acts = after(state, Dropped(0, "a"))
    assert acts == [Hold(0, "c")]
    state, acts = after(state, NotHeld(0, "c"))
    assert (state.phase, acts, state.failed) == ("settled", [], {"c"})
    # What has left for it comes back when it is asked, and the other one when there is another search.
    assert after(state, Asked(3.0, {"c": 9}))[1] == [] and after(state, Asked(3.0, {"a": 1}))[1] == [Hold(0, "a")]
    assert after(state, Rates(5.0, ALIKE, 10.0), Rates(15.0, ALIKE, 10.0))[1] == [Search(3, ALIKE, (0,))]


def test_a_model_that_stays_broken_is_tried_again_ever_more_seldom():
    """Each attempt may end the process of healthy models. Seen: it was tried every 20 s for ever."""
    same, placement, now = dict.fromkeys("ab", 1.0), {0: frozenset("ab")}, 0.0
    state, _ = after(standing(2, "", sizes=same), Found(1, placement), Held(0, "a"))
    waits = []
    for _ in range(9):
        state, acts = after(state, NotHeld(0, "b"))
        begun = now
        while not acts:
            now += 1.0
            state, acts = after(state, Rates(now, same, 10.0))
        waits.append(now - begun - 1.0)
        state, acts = after(state, Found(state.searches, placement))
        assert acts == [Hold(0, "b")]
    assert waits == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 320.0, 320.0, 320.0]
    # Other rates do not wait for it, and one that has loaded is as it was.
    other, number = {"a": 9.0, "b": 9.0}, state.searches + 1
    state, acts = after(state, NotHeld(0, "b"), Rates(now, other, 100.0), Rates(now + 10.0, other, 100.0))
    assert acts == [Search(number, other, (0,))]
    assert after(state, Found(number, placement), Held(0, "b"))[0].fails == {}


def test_a_replica_that_does_not_come_back_is_tried_again_though_processes_die_now_and_then():
    """Seen: it was gone until rates changed, and each process that died put off every search."""
    placement = {0: frozenset("ab"), 1: frozenset("bc")}
    events = Found(1, placement), Lost(1, "b"), NotHeld(1, "b"), Rates(0.0, ALIKE, 10.0), Rates(10.0, ALIKE, 10.0)
    state, (search,) = after(standing(2, "ab", "bc"), *events)
    state, acts = after(state, Found(search.number, placement))
    assert acts == [Hold(1, "b")]
    events = Held(1, "b"), Rates(20.0, dict.fromkeys("abc", 9.0), 10.0), Lost(0, "a"), Held(0, "a")
    state, acts = after(state, *events)
    assert (acts, state.phase, state.since) == ([], "drifting", 20.0)


@pytest.mark.parametrize(
    ("planned", "rate", "seconds", "differs"),
    [(1.0, 1.3, 10.0, False), (100.0, 130.0, 10.0, True), (100.0, 120.0, 1e6, False), (2.0, 0.0, 10.0, True)],
)
def test_rates_differ_by_more_than_chance_and_by_more_than_a_quarter(planned, rate, seconds, differs):
    assert differ({"a": planned}, {"a": rate}, seconds) is differs


@pytest.mark.parametrize("target", [{0: "abc", 1: "c"}, {0: "ab", 7: "c"}])
def test_a_placement_that_cannot_be_is_refused(target):
    with pytest.raises(ServeError, match="lacks a device with memory for it"):
        handle(standing(2, "ab", "c"), Found(1, {number: frozenset(models) for number, models in target.items()}))


class Replacing(RuleBasedStateMachine):
    """Rates, searches, loads, unloads and devices in any order, as the page draws them."""

    @initialize(
        sizes=st.lists(st.integers(1, 4), min_size=4, max_size=4), memory=st.integers(4, 9), count=st.integers(1, 4)
    )
    def begins(self, sizes, memory, count):
        sizes = dict(zip(NAMES, map(float, sizes), strict=True))
        devices = {number: Device() for number in range(count)}
        self.state = PlacementState(sizes, float(memory), devices, 2.0, dict.fromkeys(NAMES, 1.0))
        self.now, self.searches = 0.0, [(1, tuple(devices))]
        self.flights = []

    def tell(self, event):
        before, self.state = self.state, None
        self.state, acts = handle(before, event)
        change = before.phase, self.state.phase, type(event).__name__
        assert change[0] == change[1] or change in DRAWN, event
        for act in acts:
            if isinstance(act, Search):
                self.searches.append((act.number, act.devices))
                continue
            assert self.state.devices[act.device].up
            self.flights.append(act)
        self.look_at_drops(before, event, acts)

    def look_at_drops(self, before, event, acts):
        """Follow the acts in their order, in books of the test's own."""
        held = {number: set(device.held) for number, device in before.up.items()}
        busy = {number: set(device.all) for number, device in before.up.items()}
        others = any(device.loads or device.drops for device in before.up.values())
        if isinstance(event, Held | NotHeld | Dropped):
            flights = [one for one in self.flights if one not in acts]
            others = any(one.device in held for one in flights)
            if event.device in held and isinstance(event, Held):
                held[event.device].add(event.model)
            elif event.device in held:
                busy[event.device].discard(event.model)
        for act in acts:
            if isinstance(act, Hold):
                busy[act.device].add(act.model)
                assert sum(self.state.sizes[one] for one in busy[act.device]) <= self.state.memory
            if isinstance(act, Drop):
                others_hold = any(act.model in held[one] for one in held if one != act.device)
                held[act.device].discard(act.model)
                to_stand = any(act.model in models for models in (self.state.target or {}).values())
                assert act.last is (to_stand and not others_hold)
                assert not (act.last and others), "something else may make room yet"
                spare = [one for one in held if act.model not in busy[one] and self.room(busy[one], act.model)]
                visited = any(model == act.model for _, model in self.state.guests)
                assert not (act.last and spare and not visited), "it could have stood elsewhere"
            others = True

    def room(self, busy, model):
        return sum(self.state.sizes[one] for one in {*busy, model}) <= self.state.memory

    @invariant()
    def no_device_has_more_than_its_memory(self):
        if hasattr(self, "state"):
            for number in self.state.devices:
                assert self.state.taken(number) <= self.state.memory

    @rule(rates=st.lists(st.sampled_from([0.0, 1.0, 50.0]), min_size=4, max_size=4))
    def rates(self, rates):
        self.now += 1.0
        self.tell(Rates(self.now, dict(zip(NAMES, rates, strict=True)), 10.0))

    @precondition(lambda self: self.searches)
    @rule(data=st.data(), succeeds=st.booleans())
    def search_ends(self, data, succeeds):
        number, devices = self.searches.pop(0)
        self.tell(Found(number, self.placement(data, devices)) if succeeds else NotFound(number))

    @rule(data=st.data())
    def wanted(self, data):
        self.tell(Wanted(self.placement(data, sorted(self.state.up))))

    def placement(self, data, devices):
        """One that fits, with replicas; not all models may be in it."""
        found = {number: set() for number in devices}
        for model in data.draw(st.permutations(NAMES * 2)):
            possible = [one for one in devices if model in found[one] or self.room(found[one], model)]
            if possible:
                found[data.draw(st.sampled_from(possible))].add(model)
        return {one: frozenset(models) for one, models in found.items()}

    @rule(counts=st.dictionaries(st.sampled_from(NAMES), st.integers(1, 9)))
    def asked(self, counts):
        self.now += 1.0
        self.tell(Asked(self.now, counts))

    @precondition(lambda self: self.flights)
    @rule(data=st.data(), succeeds=st.integers(0, 5).map(bool))
    def flight_ends(self, data, succeeds):
        act = self.flights.pop(data.draw(st.integers(0, len(self.flights) - 1)))
        self.end(act, succeeds)

    def end(self, act, succeeds=True):
        if isinstance(act, Drop):
            self.tell(Dropped(act.device, act.model))
        elif succeeds and self.state.devices[act.device].up:
            self.tell(Held(act.device, act.model))
        else:
            self.tell(NotHeld(act.device, act.model))

    @rule(data=st.data())
    def process_dies(self, data):
        """The next one loads the model; if the model was being unloaded, that is done."""
        number = data.draw(st.sampled_from(sorted(self.state.devices)))
        held = sorted(self.state.devices[number].held)
        if held and self.state.devices[number].up:
            model = data.draw(st.sampled_from(held))
            self.tell(Lost(number, model))
            assert model in self.state.devices[number].loads
            self.flights.append(Hold(number, model))

    @rule(data=st.data())
    def device_goes_or_comes(self, data):
        number = data.draw(st.sampled_from(sorted(self.state.devices)))
        self.tell(Down(number) if self.state.devices[number].up else Up(number))

    def teardown(self):
        """When all loads succeed, what was found last is reached; and each model comes that is asked often enough."""
        if not hasattr(self, "state"):
            return
        for number in self.state.devices:
            if not self.state.devices[number].up:
                self.tell(Up(number))
        target = self.state.target
        while self.flights:
            self.end(self.flights.pop(0))
        if target is not None:
            assert self.state.phase in ("settled", "drifting")
            held = {number: device.held for number, device in self.state.devices.items()}
            assert held == {number: target.get(number, frozenset()) for number in held}
        for number, _ in self.searches:
            self.tell(NotFound(number))
        starving = set(NAMES) - self.state.failed
        for _ in range(200):
            starving -= {model for model in starving if self.state.stands(model)}
            self.asked_alike()
            while self.flights:
                self.end(self.flights.pop(0))
        assert not starving

    def asked_alike(self):
        self.now += 1.0
        self.tell(Asked(self.now, dict.fromkeys(NAMES, 1)))


Replacing.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestReplacing = Replacing.TestCase
