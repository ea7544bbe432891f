"""What becomes of each act by which a user steers a trial: it is asked for, and then taken and done, or refused.

`Steering` is a state machine: each method is an event, and returns the acts that it has changed, each of which is to be
written down. It has no Ray, no clock and no file. `fluidtune.tune.steered_run` carries acts out. docs/view.md draws
`STATES`, and a test holds the two equal.
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

#: Every change of state, with the methods that cause it; no other may. A clone is done as soon as there is one.
STATES: dict[tuple[State, State], str] = {
    ("asked", "refused"): "asked, failed",
    ("asked", "taken"): "carried_out",
    ("asked", "done"): "carried_out",
    ("taken", "done"): "stop_meant, ended",
}


@dataclass(frozen=True)
class Act:
    """What a user wants of a trial, and what has become of it.

    ``id``: chosen by whoever asks; what comes with the same id again is the same act. ``by``: the user's name, which
    the driver knows. ``via``: "command line" or "page". ``parameters``: of a clone, those that differ, by their names;
    a parameter within a parameter is "a/b". ``from_checkpoint``: the clone goes on from the trial's last checkpoint.
    ``clone``: the id of the new trial, once there is one. ``why``: why it has its state, in words; "" where that is
    plain.
    """

    id: str
    kind: Kind
    trial: str
    by: str
    via: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    from_checkpoint: bool = False
    clone: str = ""
    state: State = "asked"
    why: str = ""

    @property
    def words(self) -> str:
        """What its user is told of it."""
        if self.state == "refused":
            return self.why
        words = {
            "stop": f"trial {self.trial} ends at its next result",
            "keep": f"trial {self.trial} goes on when the algorithm wants to stop it",
            "clone": f"trial {self.clone} is a clone of trial {self.trial}",
        }[self.kind]
        return f"{words}; {self.why}" if self.why else words


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


class Steering:
    """All acts of one run. See the module. An event that cannot be true fails: the shell has an error."""

    def __init__(self) -> None:
        #: By id, each as it is now.
        self.acts: dict[str, Act] = {}

    def asked(self, act: Act, facts: Facts) -> list[Act]:
        """A user wants this. ``facts``: of its trial. If it is ``asked`` then, the shell must carry the act out.

        It keeps the act with its trial, or makes the clone, and has Tune save that. Then it calls `carried_out`, or
        `failed` if nothing has changed.
        """
        if known := self.acts.get(act.id):
            if known.state == "asked":
                raise RuntimeError(f"{act} is asked for again before it was carried out")
            return []
        self.acts[act.id] = act
        why = self._why_not(act, facts)
        return [act, *([self._go(act, "refused", "asked", why=why)] if why else [])]

    def carried_out(self, name: str, clone: str = "", unsaved: str = "") -> Act:
        """``clone``: the id of the new trial, of a clone. ``unsaved``: why Tune could not save it."""
        why = unsaved and f"a restored run may not know of it, as Tune cannot save its state: {unsaved}"
        return self._go(self.acts.get(name), "done" if clone else "taken", "carried_out", clone=clone, why=why)

    def failed(self, name: str, why: str) -> Act:
        """The act could not be carried out."""
        return self._go(self.acts.get(name), "refused", "failed", why=why)

    def restored(self, act: Act) -> None:
        """An earlier driver has saved this act."""
        self.acts.setdefault(act.id, act)

    def stop_meant(self, trial: str) -> Act | None:
        """The algorithm wants to stop the trial. With an act, the trial goes on, and has ended for the algorithm."""
        kept = self._has(trial, "keep", "taken")
        return kept and self._go(kept, "done", "stop_meant", why="the algorithm wanted to stop it, and it goes on")

    def ended(self, trial: str) -> list[Act]:
        """The trial has ended for good, whatever the reason."""
        stop, keep = self._has(trial, "stop", "taken"), self._has(trial, "keep", "taken")
        why = "it ended, and the algorithm had not wanted to stop it"
        return [self._go(act, "done", "ended", why=words) for act, words in ((stop, ""), (keep, why)) if act]

    @property
    def stops(self) -> set[str]:
        """The trials that end at their next result."""
        return {act.trial for act in self.acts.values() if (act.kind, act.state) == ("stop", "taken")}

    def goes_on_alone(self, trial: str) -> bool:
        """Whether the algorithm has wanted to stop a trial that is kept: it hears nothing of the trial any more."""
        return self._has(trial, "keep", "done") is not None

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

    def _go(self, act: Act | None, state: State, cause: str, **more: str) -> Act:
        if act is None or cause not in STATES.get((act.state, state), "").split(", "):
            raise RuntimeError(f"{cause} cannot make {act} {state}")
        self.acts[act.id] = replace(act, state=state, **more)  # type: ignore[arg-type]
        return self.acts[act.id]

    def _has(self, trial: str, kind: Kind, state: State) -> Act | None:
        """The trial's act of this kind that has this state."""
        wanted = (trial, kind, state)
        return next((act for act in self.acts.values() if (act.trial, act.kind, act.state) == wanted), None)


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
