"""When models are placed anew on the devices of a service, and by which loads and unloads. It is pure.

Events go into `handle`, and the state after it comes out, with what the shell must do. Where the models are to stand is
said by a search (`placement.replanning`) or, of versions of one model, by those that are wanted (`Wanted`). Where not
all models have room, `making_room` says which one comes when it is asked. A placement is changed in steps, so that a
device never holds more bytes than its memory, models that load and that are unloaded among them; and no model that is
to stand somewhere is unloaded from its last device while there is another way. docs/placement.md draws the phases, and
a test holds the drawing equal to what `handle` does. All times are seconds, all rates requests per second, all memory
is bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from symphony_serve.errors import ServeError
from symphony_serve.making_room import Demand, Placement, placed_for

#: ``settled``: the models stand as they were placed. ``drifting``: rates differ from those that they were placed for.
#: ``searching``: another placement is looked for. ``moving``: models load and are unloaded.
Phase = Literal["settled", "drifting", "searching", "moving"]

#: A rate differs if one of the two is more than this many times the other. Judgement: devices are seldom so full that a
#: quarter more is refused.
TIMES = 1.25
#: And if the requests are this many standard deviations of a Poisson count more or fewer: by chance alone, that happens
#: in one of 16,000 windows (two-sided normal tail).
DEVIATIONS = 4.0
#: A model that does not load is tried again after `PlacementState.patience`, and after twice as long each further time,
#: so many times. Judgement: with a patience of 20 s, every eleven minutes at last.
MOST_DOUBLINGS = 5


@dataclass(frozen=True)
class Device:
    """The models of a device: that it holds, that load, and that are being unloaded. up: it has processes."""

    held: frozenset[str] = frozenset()
    loads: frozenset[str] = frozenset()
    drops: frozenset[str] = frozenset()
    up: bool = True

    @property
    def all(self) -> frozenset[str]:
        """The models that take memory."""
        return self.held | self.loads | self.drops


@dataclass(frozen=True)
class PlacementState:
    """Where the models stand, and where they are to stand.

    sizes: bytes by model. memory: of each device. patience: rates must differ for so long before there is a search; as
    long as a change of the placement takes, so that it is never more than twice as late as the best (Karlin and others,
    "Competitive snoopy caching", 1988). planned: the rates of the latest search, and 0 of a model of which a copy has
    left for another one since, so that its rate asks for a search. since: when rates began to differ. search: the
    number of the latest search, while it goes on. target: where the models are to stand. placed: where they stood when
    all was done. guests: (device, model) that stand elsewhere than they are to, until there is room. failed: models
    that stand nowhere because they did not load; they are left out until there is another search. fails: how often in a
    row a model did not load: the more often, the longer until it is tried again, as that may cost others. demands: how
    each model is asked.
    """

    sizes: Mapping[str, float]
    memory: float
    devices: Mapping[int, Device]
    patience: float
    planned: Mapping[str, float]
    since: float | None = None
    searches: int = 1
    searching: bool = True
    target: Placement | None = None
    placed: Placement = field(default_factory=dict)
    guests: frozenset[tuple[int, str]] = frozenset()
    failed: frozenset[str] = frozenset()
    fails: Mapping[str, int] = field(default_factory=dict)
    demands: Mapping[str, Demand] = field(default_factory=dict)

    @property
    def phase(self) -> Phase:
        if self.searching:
            return "searching"
        if self.target is not None:
            return "moving"
        return "settled" if self.since is None else "drifting"

    @property
    def up(self) -> dict[int, Device]:
        return {number: device for number, device in self.devices.items() if device.up}

    def taken(self, number: int) -> float:
        """Bytes of the device's memory."""
        return sum(self.sizes[model] for model in self.devices[number].all)

    def stands(self, model: str) -> list[int]:
        """The devices that can answer for the model."""
        return [number for number, device in self.up.items() if model in device.held]

    @property
    def lacking(self) -> list[str]:
        """The models that did not load, or do not stand on a device that is up and on which they were placed."""
        short = {model for number, device in self.up.items() for model in self.placed.get(number, set()) - device.held}
        return [model for model in self.sizes if model in short | self.failed]


@dataclass(frozen=True)
class Rates:
    """The rates of all models in the last ``seconds``, at ``now``."""

    now: float
    rates: Mapping[str, float]
    seconds: float


@dataclass(frozen=True)
class Asked:
    """The requests to each model since the last such event, at ``now``."""

    now: float
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Found:
    """The search of this number has found where the models are to stand, or that they stand well."""

    search: int
    placement: Placement


@dataclass(frozen=True)
class Wanted:
    """Somebody says where the models are to stand. A search is over."""

    placement: Placement


@dataclass(frozen=True)
class NotFound:
    """The search of this number has failed."""

    search: int


@dataclass(frozen=True)
class _OfDevice:
    device: int


@dataclass(frozen=True)
class _OfModel(_OfDevice):
    model: str


