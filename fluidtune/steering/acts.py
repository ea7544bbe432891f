"""What becomes of each act by which a user steers a trial: it is asked for, and then taken and done, or refused.

`Steering` is a state machine of the same kind as the engine: an event goes in, instructions come out. It has no Ray, no
clock and no socket. `fluidtune.tune.steered_run` carries its instructions out. docs/view.md draws `STATES`, and a test
holds the two equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Literal

from fluidtune.steering.json_values import cut, kind_of

#: ``asked``: the driver has heard of it. ``taken``: it holds, also after a restore if Tune could save it.
#: ``done``: it has happened, or nothing is left to do. ``refused``: nothing happens; its words say why.
State = Literal["asked", "taken", "done", "refused"]
#: ``stop``: the trial ends at its next result. ``keep``: it goes on when the algorithm wants to stop it. ``clone``: a
#: new trial begins with the same parameters but for those that are given.
Kind = Literal["stop", "keep", "clone"]

#: Every change of state, with the events that cause it; no other event may. A clone is done as soon as there is one.
STATES: dict[tuple[State, State], str] = {
    ("asked", "refused"): "Asked, Failed",
    ("asked", "taken"): "CarriedOut",
    ("asked", "done"): "CarriedOut",
    ("taken", "done"): "StopMeant, TrialEnded",
}


class SteeringError(Exception):
    """An event that cannot be true: the shell has an error."""


@dataclass(frozen=True)
class Act:
    """What a user wants of a trial.

    ``id``: chosen by whoever asks; what comes with the same id again is the same act. ``by``: the user's name.
    ``via``: "command line" or "page". ``parameters``: of a clone, those that differ, by their names; a parameter within
    a parameter is "a/b". ``from_checkpoint``: the clone goes on from the trial's last checkpoint. ``clone``: the id of
    the new trial, once there is one.
    """

    id: str
    kind: Kind
    trial: str
    by: str
    via: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    from_checkpoint: bool = False
    clone: str = ""


@dataclass(frozen=True)
class Facts:
    """What the run knows of a trial at the moment.

    ``parameters``: by name, the kind of the value (`kind_of`). ``no_keep``: why its algorithm lets none go on; "": it
    does.
    """

    ended: bool = False
    parameters: Mapping[str, str] = field(default_factory=dict)
    has_checkpoint: bool = False
    no_keep: str = ""


# --- events


@dataclass(frozen=True)
class Asked:
    """A user wants this. ``facts``: of its trial."""

    act: Act
    facts: Facts


@dataclass(frozen=True)
class CarriedOut:
    """`CarryOut` was done. ``clone``: the id of the new trial, of a clone. ``unsaved``: why Tune could not save it."""

    act: str
    clone: str = ""
    unsaved: str = ""


@dataclass(frozen=True)
class Failed:
    """`CarryOut` could not be done, and has changed nothing."""

    act: str
    why: str


@dataclass(frozen=True)
class Restored:
    """An earlier driver has saved this act with this state."""

    act: Act
    state: State


@dataclass(frozen=True)
class ResultCame:
    """The trial has a new result."""

    trial: str


@dataclass(frozen=True)
class StopMeant:
    """The algorithm wants to stop the trial at its new result."""

    trial: str


@dataclass(frozen=True)
class TrialEnded:
    """The trial has ended for good, whatever the reason."""

    trial: str


Event = Asked | CarriedOut | Failed | Restored | ResultCame | StopMeant | TrialEnded

# --- instructions


@dataclass(frozen=True)
class CarryOut:
    """Keep the act with its trial, or make the clone; then have Tune save that. Answered by CarriedOut or Failed."""

    act: Act


@dataclass(frozen=True)
class Note:
    """Write down that the act has this state now, and why."""

    act: Act
    state: State
    why: str = ""


@dataclass(frozen=True)
class Answer:
    """Tell whoever asks what has become of the act."""

    refused: bool
    words: str


@dataclass(frozen=True)
class EndTrial:
    """The trial ends at this result."""

    trial: str


@dataclass(frozen=True)
class LetGoOn:
    """The trial goes on. For the algorithm it has ended."""

    act: Act


Instruction = CarryOut | Note | Answer | EndTrial | LetGoOn


class Steering:
    """All acts of one run, and what follows from them. See the module."""

    def __init__(self) -> None:
        self._acts: dict[str, Act] = {}
        self._states: dict[str, State] = {}
        #: Of acts that were refused: why. Of those that Tune could not save: what follows.
        self._reasons: dict[str, str] = {}

    def on_event(self, event: Event) -> list[Instruction]:
        """Change the acts for one event. Returns what the shell must do, in this order.

        Raises:
            SteeringError: the event cannot be true.
        """
        match event:
            case Asked(act, facts):
                return self._asked(act, facts)
            case CarriedOut(name, clone, unsaved):
                act = self._acts[name] = replace(self._known(name), clone=clone)
                state: State = "done" if act.kind == "clone" else "taken"
                self._go(event, name, state)
                if unsaved:
                    self._reasons[name] = f"a restored run may not know of it, as Tune cannot save its state: {unsaved}"
                return [Note(act, state, self._reasons.get(name, "")), self._answer(act)]
            case Failed(name, why):
                return self._refuse(event, self._known(name), why)
            case Restored(act, state):
                if act.id not in self._acts:
                    self._acts[act.id], self._states[act.id] = act, state
                return []
            case ResultCame(trial):
                return [EndTrial(trial)] if self._has(trial, "stop", "taken") else []
            case StopMeant(trial):
                kept = self._has(trial, "keep", "taken")
                if kept is None:
                    return []
                self._go(event, kept.id, "done")
                return [LetGoOn(kept), Note(kept, "done", "the algorithm wanted to stop it, and it goes on")]
            case TrialEnded(trial):
                return self._ended(event, trial)

    def goes_on_alone(self, trial: str) -> bool:
        """Whether the algorithm has wanted to stop a trial that is kept: it hears nothing of the trial any more."""
        return self._has(trial, "keep", "done") is not None

    def _asked(self, act: Act, facts: Facts) -> list[Instruction]:
        if act.id in self._acts:
            if self._states[act.id] == "asked":
                raise SteeringError(f"{act} is asked for again before it was carried out")
            return [self._answer(self._acts[act.id])]
        self._acts[act.id], self._states[act.id] = act, "asked"
        why = self._why_not(act, facts)
        if why:
            return [Note(act, "asked"), *self._refuse(Asked(act, facts), act, why)]
        return [Note(act, "asked"), CarryOut(act)]

    def _why_not(self, act: Act, facts: Facts) -> str:
        """Why the act is refused, in words; "" if it is not."""
        trial = f"trial {act.trial}"
        if act.kind == "clone":
            for name, value in act.parameters.items():
                if why := _no_such_value(name, value, facts.parameters):
                    return f"{trial} {why}"
            if act.from_checkpoint and not facts.has_checkpoint:
                return f"{trial} has no checkpoint; clone it from its start, or when it has one"
            return ""
        if facts.ended:
            return f"{trial} has ended already"
        if stop := self._has(act.trial, "stop", "taken"):
            return f"{trial} ends at its next result: {stop.by} has asked for that ({stop.via})"
        if act.kind == "stop":
            return ""
        if self._has(act.trial, "keep", "taken") or self.goes_on_alone(act.trial):
            return f"{trial} is kept already"
        return facts.no_keep and f"{trial} cannot be kept: {facts.no_keep}"

    def _ended(self, event: TrialEnded, trial: str) -> list[Instruction]:
        notes: list[Instruction] = []
        if stop := self._has(trial, "stop", "taken"):
            self._go(event, stop.id, "done")
            notes.append(Note(stop, "done"))
        if keep := self._has(trial, "keep", "taken"):
            self._go(event, keep.id, "done")
            notes.append(Note(keep, "done", "it ended, and the algorithm had not wanted to stop it"))
        return notes

    def _refuse(self, event: Event, act: Act, why: str) -> list[Instruction]:
        self._go(event, act.id, "refused")
        self._reasons[act.id] = why
        return [Note(act, "refused", why), self._answer(act)]

    def _answer(self, act: Act) -> Answer:
        if self._states[act.id] == "refused":
            return Answer(True, self._reasons[act.id])
        words = {
            "stop": f"trial {act.trial} ends at its next result",
            "keep": f"trial {act.trial} goes on when the algorithm wants to stop it",
            "clone": f"trial {act.clone} is a clone of trial {act.trial}",
        }[act.kind]
        return Answer(False, "; ".join(filter(None, [words, self._reasons.get(act.id)])))

    def _go(self, event: Event, name: str, state: State) -> None:
        before = self._states[name]
        if type(event).__name__ not in STATES.get((before, state), "").split(", "):
            raise SteeringError(f"{event} cannot make an act that is {before} {state}")
        self._states[name] = state

    def _known(self, name: str) -> Act:
        if name not in self._acts:
            raise SteeringError(f"there is no act {name!r}")
        return self._acts[name]

    def _has(self, trial: str, kind: Kind, state: State) -> Act | None:
        """The trial's act of this kind that has this state."""
        found = (act for act in self._acts.values() if (act.trial, act.kind) == (trial, kind))
        return next((act for act in found if self._states[act.id] == state), None)


def _no_such_value(name: str, value: Any, kinds: Mapping[str, str]) -> str:
    """Why the parameter cannot have the value: the trial "has no parameter ..."; "" if it can."""
    if name not in kinds:
        wanted = cut(name)
        near = get_close_matches(wanted, kinds, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(kinds) or 'none'}"
        return f"has no parameter {wanted}; {hint}"
    kind = kinds[name]
    if not kind:
        return f"has a {name} that is no JSON value, and nothing else can be set"
    # PBT computes with the values that it changes, in Tune's loop.
    return f"has {kind} as its {name}, and {cut(json.dumps(value))} is none" if kind_of(value) != kind else ""
