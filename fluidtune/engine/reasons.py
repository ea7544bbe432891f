"""Why the engine gives an instruction: a closed list of reasons, and the numbers that decided.

Nothing is decided here. The modules that decide make a `Why` with each instruction. A new reason is a member of
`Reason`, used where it decides, a row in docs/engine.md, and a scenario in tests/engine/test_reasons.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Reason(Enum):
    """Each member: the instructions that it may have, what it means, the same with numbers, and their names.

    In the second text ``{name:noun}`` is the number with the noun ("3 trials"), ``{name:s}`` a duration, ``{name:%}`` a
    part.
    """

    #: Names of the instructions; a `Resume` is a `Start`.
    instructions: tuple[str, ...]
    #: One line for the documentation.
    meaning: str
    #: The sentence of one case.
    template: str
    #: Names of its numbers, whose units are in docs/engine.md.
    numbers: tuple[str, ...]

    FREE_DEVICE = (("Start",), "A device was idle.", "{idle:device} idle, {waiting:trial} waiting", ("waiting", "idle"))
    SPARE_DEVICES = (
        ("Start",),
        "More devices were idle than the waiting trials need.",
        "{idle:device} idle, {waiting:trial} waiting; {left_to:s} left on {to:device}, {left:s} on one",
        ("waiting", "idle", "to", "left", "left_to"),
    )
    NODE_FREE = (
        ("Start",),
        "One node had all the devices that the trial needs at once.",
        "one node had the {to:device} that it needs at once, {waiting:trial} waiting",
        ("waiting", "to"),
    )
    OPEN_SHARE = (
        ("Start",),
        "No device was idle, and a divided one had a free share.",
        "a device that is divided for {slots:trial} had room, and now has {there:trial}; {waiting:trial} waiting",
        ("waiting", "there", "slots"),
    )
    PACKING = (
        ("Start",),
        "No device was idle, and more trials may share a device than were on this one.",
        "no device idle, {waiting:trial} waiting, and up to {limit:trial} may share a device: it now has {there}",
        ("waiting", "there", "limit"),
    )
    PACKING_SAMPLED = (
        ("Start",),
        "No device was idle, and it is measured on one device whether one trial more than c pays.",
        "no device idle, {waiting:trial} waiting; it is measured if {tried:trial} on one device pay, so far {limit}",
        ("waiting", "tried", "limit"),
    )
    IDLE_DEVICES = (
        ("Resize",),
        "Devices were idle, no trial waited for them, and the trial will be done sooner with them.",
        "{idle:device} idle, no trial waits for them; {left_to:s} left on {to:device} instead of {left:s} on {width},"
        " and a resize costs {resize:s}",
        ("idle", "width", "to", "left", "left_to", "resize"),
    )
    WAITING_TRIALS = (
        ("Resize",),
        "Waiting trials lack devices, and the trial needs fewer device-seconds when it is narrower, or its end is"
        " unknown.",
        "{waiting:trial} waiting, for which {wanted:device} lacked; {left_to:s} left on {to:device} instead of {left:s}"
        " on {width}",
        ("waiting", "wanted", "width", "to", "left", "left_to"),
    )
    BALANCE = (
        ("Resize",),
        "Trials that would end later at their widths lack devices (DynamicFluid), and the trial needs fewer"
        " device-seconds when it is narrower.",
        "trials that would end later at their widths can use its devices; {left_to:s} left on {to:device} instead of"
        " {left:s} on {width}",
        ("width", "to", "left", "left_to"),
    )
    SLOWER = (
        ("Resize",),
        "The trial turned out slower at its width than at a smaller one.",
        "an iteration takes {seconds:s} on {width:device}, and {seconds_to:s} on {to}",
        ("width", "to", "seconds", "seconds_to"),
    )
    GROWTH_ENDED = (
        ("Resize",),
        "Several workers do not help the trial.",
        "several workers do not help it",
        ("width", "to"),
    )
    LEAVING_DEVICE = (
        ("Resize", "Suspend"),
        "Devices of the trial will be lost soon, as at the end of a lease, on a node that Ray drains, or when the "
        "driver is to end.",
        "{leaving} of its {width:device} will be lost soon",
        ("width", "leaving"),
    )
    PACKING_REJECTED = (
        ("Suspend",),
        "It was measured that one trial more on the device does not pay.",
        "beside others an iteration takes {ratio} times as long as the {alone:s} alone: the last of {tried:trial} adds"
        " {benefit:%} of a device, and above {least:%} is worth it",
        ("tried", "samples", "alone", "ratio", "benefit", "least"),
    )
    PACKING_HOPELESS = (
        ("Suspend",),
        "One iteration beside the other trials of the device was far too slow.",
        "one iteration among {tried:trial} took {ratio} times as long as the {alone:s} alone, and {most} times is the"
        " limit",
        ("tried", "alone", "ratio", "most"),
    )
    OWN_DEVICE = (
        ("Suspend",),
        "A device was idle, and the trial, which shares one, will be done sooner on its own.",
        "{idle:device} idle; {left_to:s} left on {to:device} of its own instead of {left:s} at its share of {width}",
        ("idle", "width", "to", "left", "left_to"),
    )
    TRIAL_LEFT = (
        ("Release",),
        "Tune paused or ended the trial, or its suspension is done.",
        "the trial has left its devices",
        (),
    )
    RESIZE_DONE = (("Release",), "A resize to fewer devices is done.", "the trial now has {to:device}", ("to",))
    RESIZE_FAILED = (
        ("Release",),
        "A resize was not done, and the devices that were promised are free again.",
        "the trial stays on {to:device}",
        ("to",),
    )
    WORKER_LOST = (
        ("Release",),
        "The trial lost a worker: it goes on with the others, or waits to start again.",
        "the trial lost a worker, and has {to:device} now",
        ("to",),
    )
    DEVICE_LOST = (
        ("Release", "Resize"),
        "One of the trial's devices is gone: it goes on with the others, or leaves them if its first worker was there.",
        "the trial lost a device",
        (),
    )

    def __init__(self, instructions: tuple[str, ...], meaning: str, template: str, numbers: tuple[str, ...]) -> None:
        self.instructions, self.meaning, self.template, self.numbers = instructions, meaning, template, numbers

    @property
    def label(self) -> str:
        """Its name in the event log, such as "waiting_trials"."""
        return self.name.lower()


class _Number(float):
    """A number in a sentence; see `Reason`."""

    def __format__(self, spec: str) -> str:
        if spec == "s":
            return f"{float(self):.3g} s"
        if spec == "%":
            return f"{float(self):.0%}"
        number = f"{float(self):.3g}"
        return number if not spec else f"{number} {spec}" + ("" if number == "1" else "s")


@dataclass(frozen=True)
class Why:
    """Why an instruction was given: a reason, and by name the numbers that decided, in the order of `Reason.numbers`.

    Raises ValueError for other numbers than those of the reason.
    """

    reason: Reason
    numbers: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        given = tuple(name for name, _ in self.numbers)
        if given != self.reason.numbers:
            raise ValueError(f"the reason {self.reason.label!r} has the numbers {self.reason.numbers}, not {given}")

    @property
    def words(self) -> str:
        """The reason and its numbers in words, for people."""
        return self.reason.template.format_map({name: _Number(number) for name, number in self.numbers})

    def as_fields(self) -> dict[str, Any]:
        """The fields of an event in the event log that say why."""
        return {"reason": self.words, "why": self.reason.label, "numbers": dict(self.numbers)}


def because(reason: Reason, **numbers: float) -> Why:
    """The reason with its numbers, given in any order. Raises ValueError if they are not those of the reason."""
    known = tuple((name, float(numbers.pop(name))) for name in reason.numbers if name in numbers)
    return Why(reason, (*known, *numbers.items()))