@dataclass(frozen=True)
class Held(_OfModel):
    """The device has loaded the model. seconds: that it took; None: as long as before."""

    seconds: float | None = None


class NotHeld(_OfModel):
    """The device could not load the model, and has nothing of it in its memory."""


class Dropped(_OfModel):
    """The device has unloaded the model."""


class Lost(_OfModel):
    """The model's process on the device has died. The next one loads it; say `Held` or `NotHeld`."""


class Down(_OfDevice):
    """The device has had no process for a while, and models are to stand on the others."""


class Up(_OfDevice):
    """The device has a process again."""


Event = Rates | Asked | Found | Wanted | NotFound | Held | NotHeld | Dropped | Lost | Down | Up


@dataclass(frozen=True)
class Search:
    """Look where the models are to stand on these devices at these rates; say `Found` or `NotFound`."""

    number: int
    rates: Mapping[str, float]
    devices: tuple[int, ...]


class Hold(_OfModel):
    """Let the device load the model; say `Held` or `NotHeld`."""


@dataclass(frozen=True)
class Drop(_OfModel):
    """Give the device no batch of the model any more, let it unload it, and say `Dropped`.

    last: no device has the model then, because memory leaves no other way.
    """

    last: bool = False


Act = Search | Hold | Drop


def differ(planned: Mapping[str, float], rates: Mapping[str, float], seconds: float) -> bool:
    """Whether the rate of a model, measured over ``seconds``, is another one than planned, and not by chance."""
    for model, rate in rates.items():
        low, high = sorted((rate, planned.get(model, 0.0)))
        if high > TIMES * low and (high - low) * seconds > DEVIATIONS * math.sqrt(high * seconds):
            return True
    return False


def handle(state: PlacementState, event: Event) -> tuple[PlacementState, list[Act]]:
    """The state after the event, and what must be done. Raises ServeError for a placement that cannot be."""
    if isinstance(event, Rates):
        return _rated(state, event)
    if isinstance(event, Asked):
        return _asked(state, event)
    if isinstance(event, Wanted):
        return _steps(replace(state, searching=False, target=event.placement, guests=frozenset()))
    if isinstance(event, Found | NotFound):
        if not state.searching or event.search != state.searches:
            return state, []  # The devices are others since.
        state = replace(state, searching=False)
        if isinstance(event, NotFound):
            return state, []
        _check(state, event.placement)
        target = {number: models - state.failed for number, models in event.placement.items()}
        return _steps(replace(state, target=target, guests=frozenset()))
    device = state.devices[event.device]
    if isinstance(event, Down | Up):
        up = isinstance(event, Up)
        changed = replace(device, up=up, held=device.held if up else frozenset())
        return _search(_with(state, event.device, changed), state.planned) if changed != device else (state, [])
    model = frozenset({event.model})
    if isinstance(event, Lost):
        if event.model not in device.held:
            return state, []
        state = _with(state, event.device, replace(device, held=device.held - model, loads=device.loads | model))
        # It comes back where it stood, on the way to wherever the models are to stand.
        if state.target is None and not state.searching:
            state = replace(state, target=state.placed)
        return state, []
    if isinstance(event, Dropped):
        return _steps(_with(state, event.device, replace(device, drops=device.drops - model)))
    held = device.held | model if isinstance(event, Held) else device.held
    state = _with(state, event.device, replace(device, loads=device.loads - model, held=held))
    if isinstance(event, NotHeld):
        return _steps(_not_held(state, event))
    fails = {name: times for name, times in state.fails.items() if name != event.model}
    if isinstance(event, Held) and event.seconds is not None:
        demand = replace(state.demands.get(event.model, Demand()), load=event.seconds)
        state = replace(state, demands={**state.demands, event.model: demand})
    return _steps(replace(state, failed=state.failed - model, fails=fails))


def _not_held(state: PlacementState, event: NotHeld) -> PlacementState:
    """Back to what stood before. Where that fails as well, the model stays where it stands, or is left out.

    One that stood nowhere is left out, and what has left for it comes back when it is asked.
    """
    model, target, stood = event.model, state.target, any(event.model in models for models in state.placed.values())
    if stood and target is not None and target != state.placed and not state.failed and _fits(state, state.placed):
        return replace(state, target=state.placed, guests=frozenset())
    fails = {**state.fails, model: state.fails.get(model, 0) + 1}
    if state.stands(model):
        return replace(state, target=None, guests=frozenset(), fails=fails)
    if target is not None:
        target = {number: models - ({model} if number == event.device else set()) for number, models in target.items()}
    return replace(state, target=target, failed=state.failed | {model}, fails=fails)


def _with(state: PlacementState, number: int, device: Device) -> PlacementState:
    return replace(state, devices={**state.devices, number: device})


