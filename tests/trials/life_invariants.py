"""The invariants of a trial's life in the driver, asserted after any event."""

from __future__ import annotations

from fluidtune.trials import TrialStateMachine
from fluidtune.trials.life import Crew


def check_life(life: TrialStateMachine) -> None:
    """Asserts every invariant."""
    crew = life.crew
    check_crew(crew)
    led = life.released_from if life.place == "released" else life.place
    assert (crew.leader is not None) == (led in ("loading", "live")), life
    assert led == "live" or (crew.change == "steady" and crew.facts.address is None), life
    assert not any(call.issued for call in list(life.calls)[led == "live" :]), life
    assert life.place != "released" or life.released_from is not None, life


def check_crew(crew: Crew) -> None:
    """Asserts what holds of the group after every event."""
    assert (crew.change == "attaching") == bool(crew.awaited), crew
    assert crew.joining.keys() <= crew.awaited, crew
    assert not crew.followers or set(crew.devices) == {crew.devices[0], *crew.followers}, crew
    assert crew.devices[:1] == crew.wanted[:1], crew
    assert not crew.awaited & {*crew.devices[:1], *crew.followers}, crew
    assert crew.leader is not None or not (crew.followers or crew.awaited or crew.facts.address), crew
    assert crew.leader is not None or crew.change == "steady", crew
    assert not crew.followers.keys() & crew.joining.keys(), crew