def _rated(state: PlacementState, event: Rates) -> tuple[PlacementState, list[Act]]:
    if state.phase not in ("settled", "drifting"):
        return state, []
    lacking = state.lacking
    others = differ(state.planned, event.rates, event.seconds)
    if not lacking and not others:
        return replace(state, since=None), []
    since = event.now if state.since is None else state.since
    again = min((state.fails.get(model, 1) - 1 for model in lacking), default=0)
    if event.now - since < state.patience * (1 if others else 2 ** min(again, MOST_DOUBLINGS)):
        return replace(state, since=since), []
    return _search(replace(state, failed=frozenset()), event.rates)


def _asked(state: PlacementState, event: Asked) -> tuple[PlacementState, list[Act]]:
    """Count, and let the model come that has missed most of those that can."""
    known = {model: state.demands.get(model, Demand()) for model in state.sizes}
    demands = {
        model: one.after(event.counts.get(model, 0), event.now, bool(state.stands(model)))
        for model, one in known.items()
    }
    state = replace(state, demands=demands)
    if state.searching:
        return state, []
    held = {number: device.held for number, device in state.up.items()}
    target = held if state.target is None else {number: state.target.get(number, frozenset()) for number in held}
    there = state.failed.union(*target.values())
    missing = [(-demand.missed, model) for model, demand in demands.items() if demand.missed and model not in there]
    for _, model in sorted(missing):
        found = placed_for(model, target, held, state.sizes, state.memory, demands)
        if found is not None:
            still = frozenset[str]().union(*found.values())
            fewer = {one: 0.0 for number in target for one in target[number] - found[number] if one in still}
            return _steps(replace(state, target=found, planned={**state.planned, **fewer}))
    return state, []


def _search(state: PlacementState, rates: Mapping[str, float]) -> tuple[PlacementState, list[Act]]:
    number = state.searches + 1
    found = replace(state, searching=True, searches=number, target=None, since=None, planned=dict(rates))
    return found, [Search(number, rates, tuple(state.up))] if state.up else []


def _fits(state: PlacementState, placement: Placement) -> bool:
    """Whether each device is up and has the memory."""
    return all(
        number in state.up and sum(state.sizes[model] for model in models) <= state.memory
        for number, models in placement.items()
    )


def _check(state: PlacementState, placement: Placement) -> None:
    if not _fits(state, placement):
        shown = {number: sorted(models) for number, models in placement.items()}
        raise ServeError(f"the placement {shown} lacks a device with memory for it")


def _steps(state: PlacementState) -> tuple[PlacementState, list[Act]]:
    """What can be done now on the way to the target."""
    acts: list[Act] = []
    if state.target is None or state.searching:
        return state, acts
    while (act := next(_possible(state), None)) is not None:
        state = _begun(state, act)
        acts.append(act)
    if any(device.loads or device.drops for device in state.up.values()):
        return state, acts
    placed = {number: device.held for number, device in state.up.items()}
    return replace(state, target=None, guests=frozenset(), placed=placed), acts


def _begun(state: PlacementState, act: Hold | Drop) -> PlacementState:
    device, model = state.devices[act.device], frozenset({act.model})
    if isinstance(act, Hold):
        assert state.target is not None
        guest = act.model not in state.target.get(act.device, ())
        guests = state.guests | {(act.device, act.model)} if guest else state.guests
        return replace(_with(state, act.device, replace(device, loads=device.loads | model)), guests=guests)
    return _with(state, act.device, replace(device, held=device.held - model, drops=device.drops | model))


def _possible(state: PlacementState) -> Iterator[Hold | Drop]:
    """What may be done next, the best first: loads that fit, room for others, detours, and at last a gap.

    A model that is to stand nowhere leaves as one that stands elsewhere does.
    """
    target, devices = state.target or {}, state.up
    somewhere = frozenset[str]().union(*target.values())
    missing = [
        (bool(state.stands(model)), -state.planned.get(model, 0.0), model, number)
        for number in devices
        for model in target.get(number, frozenset()) - devices[number].all
    ]
    # A model that stands nowhere goes first, then the one that is asked most.
    blocked = []
    for *_, model, number in sorted(missing):
        if state.taken(number) + state.sizes[model] <= state.memory:
            yield Hold(number, model)
        elif number not in blocked:
            blocked.append(number)
    # The one that is asked least goes first.
    surplus = sorted(
        (model in somewhere and len(state.stands(model)) == 1, state.planned.get(model, 0.0), model, number)
        for number in devices
        for model in devices[number].held - target.get(number, frozenset())
    )
    loads, drops = ({number for number in devices if getattr(devices[number], what)} for what in ("loads", "drops"))
    for last, _, model, number in surplus:
        makes_room = number in blocked and number not in drops and (number, model) not in state.guests
        if not last and (makes_room or not (missing or loads)):
            yield Drop(number, model)
    if not blocked or loads or drops:
        return
    for last, _, model, number in reversed(surplus):
        room = [one for one in devices if state.taken(one) + state.sizes[model] <= state.memory]
        if last and number in blocked and room and model not in {guest for _, guest in state.guests}:
            yield Hold(min(room, key=state.taken), model)
    for last, _, model, number in surplus:
        if number in blocked:
            yield Drop(number, model, last)
